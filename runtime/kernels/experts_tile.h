// Eight rows of x @ w.T a warp, for affine 4-bit weights, with the arithmetic of MLX's qmm kernels, which gather_qmm
// takes from eight experts on (CUDA only): every weight q * scale + bias in bfloat16 with one rounding, the tensor
// cores' product of 16 columns at a time, in their order, onto one float sum, and that to bfloat16.
namespace straightline {

using Pair = __nv_bfloat162;

CONSTANT int TILE = 8;
CONSTANT int STEP = 64; // columns that are read at once

DEVICE unsigned bits_of(Pair pair) { return *reinterpret_cast<const unsigned*>(&pair); }

// Two neighbouring weights, of which `selector` takes the byte: 0x4300 is 128, whose last seven bits are units.
DEVICE unsigned weights(unsigned word, unsigned selector, T scale, T bias) {
  const unsigned q = (__byte_perm(word, word >> 4, selector) & 0x000f000fu) | 0x43004300u;
  const Pair whole = __hsub2_rn(*reinterpret_cast<const Pair*>(&q), __float2bfloat162_rn(128.0f));
  return bits_of(__hfma2(whole, __bfloat162bfloat162(scale), __bfloat162bfloat162(bias)));
}

// result[column] of rows first .. first + 7 of w, the two columns that a lane of four holds: 2 * (lane % 4) and the next.
DEVICE void tile(
    const T* x, const unsigned* w, const T* scales, const T* biases, size_t first, int lane, T* result) {
  const int quarter = lane & 3;
  const size_t row = first + (lane >> 2);
  const unsigned selector = 0x4400u + 0x1111u * quarter;
  const unsigned* values = reinterpret_cast<const unsigned*>(x) + quarter;
  const uint4* packed = reinterpret_cast<const uint4*>(w + row * (INPUTS / 8));
  scales += row * (INPUTS / GROUP);
  biases += row * (INPUTS / GROUP);
  float sums[4] = {};
#pragma unroll 4
  for (int step = 0; step < INPUTS / STEP; step++) {
    const uint4 low = __ldg(packed + 2 * step), high = __ldg(packed + 2 * step + 1);
    const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    UNROLL
    for (int part = 0; part < 4; part++) {
      const int column = step * STEP + part * 16;
      const T scale = scales[column / GROUP], bias = biases[column / GROUP];
      const unsigned b0 = weights(words[2 * part], selector, scale, bias);
      const unsigned b1 = weights(words[2 * part + 1], selector, scale, bias);
      // Rows of the first operand do not meet: x is in eight of them, zero in the others.
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(values[column / 2]), "r"(0u), "r"(values[column / 2 + 4]), "r"(0u), "r"(b0), "r"(b1));
    }
  }
  result[0] = narrow(sums[0]);
  result[1] = narrow(sums[1]);
}

} // namespace straightline
