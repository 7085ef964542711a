// The rows of a quantized cache, as fast_attention.h reads them: eight codes a lane and chunk lie in BITS bytes, the
// lowest bits first, and belong to one group. value = code * scale + bias, in float.
namespace straightline {

struct Rows {
  struct Raw {
    unsigned long long codes;
    T scale, bias;
  };
  const unsigned char* codes;
  const T *scales, *biases;
  long long code_head, code_row, scale_head, scale_row, bias_head, bias_row;
  int lane;

  template <typename S>
  DEVICE Rows(const unsigned* packed, const T* scales, const T* biases, const S& words, const S& s, const S& b)
      : codes(reinterpret_cast<const unsigned char*>(packed)), scales(scales), biases(biases),
        code_head(4 * words[1]), code_row(4 * words[2]), scale_head(s[1]), scale_row(s[2]), bias_head(b[1]), bias_row(b[2]) {}

  DEVICE void enter(int head, int within) {
    codes += head * code_head;
    scales += head * scale_head;
    biases += head * bias_head;
    lane = within;
  }

  DEVICE Raw load(int row, int chunk) const {
    const int eight = chunk * (CHUNK / READS) + lane, group = eight * READS / GROUP_SIZE;
    return Raw{word(codes + row * code_row + eight * BITS), scales[row * scale_row + group], biases[row * bias_row + group]};
  }

  DEVICE static unsigned long long word(const unsigned char* from) {
    if constexpr (BITS == 8) return *reinterpret_cast<const unsigned long long*>(from);
    if constexpr (BITS == 4) return *reinterpret_cast<const unsigned*>(from);
    unsigned long long bytes = 0;
    UNROLL
    for (int i = 0; i < BITS; i++) bytes |= static_cast<unsigned long long>(from[i]) << (8 * i);
    return bytes;
  }

  DEVICE static void widen(const Raw& raw, float* to) {
    const float scale = wide(raw.scale), bias = wide(raw.bias);
    UNROLL
    for (int i = 0; i < READS; i++)
      to[i] = wide_fma(float(unsigned(raw.codes >> (BITS * i)) & ((1u << BITS) - 1)), scale, bias);
  }
};

} // namespace straightline
