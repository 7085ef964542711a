// The rows that a token's attention reads, once for each query head, as MLX's products take them without a copy of their
// own: a block a query head, half (keys, then values) and 32 rows. A thread takes READS values of READS rows. The q that
// says when they are written is not read.
namespace straightline {

// Values `part` of rows from `first` on; beyond the last row that one again.
DEVICE void take(const T* rows, long long step, int first, int count, int part, Vec (&taken)[READS]) {
  UNROLL
  for (int i = 0; i < READS; i++) taken[i] = read(rows + min(first + i, count - 1) * step, part);
}

DEVICE void put_rows(const Vec (&taken)[READS], int first, int count, int part, T* to) {
  UNROLL
  for (int i = 0; i < READS; i++)
    if (first + i < count) write(to + (first + i) * HEAD_DIM, part, taken[i]);
}

DEVICE void put_columns(const Vec (&taken)[READS], int first, int count, int part, T* to) {
  UNROLL
  for (int d = 0; d < READS; d++) {
    T* column = to + (part * READS + d) * count + first;
    Vec values;
    UNROLL
    for (int i = 0; i < READS; i++) values.v[i] = taken[i].v[d];
    if (count % READS == 0) {
      write(column, 0, values);
    } else {
      UNROLL
      for (int i = 0; i < READS; i++)
        if (first + i < count) column[i] = values.v[i];
    }
  }
}

template <typename Shape, typename Strides>
DEVICE void head_copies(
    const T* k, const T* v, const Shape& k_shape, const Strides& k_strides, const Strides& v_strides, T* keys,
    T* values, Place here) {
  const int head = here.block / 2, kv_head = head / REPEATS, count = k_shape[4];
  const int first = (here.row * GROUPS + here.tid % GROUPS) * READS, part = here.tid / GROUPS;
  if (first >= count) return;
  const size_t before = size_t(head) * HEAD_DIM * count;
  Vec taken[READS];
  if (here.block % 2 == 0) {
    take(k + kv_head * k_strides[1], k_strides[4], first, count, part, taken);
    put_columns(taken, first, count, part, keys + before);
  } else {
    take(v + kv_head * v_strides[1], v_strides[3], first, count, part, taken);
    put_rows(taken, first, count, part, values + before);
  }
}

} // namespace straightline
