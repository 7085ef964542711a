// The sum over the chosen experts of gate * (x @ w.T), in MLX's order: products and sums rounded to bfloat16, one by one.
namespace straightline {

// A block takes TILE rows, a warp of it those of one expert. each: what they give.
DEVICE void quantized_experts_sum(
    const T* x, const unsigned* chosen, const T* gates, const unsigned* w, const T* scales, const T* biases, T* out,
    T* each, Place here) {
  const int lane = here.tid & 31, turn = here.tid >> 5;
  T result[2];
  tile(x + turn * INPUTS, w, scales, biases, size_t(chosen[turn]) * OUTPUTS + here.block * TILE, lane, result);
  if (lane < 4) {
    each[turn * TILE + 2 * lane] = result[0];
    each[turn * TILE + 2 * lane + 1] = result[1];
  }
  barrier();
  if (here.tid >= TILE) return;
  T sum = narrow(0.0f);
  UNROLL
  for (int i = 0; i < TOP_K; i++) sum = add(sum, mul(gates[i], each[i * TILE + here.tid]));
  out[here.block * TILE + here.tid] = sum;
}

} // namespace straightline
