// The end of a block in one launch: x @ w.T by one cluster, then `residual_norms` of it by its first block.
namespace straightline {

using Rows = Matvec<INPUTS, BITS, GROUP, ROWS, UNROLLED>;

DEVICE void joint_norms(
    const T* x, const unsigned* w, const T* scales, const T* biases, const T* h, const T* post, const T* scalar,
    const T* w0, const T* w1, const T* w2, T* h2, T* x0, T* x1, T* x2, T* row, float* sums, Place here) {
  fetch(post, SIZE * sizeof(T), here.block, here.tid);
  if (NORMS > 0) fetch(w0, SIZE * sizeof(T), here.block, here.tid);
  cluster_barrier(); // all blocks are there
  rows_of_cluster<Rows>(x, w, scales, biases, 0, SIZE, here.block, here.tid, IntoFirst{row});
  cluster_barrier();
  if (here.block || here.tid >= BLOCK) return;
  residual_norms(row, h, post, scalar, w0, w1, w2, h2, x0, x1, x2, sums, Place{0, 0, here.tid});
}

} // namespace straightline
