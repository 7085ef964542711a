// The product that gives the router's scores, and what it chooses by them, in one block: x @ w.T, then `router`.
namespace straightline {

DEVICE void routed(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* expert_scales, unsigned* chosen, T* gates,
    T* best, T* scores, Place here) {
  const int lane = here.tid & 31;
  for (int first = (here.tid >> 5) * ROWS; first < OUTPUTS; first += (BLOCK / 32) * ROWS) {
    Rows rows;
    UNROLL
    for (int r = 0; r < ROWS; r++) rows.set(r, w, scales, biases, min(first + r, OUTPUTS - 1), lane);
    T result[ROWS];
    rows.times(x, lane, result);
    UNROLL
    for (int r = 0; r < ROWS; r++)
      if (lane == 0 && first + r < OUTPUTS) scores[first + r] = result[r];
  }
  barrier();
  router(scores, expert_scales, chosen, gates, best, here);
}

} // namespace straightline
