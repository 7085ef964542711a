// gelu_approx(x) * u, rounded as mlx-lm's two compiled functions round it.
#ifdef __METAL_VERSION__
namespace straightline {

DEVICE T cube(T x) { return narrow(metal::pow(wide(x), 3.0f)); }
DEVICE T hyperbolic_tangent(T x) { return narrow(metal::precise::tanh(wide(x))); }
// No contraction: bfloat16 arithmetic goes through float and is rounded after each operation.
DEVICE T fused_or_not(T a, T b, T c) { return add(mul(a, b), c); }

} // namespace straightline
#else
#include "mlx/backend/cuda/device/binary_ops.cuh"
#include "mlx/backend/cuda/device/unary_ops.cuh"

namespace straightline {

DEVICE T cube(T x) { return mlx::core::cu::Power{}(x, narrow(3.0f)); }
DEVICE T hyperbolic_tangent(T x) { return mlx::core::cu::Tanh{}(x); }
DEVICE T fused_or_not(T a, T b, T c) { return __hfma(a, b, c); }

} // namespace straightline
#endif

namespace straightline {

DEVICE T gate(T x, T inner, T u) {
  const T tanh = hyperbolic_tangent(mul(narrow(0.7978845608028654f), inner));
  return mul(mul(mul(narrow(0.5f), x), add(narrow(1.0f), tanh)), u);
}

// mlx-lm's `geglu` is cut after 0.044715 * x**3, into two kernels: the sum rounds a rounded product.
DEVICE T geglu(T x, T u) { return gate(x, add(x, mul(narrow(0.044715f), cube(x))), u); }

// `gelu_approx` alone is cut before it: on CUDA product and sum are one fma.
DEVICE T gelu_times(T x, T u) { return gate(x, fused_or_not(narrow(0.044715f), cube(x), x), u); }

} // namespace straightline
