// qkv_rope of one token whose k and v go where the cache keeps them: row (position + ring[0]) mod ring[1] of keys and
// values, [KV_HEADS, ring[1], HEAD_DIM]. MLX knows these as inputs: whoever reads them must depend on q, and `after`,
// which is not read, is what must have read the row before.
namespace straightline {

// Where head `index` of the token goes.
template <typename P, typename R>
DEVICE T* place_of(int index, P position, const T* keys, const T* values, R ring, T* q) {
  if (index < HEADS) return q + index * HEAD_DIM;
  const int rows = at(ring, 1), row = (at(position, 0) + at(ring, 0)) % rows;
  const int kv_head = (index - HEADS) % KV_HEADS;
  const T* buffer = index < HEADS + KV_HEADS ? keys : values;
  return const_cast<T*>(buffer) + (size_t(kv_head) * rows + row) * HEAD_DIM;
}

template <typename X, typename QW, typename KW, typename P, typename F, typename R, typename A>
DEVICE void qkv_rope_into(
    X qkv, QW q_norm, KW k_norm, P position, F freqs, const T* keys, const T* values, R ring, A after, T* q,
    SHARED_MEMORY float* sums, SHARED_MEMORY T* head, Place here) {
  const int index = here.block;
  T* to = place_of(index, position, keys, values, ring, q);
  head_rope(qkv + source_of(index) * HEAD_DIM, q_norm, k_norm, position, freqs, to, sums, head, here);
}

} // namespace straightline
