// The rows of a plain cache, as fast_attention.h reads them: eight bfloat16 values a lane and chunk.
namespace straightline {

struct Rows {
  using Raw = Vec;
  const T* values;
  long long head_step, row_step;

  template <typename S>
  DEVICE Rows(const T* values, const S& strides) : values(values), head_step(strides[1]), row_step(strides[2]) {}

  DEVICE void enter(int head, int lane) { values += head * head_step + lane * READS; }

  DEVICE Raw load(int row, int chunk) const { return read(values + row * row_step + chunk * CHUNK, 0); }

  DEVICE static void widen(const Raw& raw, float* to) {
    UNROLL
    for (int i = 0; i < READS; i++) to[i] = wide(raw.v[i]);
  }
};

} // namespace straightline
