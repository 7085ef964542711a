// The inverse root mean square of N values spread over a block, in the order in which MLX's rms_norm adds them up:
// one running fma a thread, a butterfly over each warp, a butterfly over the sums of the WARPS that hold values.
namespace straightline {

DEVICE float squares(const LOCAL Vec& values, float sum) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    const float x = wide(values.v[i]);
    sum = wide_fma(x, x, sum);
  }
  return sum;
}

// `sums` holds WARPS values that nothing else uses.
template <int N, int WARPS>
DEVICE float inverse_rms(float sum, SHARED_MEMORY float* sums, int tid) {
  const int lane = tid & 31, warp = tid >> 5;
  sum = warp_sum(sum);
  if (lane == 0 && warp < WARPS) sums[warp] = sum;
  barrier();
  sum = warp_sum(lane < WARPS ? sums[lane] : 0.0f);
  return wide_rsqrt(wide_add(wide_div(sum, float(N)), EPS));
}

DEVICE T normed(T x, float inverse) { return narrow(wide_mul(wide(x), inverse)); }

DEVICE Vec zeros() {
  Vec values;
  UNROLL
  for (int i = 0; i < READS; i++) values.v[i] = narrow(0.0f);
  return values;
}

} // namespace straightline
