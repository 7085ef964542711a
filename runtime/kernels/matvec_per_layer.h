// gelu_approx(x @ w.T) * per_layer[:, :, layer, :], the product rounded before the gate; per_layer holds LAYERS lines.
namespace straightline {

DEVICE void quantized_per_layer_gate(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* per_layer, const int* layer, T* out,
    Place here) {
  const int lane = here.tid & 31, row = first_of(here);
  if (row >= OUTPUTS) return;
  Rows rows;
  rows.set(0, w, scales, biases, row, lane);
  T result[1];
  rows.times(x, lane, result);
  if (lane == 0) out[row] = gelu_times(result[0], per_layer[at(layer, 0) * OUTPUTS + row]);
}

} // namespace straightline
