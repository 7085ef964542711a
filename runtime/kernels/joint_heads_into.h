// As `joint_heads`, k and v going where `qkv_rope_into` puts them.
namespace straightline {

template <typename P, typename F, typename R, typename A>
DEVICE void joint_heads_into(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* q_norm, const T* k_norm, P position,
    F freqs, const T* keys, const T* values, R ring, A after, T* q, float* sums, T* head, T* raw, Place here) {
  const Places to = places(here.block / CLUSTER, keys, values, q, position, ring);
  joint_head(x, w, scales, biases, q_norm, k_norm, position, freqs, to, sums, head, raw, here);
}

} // namespace straightline
