// Rows of x @ w.T for affine 4- or 8-bit weights, with the arithmetic of MLX's qmv_kernel (CUDA only): one warp a row
// of w, LANE weights a lane and step, every weight q * scale + bias in bfloat16 with one rounding. 4-bit: LANE
// bfloat16 sums a lane. 8-bit: LANE float sums. Then one float sum over a lane's, and a butterfly.
namespace straightline {

using Pair = __nv_bfloat162;

DEVICE Pair as_pair(unsigned bits) { return *reinterpret_cast<const Pair*>(&bits); }

DEVICE Pair weight(Pair q, T scale, T bias) { return __hfma2(q, __bfloat162bfloat162(scale), __bfloat162bfloat162(bias)); }

// (x & 0x000f000f) | 0x43004300, which the compiler would do in two steps.
DEVICE unsigned nibbles(unsigned x) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "r"(0x000f000fu), "r"(0x43004300u));
  return result;
}

// 4-bit: 0x4300 is 128, whose last seven bits are units. Two weights of a byte go to two halves of a word at once.
struct Sums4 {
  Pair pair[8];

  DEVICE void clear() {
    UNROLL
    for (int i = 0; i < 8; i++) pair[i] = __float2bfloat162_rn(0.0f);
  }

  DEVICE void step(const uint4* x, uint2 w, T scale, T bias) {
    const uint4 low = x[0], high = x[1];
    const unsigned values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const unsigned high_of[2] = {w.x >> 4, w.y >> 4};
    UNROLL
    for (int i = 0; i < 8; i++) {
      const unsigned byte = __byte_perm(i < 4 ? w.x : w.y, high_of[i / 4], 0x4400 + 0x1111 * (i & 3));
      const Pair q = __hsub2_rn(as_pair(nibbles(byte)), __float2bfloat162_rn(128.0f));
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

// The rows of weights that a warp takes at once, and what each of them gives with x, of INPUTS values.
template <int INPUTS, int BITS, int GROUP, int ROWS, int UNROLLED>
struct Matvec {
  using Sums = typename Chosen<BITS == 4>::Sums;
  static CONSTANT int TAKEN = ROWS;
  static CONSTANT int LANE = BITS == 4 ? 16 : 8;
  static CONSTANT int STEP = 32 * LANE; // values of x that a warp takes in a step
  static CONSTANT int STEPS = INPUTS / STEP;
  static CONSTANT int REST = INPUTS % STEP / LANE; // lanes of a last, partial step

  const uint2* packed[ROWS];
  const T *scale[ROWS], *bias[ROWS];

  DEVICE void set(int r, const unsigned* w, const T* scales, const T* biases, size_t row, int lane) {
    packed[r] = reinterpret_cast<const uint2*>(w + row * (INPUTS * BITS / 32)) + lane;
    scale[r] = scales + row * (INPUTS / GROUP) + lane * LANE / GROUP;
    bias[r] = biases + row * (INPUTS / GROUP) + lane * LANE / GROUP;
  }

  DEVICE void times(const T* x, int lane, T* result) const {
    const uint4* values = reinterpret_cast<const uint4*>(x) + lane * (LANE / 8);
    Sums sums[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) sums[r].clear();
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; step++) add(sums, values, step);
    if (REST > 0 && lane < REST) add(sums, values, STEPS);
    UNROLL
    for (int r = 0; r < ROWS; r++) result[r] = narrow(warp_sum(sums[r].total()));
  }

  DEVICE void add(Sums* sums, const uint4* values, int step) const {
    UNROLL
    for (int r = 0; r < ROWS; r++)
      sums[r].step(
          values + step * (STEP / 8), __ldg(packed[r] + step * 32), scale[r][step * (STEP / GROUP)],
          bias[r][step * (STEP / GROUP)]);
  }
};

} // namespace straightline
