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

// Head `index` of the row, normed, turned and written to `to`.
template <typename X, typename QW, typename KW, typename P, typename F, typename O>
DEVICE void head_rope(
    X qkv, QW q_norm, KW k_norm, P position, F freqs, O to, SHARED_MEMORY float* sums, SHARED_MEMORY T* head,
    Place here) {
  const int index = here.block, tid = here.tid;
  const bool is_q = index < HEADS, is_v = index >= HEADS + KV_HEADS;
  const int source = K_EQ_V && is_v ? index - KV_HEADS : index;

  const bool holds = tid < HEAD_DIM / READS;
  Vec x = zeros(), weight = zeros();
  if (holds) {
    x = read(qkv + here.row * WIDTH + source * HEAD_DIM, tid);
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

template <typename X, typename QW, typename KW, typename P, typename F, typename O>
DEVICE void qkv_rope(
    X qkv, QW q_norm, KW k_norm, P position, F freqs, O q, O k, O v,
    SHARED_MEMORY float* sums, SHARED_MEMORY T* head, Place here) {
  const int index = here.block, q_row = here.row * HEADS, kv_row = here.row * KV_HEADS;
  O to = q + (q_row + index) * HEAD_DIM;
  if (index >= HEADS) to = k + (kv_row + index - HEADS) * HEAD_DIM;
  if (index >= HEADS + KV_HEADS) to = v + (kv_row + index - HEADS - KV_HEADS) * HEAD_DIM;
  head_rope(qkv, q_norm, k_norm, position, freqs, to, sums, head, here);
}

} // namespace straightline
