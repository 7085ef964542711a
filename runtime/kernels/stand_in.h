// In the place of the headers that MLX puts before a kernel, where straightline compiles it: what kernels use of them,
// as MLX spells it (every other line of those costs a second and changes nothing).
#ifndef STRAIGHTLINE_STAND_IN
#define STRAIGHTLINE_STAND_IN
#include <cuda_bf16.h>

using int32_t = int;
using int64_t = long;
using uint32_t = unsigned int;

namespace cooperative_groups {}

namespace mlx::core::cu {

struct Shape {
  int32_t of[10];
  __device__ const int32_t& operator[](int axis) const { return of[axis]; }
};

struct Strides {
  int64_t of[10];
  __device__ const int64_t& operator[](int axis) const { return of[axis]; }
};

struct Power {
  __device__ __nv_bfloat16 operator()(__nv_bfloat16 x, __nv_bfloat16 y) {
    return __float2bfloat16(powf(__bfloat162float(x), __bfloat162float(y)));
  }
};

struct Tanh {
  __device__ __nv_bfloat16 operator()(__nv_bfloat16 x) { return __float2bfloat16(tanhf(__bfloat162float(x))); }
};

} // namespace mlx::core::cu
#endif
