// The blocks that share the rows of a head are one cluster: each reads what the others have in their shared memory, and
// writes its slice of the result. Nothing is left in memory for the next launch, so launches may overlap as they like.
// MLX writes `__global__ void` itself; this is the one way to say how large its clusters are.
#undef __global__
#define __global__ __attribute__((global)) __cluster_dims__(straightline::CLUSTER, 1, 1)

namespace straightline {

struct Out {
  T* result;

  DEVICE void finish(float* totals, float* most, float* sums, Place here) const;
};

DEVICE void Out::finish(float* totals, float* most, float* sums, Place here) const {
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  constexpr int SLICE = GROUP * HEAD_DIM / CLUSTER;
  const int start = int(cluster.block_rank()) * SLICE;
  for (int i = start + here.tid; i < start + SLICE; i += BLOCK) {
    const int head = i / HEAD_DIM;
    float best[CLUSTER], highest = LEAST, sum = 0.0f, total = 0.0f;
    UNROLL
    for (int block = 0; block < CLUSTER; block++) {
      best[block] = cluster.map_shared_rank(most, block)[head];
      highest = fmaxf(highest, best[block]);
    }
    UNROLL
    for (int block = 0; block < CLUSTER; block++) {
      const float weight = exp2f(best[block] - highest);
      sum += weight * cluster.map_shared_rank(sums, block)[head];
      total += weight * cluster.map_shared_rank(totals, block)[i];
    }
    result[here.row * GROUP * HEAD_DIM + i] = narrow(total / sum);
  }
  cluster.sync(); // no block may leave while another reads it
}

} // namespace straightline
