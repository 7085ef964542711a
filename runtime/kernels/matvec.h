// x @ w.T for one row and affine 4- or 8-bit weights, with the arithmetic of MLX's qmv_kernel (CUDA only): one warp
// a row of w, LANE weights a lane and step, every weight q * scale + bias in bfloat16 with one rounding. 4-bit: LANE
// bfloat16 sums a lane. 8-bit: LANE float sums. Then one float sum over a lane's, and a butterfly.
namespace straightline {

using Pair = __nv_bfloat162;

CONSTANT int LANE = BITS == 4 ? 16 : 8;
CONSTANT int STEP = 32 * LANE; // values of x that a warp takes in a step
CONSTANT int STEPS = INPUTS / STEP;
CONSTANT int REST = INPUTS % STEP / LANE; // lanes of a last, partial step

DEVICE Pair as_pair(unsigned bits) { return *reinterpret_cast<const Pair*>(&bits); }

DEVICE Pair weight(Pair q, T scale, T bias) { return __hfma2(q, __bfloat162bfloat162(scale), __bfloat162bfloat162(bias)); }

// 4-bit: 0x4300 is 128, whose last seven bits are units.
struct Sums4 {
  Pair pair[8];

  DEVICE void clear() {
    UNROLL
    for (int i = 0; i < 8; i++) pair[i] = __float2bfloat162_rn(0.0f);
  }

  DEVICE void step(const uint4* x, uint2 w, T scale, T bias) {
    const uint4 low = x[0], high = x[1];
    const unsigned values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    UNROLL
    for (int i = 0; i < 8; i++) {
      const unsigned byte = (i < 4 ? w.x : w.y) >> (8 * (i & 3));
      const Pair q = __hsub2_rn(as_pair((byte & 0xfu) | ((byte >> 4 & 0xfu) << 16) | 0x43004300u), __float2bfloat162_rn(128.0f));
      pair[i] = __hfma2(as_pair(values[i]), weight(q, scale, bias), pair[i]);
    }
  }

  DEVICE float total() const {
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < 8; i++) sum = wide_add(wide_add(sum, __low2float(pair[i])), __high2float(pair[i]));
    return sum;
  }
};

// 8-bit: 0x4b000000 is 2^23, whose last bits are units; every byte is exact in bfloat16.
struct Sums8 {
  float value[8];

  DEVICE void clear() {
    UNROLL
    for (int i = 0; i < 8; i++) value[i] = 0.0f;
  }

  DEVICE static float byte(unsigned w, int i) {
    return wide_add(__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)), -8388608.0f);
  }

  DEVICE void step(const uint4* x, uint2 w, T scale, T bias) {
    const uint4 row = x[0];
    const unsigned values[4] = {row.x, row.y, row.z, row.w};
    UNROLL
    for (int i = 0; i < 4; i++) {
      const unsigned word = i < 2 ? w.x : w.y;
      const int first = 2 * (i & 1);
      const Pair q = weight(__floats2bfloat162_rn(byte(word, first), byte(word, first + 1)), scale, bias);
      const Pair two = as_pair(values[i]);
      value[2 * i] = wide_fma(__low2float(two), __low2float(q), value[2 * i]);
      value[2 * i + 1] = wide_fma(__high2float(two), __high2float(q), value[2 * i + 1]);
    }
  }

  DEVICE float total() const {
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < 8; i++) sum = wide_add(sum, value[i]);
    return sum;
  }
};

template <bool FOUR>
struct Chosen {
  using Sums = Sums4;
};
template <>
struct Chosen<false> {
  using Sums = Sums8;
};
using Sums = typename Chosen<BITS == 4>::Sums;

// ROWS rows of w a warp: neighbours, or with GLU the gate row and the up row of one output.
DEVICE void quantized_matvec(const T* x, const unsigned* w, const T* scales, const T* biases, T* out, Place here) {
  const int lane = here.tid & 31, warp = here.tid >> 5;
  const int first = (here.block * (BLOCK / 32) + warp) * (GLU ? 1 : ROWS);
  if (first >= (GLU ? OUTPUTS / 2 : OUTPUTS)) return;

  Sums sums[ROWS];
  const uint2* packed[ROWS];
  const T *scale[ROWS], *bias[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    int row = GLU ? first + r * (OUTPUTS / 2) : first + r;
    if (row >= OUTPUTS) row = first; // a last, odd row: done twice, written once
    packed[r] = reinterpret_cast<const uint2*>(w + size_t(row) * (INPUTS * BITS / 32)) + lane;
    scale[r] = scales + size_t(row) * (INPUTS / GROUP) + lane * LANE / GROUP;
    bias[r] = biases + size_t(row) * (INPUTS / GROUP) + lane * LANE / GROUP;
    sums[r].clear();
  }
  const uint4* values = reinterpret_cast<const uint4*>(x) + lane * (LANE / 8);

#pragma unroll UNROLLED
  for (int step = 0; step < STEPS; step++) {
    UNROLL
    for (int r = 0; r < ROWS; r++)
      sums[r].step(
          values + step * (STEP / 8), __ldg(packed[r] + step * 32), scale[r][step * (STEP / GROUP)],
          bias[r][step * (STEP / GROUP)]);
  }
  if (REST > 0 && lane < REST) {
    UNROLL
    for (int r = 0; r < ROWS; r++)
      sums[r].step(
          values + STEPS * (STEP / 8), __ldg(packed[r] + STEPS * 32), scale[r][STEPS * (STEP / GROUP)],
          bias[r][STEPS * (STEP / GROUP)]);
  }

  T result[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) result[r] = narrow(warp_sum(sums[r].total()));
  if (lane != 0) return;
  finish(result, out, first);
}

} // namespace straightline
