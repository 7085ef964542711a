// geglu of both products of one token with the experts that are chosen: a line of the grid an expert.
namespace straightline {

// A block takes TILE rows: its first warp of gate, the second of up. both: what they give.
DEVICE void quantized_experts(
    const T* x, const unsigned* chosen, const unsigned* gate, const T* gate_scales, const T* gate_biases,
    const unsigned* up, const T* up_scales, const T* up_biases, T* out, T* both, Place here) {
  const int lane = here.tid & 31, half = here.tid >> 5;
  const size_t first = size_t(chosen[here.row]) * OUTPUTS + here.block * TILE;
  T result[2];
  tile(
      x, half ? up : gate, half ? up_scales : gate_scales, half ? up_biases : gate_biases, first, lane, result);
  if (lane < 4) {
    both[half * TILE + 2 * lane] = result[0];
    both[half * TILE + 2 * lane + 1] = result[1];
  }
  barrier();
  if (here.tid < TILE) out[here.row * OUTPUTS + here.block * TILE + here.tid] = geglu(both[here.tid], both[TILE + here.tid]);
}

} // namespace straightline
