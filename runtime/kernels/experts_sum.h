// The sum over the chosen experts of gate * (x @ w.T), in MLX's order: products and sums rounded to bfloat16, one by one.
namespace straightline {

// A warp takes one row of w of every expert: ROWS of them.
DEVICE void quantized_experts_sum(
    const T* x, const unsigned* chosen, const T* gates, const unsigned* w, const T* scales, const T* biases, T* out,
    Place here) {
  const int lane = here.tid & 31, row = here.block * (BLOCK / 32) + (here.tid >> 5);
  if (row >= OUTPUTS) return;
  Rows rows;
  UNROLL
  for (int r = 0; r < ROWS; r++) rows.set(r, w, scales, biases, size_t(chosen[r]) * OUTPUTS + row, lane);
  T result[ROWS];
  rows.times(x, lane, result);
  if (lane != 0) return;
  T sum = narrow(0.0f);
  UNROLL
  for (int r = 0; r < ROWS; r++) sum = add(sum, mul(gates[r], result[r]));
  out[row] = sum;
}

} // namespace straightline
