// What becomes of the ROWS results of a warp: written as they are.
namespace straightline {

DEVICE void finish(const T* result, T* out, int first) {
  UNROLL
  for (int r = 0; r < ROWS; r++)
    if (first + r < OUTPUTS) out[first + r] = result[r];
}

} // namespace straightline
