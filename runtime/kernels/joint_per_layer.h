// All that follows the MLP of a layer with a per-layer input, in one launch of one cluster: post-norm and residual, which
// every block works out for itself; the gate, shared out and handed to every block; the projection, shared out; and
// `residual_norms` by the first block.
namespace straightline {

using Gates = Matvec<SIZE, BITS, GROUP, 2, 4>;
using Rows = Matvec<GATES, PROJECTION_BITS, PROJECTION_GROUP, ROWS, UNROLLED>;

struct IntoAll {
  T* gated;
  const T* per_layer;

  DEVICE void operator()(int lane, int index, T value) const {
    if (lane < CLUSTER) put_in_block(gated + index, lane, gelu_times(value, per_layer[index]));
  }
};

// h + rms_norm(y, weight), by BLOCK threads; what is beyond them does the same once more.
DEVICE void add_normed(const T* y, const T* h, const T* weight, T* to, float* sums, int tid) {
  const int own = tid % BLOCK;
  const Row branch = read_row(y, own);
  const Row normal = rms_norm(branch, read_row(weight, own), inverse_rms(branch, sums, own));
  write_row(to, add_rows(read_row(h, own), normal), own);
  barrier();
}

DEVICE void joint_per_layer(
    const T* y, const T* h, const T* before, const unsigned* w, const T* scales, const T* biases, const T* per_layer,
    const int* layer, const unsigned* pw, const T* projection_scales, const T* projection_biases, const T* post,
    const T* scalar, const T* w0, const T* w1, const T* w2, T* h2, T* x0, T* x1, T* x2, T* stream, T* gated, T* row,
    float* sums, Place here) {
  const int rank = here.block, tid = here.tid;
  fetch(w, size_t(SIZE) * GATES * BITS / 8, rank, tid);
  fetch(scales, size_t(SIZE) * GATES / GROUP * sizeof(T), rank, tid);
  fetch(biases, size_t(SIZE) * GATES / GROUP * sizeof(T), rank, tid);
  fetch(pw, size_t(SIZE) * GATES * PROJECTION_BITS / 8, rank, tid);
  fetch(projection_scales, size_t(SIZE) * GATES / PROJECTION_GROUP * sizeof(T), rank, tid);
  fetch(projection_biases, size_t(SIZE) * GATES / PROJECTION_GROUP * sizeof(T), rank, tid);
  fetch(post, SIZE * sizeof(T), rank, tid);
  fetch(w0, SIZE * sizeof(T), rank, tid);
  fetch(scalar, sizeof(T), rank, tid);
  const T* own = per_layer + at(layer, 0) * GATES;
  fetch(own, GATES * sizeof(T), rank, tid);
  add_normed(y, h, before, stream, sums, tid);
  cluster_barrier(); // all blocks are there
  rows_of_cluster<Gates>(stream, w, scales, biases, 0, GATES, rank, tid, IntoAll{gated, own});
  cluster_barrier();
  rows_of_cluster<Rows>(gated, pw, projection_scales, projection_biases, 0, SIZE, rank, tid, IntoFirst{row});
  cluster_barrier();
  if (rank || tid >= BLOCK) return;
  residual_norms(row, stream, post, scalar, w0, w1, w2, h2, x0, x1, x2, sums, Place{0, 0, tid});
}

} // namespace straightline
