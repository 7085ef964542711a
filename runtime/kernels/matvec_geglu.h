// What becomes of the ROWS results of a warp, gates first, then ups: geglu of each pair.
namespace straightline {

DEVICE void finish(const T* result, T* out, int first) {
  UNROLL
  for (int r = 0; r < ROWS / 2; r++)
    if (first + r < OUTPUTS / 2) out[first + r] = geglu(result[r], result[r + ROWS / 2]);
}

} // namespace straightline
