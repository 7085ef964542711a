// The TOP_K largest of COUNT scores, in ascending order, equal ones by their index, as MLX's merge sort leaves them; and
// softmax over them times the scale of each, all in bfloat16, as MLX's softmax of one thread does it.
namespace straightline {

DEVICE T exponential(T x) { return narrow(__expf(wide(x))); }

// One thread an expert, one block a row. `best` holds TOP_K values.
DEVICE void router(const T* scores, const T* scales, unsigned* chosen, T* gates, T* best, Place here) {
  const int own = here.tid;
  scores += here.row * COUNT;
  chosen += here.row * TOP_K;
  gates += here.row * TOP_K;
  const float mine = own < COUNT ? wide(scores[own]) : 0.0f;
  int place = 0;
  if (own < COUNT) {
    for (int other = 0; other < COUNT; other++) {
      const float theirs = wide(scores[other]);
      place += theirs < mine || (theirs == mine && other < own);
    }
    place -= COUNT - TOP_K;
    if (place >= 0) {
      chosen[place] = own;
      best[place] = scores[own];
    }
  }
  barrier();
  if (own >= COUNT || place < 0) return;
  T sum = narrow(0.0f);
  const T most = best[TOP_K - 1];
  UNROLL
  for (int i = 0; i < TOP_K; i++) sum = add(sum, exponential(__hsub_rn(best[i], most)));
  const T inverse = __hdiv(narrow(1.0f), sum);
  gates[place] = mul(mul(exponential(__hsub_rn(best[place], most)), inverse), scales[own]);
}

} // namespace straightline
