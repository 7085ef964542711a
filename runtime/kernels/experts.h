// Products of one token with the experts that are chosen: arrays [experts, rows, ..], a line of the grid an expert.
namespace straightline {

// geglu of gate and up of each expert, which are arrays of their own.
DEVICE void quantized_experts(
    const T* x, const unsigned* chosen, const unsigned* gate, const T* gate_scales, const T* gate_biases,
    const unsigned* up, const T* up_scales, const T* up_biases, T* out, Place here) {
  const int lane = here.tid & 31, first = first_of(here);
  if (first >= WIDTH) return;
  const size_t start = size_t(chosen[here.row]) * WIDTH;
  Rows rows;
  UNROLL
  for (int r = 0; r < FINISHED; r++) {
    const size_t row = start + min(first + r, WIDTH - 1);
    rows.set(r, gate, gate_scales, gate_biases, row, lane);
    rows.set(r + FINISHED, up, up_scales, up_biases, row, lane);
  }
  T result[ROWS];
  rows.times(x, lane, result);
  if (lane == 0) finish(result, out + here.row * WIDTH, first);
}

} // namespace straightline
