// The projections of a token and what `head_rope` makes of them, in one launch: a cluster a head, its first block the
// norm and the turning.
namespace straightline {

using Rows = Matvec<INPUTS, BITS, GROUP, ROWS, UNROLLED>;

// places.of(index): where a head goes.
template <typename P, typename F, typename Places>
DEVICE void joint_head(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* q_norm, const T* k_norm, P position,
    F freqs, Places places, float* sums, T* head, T* raw, Place here) {
  const int index = here.block / CLUSTER, rank = here.block % CLUSTER;
  const size_t first = size_t(source_of(index)) * HEAD_DIM;
  fetch(index < HEADS ? q_norm : k_norm, HEAD_DIM * sizeof(T), rank, here.tid);
  if (USES_FREQS) fetch(freqs, HEAD_DIM / 2 * sizeof(float), rank, here.tid);
  cluster_barrier(); // all blocks are there
  rows_of_cluster<Rows>(x, w, scales, biases, first, HEAD_DIM, rank, here.tid, IntoFirst{raw});
  cluster_barrier();
  if (rank || here.tid >= BLOCK) return;
  head_rope(raw, q_norm, k_norm, position, freqs, places.of(index), sums, head, Place{index, 0, here.tid});
}

struct Results {
  T *q, *k, *v;

  DEVICE T* of(int index) const { return head_of(index, 0, q, k, v); }
};

template <typename P, typename F>
DEVICE void joint_heads(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* q_norm, const T* k_norm, P position,
    F freqs, T* q, T* k, T* v, float* sums, T* head, T* raw, Place here) {
  joint_head(x, w, scales, biases, q_norm, k_norm, position, freqs, Results{q, k, v}, sums, head, raw, here);
}

} // namespace straightline
