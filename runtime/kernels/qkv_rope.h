// q_norm and RoPE, k_norm and RoPE, v_norm, from one joined row of projections; one block a head, one vector a thread.
// Heads lie in the row as q, k, v; with K_EQ_V there is no v part and v is the raw k. KV_HEADS is 0 for a reader.
namespace straightline {

// Turns the pairs (i, i + HEAD_DIM / 2) of one normed head. The product left out of the fma is MLX's.
template <typename P, typename F, typename O>
DEVICE void rotate(SHARED_MEMORY const T* head, P position, F freqs, O to, Place here) {
  const float offset = float(at(position, here.row));
  for (int i = here.tid; i < HEAD_DIM / 2; i += BLOCK) {
    float inverse;
    if (USES_FREQS)
      inverse = wide_div(1.0f, float(freqs[i]));
    else
      inverse = wide_exp2(-wide_mul(wide_div(float(i), float(HEAD_DIM / 2)), LOG2_THETA));
    const float angle = wide_mul(offset, inverse);
    const float c = wide_cos(angle), s = wide_sin(angle);
    const float x1 = wide(head[i]), x2 = wide(head[i + HEAD_DIM / 2]);
    to[i] = narrow(wide_fma(x1, c, -wide_mul(x2, s)));
    to[i + HEAD_DIM / 2] = narrow(wide_fma(x1, s, wide_mul(x2, c)));
  }
}

// Which head of the row a block reads; v may be another's raw values.
DEVICE int source_of(int index) { return K_EQ_V && index >= HEADS + KV_HEADS ? index - KV_HEADS : index; }

// The values `from` of head here.block, normed, turned and written to `to`.
template <typename X, typename QW, typename KW, typename P, typename F, typename O>
DEVICE void head_rope(
    X from, QW q_norm, KW k_norm, P position, F freqs, O to, SHARED_MEMORY float* sums, SHARED_MEMORY T* head,
    Place here) {
  const int index = here.block, tid = here.tid;
  const bool is_q = index < HEADS, is_v = index >= HEADS + KV_HEADS;

  const bool holds = tid < HEAD_DIM / READS;
  Vec x = zeros(), weight = zeros();
  if (holds) {
    x = read(from, tid);
    if (is_q)
      weight = read(q_norm, tid);
    else if (!is_v)
      weight = read(k_norm, tid);
  }
  const float inverse = inverse_rms<HEAD_DIM, WARPS>(squares(x, 0.0f), sums, tid);
  UNROLL
  for (int i = 0; i < READS; i++) {
    const T value = normed(x.v[i], inverse);
    x.v[i] = is_v ? value : mul(weight.v[i], value);
  }
  if (is_v) {
    if (holds) write(to, tid, x);
    return;
  }
  if (holds) write(head, tid, x);
  barrier();
  rotate(head, position, freqs, to, here);
}

// Where head `index` of row `row` goes.
template <typename O>
DEVICE O head_of(int index, int row, O q, O k, O v) {
  if (index < HEADS) return q + (row * HEADS + index) * HEAD_DIM;
  const int kv_head = row * KV_HEADS + (index - HEADS) % (KV_HEADS > 0 ? KV_HEADS : 1);
  return (index < HEADS + KV_HEADS ? k : v) + kv_head * HEAD_DIM;
}

template <typename X, typename QW, typename KW, typename P, typename F, typename O>
DEVICE void qkv_rope(
    X qkv, QW q_norm, KW k_norm, P position, F freqs, O q, O k, O v,
    SHARED_MEMORY float* sums, SHARED_MEMORY T* head, Place here) {
  X from = qkv + here.row * WIDTH + source_of(here.block) * HEAD_DIM;
  O to = head_of(here.block, here.row, q, k, v);
  head_rope(from, q_norm, k_norm, position, freqs, to, sums, head, here);
}

} // namespace straightline
