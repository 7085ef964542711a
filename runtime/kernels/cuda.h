// What the shared text is made of, on CUDA. Every rounding is spelled out: left to itself, ptxas contracts a
// bfloat16 multiply and add into one fma, which rounds once where MLX's separate kernels round twice.
#include <cuda_bf16.h>

#define DEVICE __device__ __forceinline__
#define CONSTANT constexpr
#define LOCAL
#define SHARED_MEMORY
#define SHARED(type, name, count) __shared__ __align__(16) type name[count];
#define UNROLL _Pragma("unroll")
#define HERE straightline::Place{int(blockIdx.x), int(blockIdx.y), int(threadIdx.x)}

namespace straightline {

using T = __nv_bfloat16;
CONSTANT int READS = 8;

// Block along x, row of the batch, thread within the block.
struct Place {
  int block, row, tid;
};

// READS neighbouring values, in one 16-byte access.
struct __align__(16) Vec {
  T v[READS];
};

template <typename P>
DEVICE Vec read(P from, int index) {
  return reinterpret_cast<const Vec*>(from)[index];
}

template <typename P>
DEVICE void write(P to, int index, const Vec& values) {
  reinterpret_cast<Vec*>(to)[index] = values;
}

// One value of a small array.
template <typename V>
DEVICE V at(const V* from, int index) {
  return from[index];
}

DEVICE float wide(T x) { return __bfloat162float(x); }
DEVICE T narrow(float x) { return __float2bfloat16_rn(x); }
DEVICE T mul(T a, T b) { return __hmul_rn(a, b); }
DEVICE T add(T a, T b) { return __hadd_rn(a, b); }
DEVICE float wide_mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float wide_add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float wide_div(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float wide_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float wide_rsqrt(float x) { return rsqrtf(x); }
DEVICE float wide_exp2(float x) { return exp2f(x); }
DEVICE float wide_cos(float x) { return cosf(x); }
DEVICE float wide_sin(float x) { return sinf(x); }

DEVICE void barrier() { __syncthreads(); }

// The sum over a warp, in every lane: the butterfly of cg::reduce.
DEVICE float warp_sum(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) x = wide_add(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

} // namespace straightline
