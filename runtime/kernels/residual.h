// Post-norm, residual add, layer scalar and the norms that read the sum, for rows of SIZE values, one block a row.
// SCALED, NORMS say what the site has; arguments that it lacks are stand-ins and never touched.
namespace straightline {

// What one thread holds of a row: CHUNKS vectors, BLOCK vectors apart.
struct Row {
  Vec part[CHUNKS];
};

DEVICE bool inside(int index) { return BLOCK * CHUNKS * READS == SIZE || index * READS < SIZE; }

template <typename P>
DEVICE Row read_row(P from, int tid) {
  Row row;
  UNROLL
  for (int i = 0; i < CHUNKS; i++) {
    const int index = BLOCK * i + tid;
    if (inside(index))
      row.part[i] = read(from, index);
    else
      row.part[i] = zeros();
  }
  return row;
}

template <typename P>
DEVICE void write_row(P to, const LOCAL Row& row, int tid) {
  UNROLL
  for (int i = 0; i < CHUNKS; i++) {
    const int index = BLOCK * i + tid;
    if (inside(index)) write(to, index, row.part[i]);
  }
}

DEVICE float inverse_rms(const LOCAL Row& row, SHARED_MEMORY float* sums, int tid) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < CHUNKS; i++) sum = squares(row.part[i], sum);
  return inverse_rms<SIZE, BLOCK / 32>(sum, sums, tid);
}

DEVICE Row rms_norm(const LOCAL Row& row, const LOCAL Row& weight, float inverse) {
  Row out;
  UNROLL
  for (int i = 0; i < CHUNKS; i++) {
    UNROLL
    for (int j = 0; j < READS; j++) out.part[i].v[j] = mul(weight.part[i].v[j], normed(row.part[i].v[j], inverse));
  }
  return out;
}

DEVICE Row add_rows(const LOCAL Row& a, const LOCAL Row& b) {
  Row out;
  UNROLL
  for (int i = 0; i < CHUNKS; i++) {
    UNROLL
    for (int j = 0; j < READS; j++) out.part[i].v[j] = add(a.part[i].v[j], b.part[i].v[j]);
  }
  return out;
}

DEVICE Row scale_row(const LOCAL Row& row, T scalar) {
  Row out;
  UNROLL
  for (int i = 0; i < CHUNKS; i++) {
    UNROLL
    for (int j = 0; j < READS; j++) out.part[i].v[j] = mul(row.part[i].v[j], scalar);
  }
  return out;
}

// h2 = (h + y) [* scalar]; x_m = rms_norm(h2, w_m)
template <typename S, typename W0, typename W1, typename W2, typename O>
DEVICE void finish(
    const LOCAL Row& y, const LOCAL Row& h, S scalar, W0 w0, W1 w1, W2 w2, O h2, O x0, O x1, O x2,
    SHARED_MEMORY float* sums, int start, int tid) {
  Row sum = add_rows(h, y);
  if (SCALED) sum = scale_row(sum, at(scalar, 0));
  write_row(h2 + start, sum, tid);
  if (NORMS == 0) return;
  const float inverse = inverse_rms(sum, sums, tid);
  write_row(x0 + start, rms_norm(sum, read_row(w0, tid), inverse), tid);
  if (NORMS > 1) write_row(x1 + start, rms_norm(sum, read_row(w1, tid), inverse), tid);
  if (NORMS > 2) write_row(x2 + start, rms_norm(sum, read_row(w2, tid), inverse), tid);
}

template <typename Y, typename H, typename P, typename S, typename W0, typename W1, typename W2, typename O>
DEVICE void residual_norms(
    Y y, H h, P post, S scalar, W0 w0, W1 w1, W2 w2, O h2, O x0, O x1, O x2,
    SHARED_MEMORY float* sums, Place here) {
  const int start = here.row * SIZE;
  const Row branch = read_row(y + start, here.tid);
  const Row stream = read_row(h + start, here.tid);
  const Row weight = read_row(post, here.tid);
  const Row normal = rms_norm(branch, weight, inverse_rms(branch, sums, here.tid));
  finish(normal, stream, scalar, w0, w1, w2, h2, x0, x1, x2, sums + BLOCK / 32, start, here.tid);
}

// y = rms_norm(a, wa) + rms_norm(b, wb), then as above.
template <typename A, typename B, typename H, typename WA, typename WB, typename P, typename S, typename W, typename O>
DEVICE void dual_residual_norms(
    A a, B b, H h, WA wa, WB wb, P post, S scalar, W w0, O h2, O x0,
    SHARED_MEMORY float* sums, Place here) {
  const int start = here.row * SIZE;
  const Row left = read_row(a + start, here.tid);
  const Row right = read_row(b + start, here.tid);
  const Row left_weight = read_row(wa, here.tid);
  const Row right_weight = read_row(wb, here.tid);
  const Row stream = read_row(h + start, here.tid);
  const Row weight = read_row(post, here.tid);
  const float left_inverse = inverse_rms(left, sums, here.tid);
  const float right_inverse = inverse_rms(right, sums + BLOCK / 32, here.tid);
  const Row branch = add_rows(rms_norm(left, left_weight, left_inverse), rms_norm(right, right_weight, right_inverse));
  const Row normal = rms_norm(branch, weight, inverse_rms(branch, sums + 2 * (BLOCK / 32), here.tid));
  finish(normal, stream, scalar, w0, w0, w0, h2, x0, x0, x0, sums + 3 * (BLOCK / 32), start, here.tid);
}

} // namespace straightline
