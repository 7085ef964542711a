// x @ w.T for one row x, or with GLU geglu of its first half and its second.
namespace straightline {

// ROWS rows of w a warp: neighbours, or with GLU half of them of gate and the same of up.
DEVICE void quantized_matvec(const T* x, const unsigned* w, const T* scales, const T* biases, T* out, Place here) {
  const int lane = here.tid & 31, first = first_of(here);
  if (first >= RESULTS) return;
  Rows rows;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int row = min(first + r % FINISHED, RESULTS - 1); // beyond the last: done twice, written once
    rows.set(r, w, scales, biases, row + (r / FINISHED) * RESULTS, lane);
  }
  T result[ROWS];
  rows.times(x, lane, result);
  if (lane == 0) finish(result, out, first);
}

} // namespace straightline
