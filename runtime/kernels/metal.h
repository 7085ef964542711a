// What the shared text is made of, on Metal, after MLX's Metal kernels. Never run by its authors: only the self-check
// on the device decides whether a kernel made of it is used.
#pragma clang fp contract(off)

#define DEVICE METAL_FUNC
#define CONSTANT constant constexpr
#define LOCAL thread
#define SHARED_MEMORY threadgroup
#define SHARED(type, name, count) threadgroup type name[count];
#define UNROLL _Pragma("clang loop unroll(full)")

namespace straightline {

using T = bfloat16_t;
CONSTANT int READS = 4; // RMS_N_READS

struct Place {
  int block, row, tid;
};

struct Vec {
  T v[READS];
};

template <typename P>
DEVICE Vec read(P from, int index) {
  Vec values;
  UNROLL
  for (int i = 0; i < READS; i++) values.v[i] = from[index * READS + i];
  return values;
}

template <typename P>
DEVICE void write(P to, int index, const LOCAL Vec& values) {
  UNROLL
  for (int i = 0; i < READS; i++) to[index * READS + i] = values.v[i];
}

// MLX hands a small array over as a pointer into either address space, and an array of no dimensions as its value.
template <typename V>
DEVICE V at(const device V* from, int index) {
  return from[index];
}
template <typename V>
DEVICE V at(const constant V* from, int index) {
  return from[index];
}
DEVICE int at(int value, int) { return value; }

DEVICE float wide(T x) { return static_cast<float>(x); }
DEVICE T narrow(float x) { return static_cast<T>(x); }
// A bfloat16 product is exact in float, and a sum rounds alike by way of it.
DEVICE T mul(T a, T b) { return narrow(wide(a) * wide(b)); }
DEVICE T add(T a, T b) { return narrow(wide(a) + wide(b)); }
DEVICE float wide_mul(float a, float b) { return a * b; }
DEVICE float wide_add(float a, float b) { return a + b; }
DEVICE float wide_div(float a, float b) { return a / b; }
DEVICE float wide_fma(float a, float b, float c) { return metal::fma(a, b, c); }
DEVICE float wide_rsqrt(float x) { return metal::precise::rsqrt(x); }
DEVICE float wide_exp2(float x) { return metal::exp2(x); }
DEVICE float wide_cos(float x) { return metal::fast::cos(x); }
DEVICE float wide_sin(float x) { return metal::fast::sin(x); }

DEVICE void barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }

DEVICE float warp_sum(float x) { return simd_sum(x); }

} // namespace straightline
