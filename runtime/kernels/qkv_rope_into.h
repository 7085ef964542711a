// qkv_rope of one token whose k and v go where the cache keeps them: row (position + ring[0]) mod ring[1] of keys and
// values. A head's rows, and a token's, lie as far apart, in rows, as ring[2] and ring[3] say of keys and ring[4] and
// ring[5] of values. MLX knows these as inputs: whoever reads them must depend on q, and `after`, which is not read, is
// what must have read the row before.
namespace straightline {

// Where a head of the token goes. Read before it is needed: that takes as long as a product.
struct Places {
  const T *keys, *values;
  T* q;
  int position, shift, rows, head_step, row_step;

  DEVICE T* of(int index) const {
    if (index < HEADS) return q + index * HEAD_DIM;
    const T* buffer = index < HEADS + KV_HEADS ? keys : values;
    const int row = (position + shift) % rows, kv_head = (index - HEADS) % KV_HEADS;
    return const_cast<T*>(buffer) + (size_t(kv_head) * head_step + size_t(row) * row_step) * HEAD_DIM;
  }
};

// For head `index`.
template <typename P, typename R>
DEVICE Places places(int index, const T* keys, const T* values, T* q, P position, R ring) {
  const int steps = index < HEADS + KV_HEADS ? 2 : 4;
  return Places{keys, values, q, at(position, 0), at(ring, 0), at(ring, 1), at(ring, steps), at(ring, steps + 1)};
}

template <typename X, typename QW, typename KW, typename P, typename F, typename R, typename A>
DEVICE void qkv_rope_into(
    X qkv, QW q_norm, KW k_norm, P position, F freqs, const T* keys, const T* values, R ring, A after, T* q,
    SHARED_MEMORY float* sums, SHARED_MEMORY T* head, Place here) {
  T* to = places(here.block, keys, values, q, position, ring).of(here.block);
  head_rope(qkv + source_of(here.block) * HEAD_DIM, q_norm, k_norm, position, freqs, to, sums, head, here);
}

} // namespace straightline
