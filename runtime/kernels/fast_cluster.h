// The blocks that share the rows of a head are one cluster: each reads what the others have in their shared memory, and
// writes its slice of the result.
namespace straightline {

struct Out {
  T* result;

  // CLUSTER blocks along x are one cluster, so a block's place in it is its place along x.
  DEVICE void finish(const float* totals, const float* most, const float* sums, Place here) const {
    cluster_barrier();
    constexpr int SLICE = GROUP * HEAD_DIM / CLUSTER;
    const int start = here.block * SLICE;
    for (int i = start + here.tid; i < start + SLICE; i += BLOCK) {
      const int head = i / HEAD_DIM;
      float best[CLUSTER], highest = LEAST, sum = 0.0f, total = 0.0f;
      UNROLL
      for (int block = 0; block < CLUSTER; block++) {
        best[block] = of_block(most + head, block);
        highest = fmaxf(highest, best[block]);
      }
      UNROLL
      for (int block = 0; block < CLUSTER; block++) {
        const float weight = exp2f(best[block] - highest);
        sum += weight * of_block(sums + head, block);
        total += weight * of_block(totals + i, block);
      }
      result[here.row * GROUP * HEAD_DIM + i] = narrow(total / sum);
    }
    cluster_barrier(); // no block may leave while another reads it
  }
};

} // namespace straightline
