// Rows of x @ w.T shared out among all warps of a cluster of blocks of THREADS threads.
// 128 registers a thread: two blocks of 256 threads on a multiprocessor, or one of 512.
#undef __global__
#define __global__                                                      \
  __attribute__((global)) __cluster_dims__(straightline::CLUSTER, 1, 1) \
      __launch_bounds__(straightline::THREADS, 512 / straightline::THREADS)

namespace straightline {

CONSTANT int CLUSTER_WARPS = CLUSTER * THREADS / 32;

// For `count` rows of w from `first` on: finish(lane, row, value), in every lane of the warp that has it.
template <typename Rows, typename F>
DEVICE void rows_of_cluster(
    const T* x, const unsigned* w, const T* scales, const T* biases, size_t first, int count, int rank, int tid,
    F finish) {
  const int lane = tid & 31;
  for (int start = (rank * (THREADS / 32) + (tid >> 5)) * Rows::TAKEN; start < count;
       start += CLUSTER_WARPS * Rows::TAKEN) {
    Rows rows;
    UNROLL
    for (int r = 0; r < Rows::TAKEN; r++) // beyond the last: done twice, finished once
      rows.set(r, w, scales, biases, first + min(start + r, count - 1), lane);
    T result[Rows::TAKEN];
    rows.times(x, lane, result);
    UNROLL
    for (int r = 0; r < Rows::TAKEN; r++)
      if (start + r < count) finish(lane, start + r, result[r]);
  }
}

// A row of the cluster's first block, filled by all.
struct IntoFirst {
  T* row;

  DEVICE void operator()(int lane, int index, T value) const {
    if (lane == 0) put_in_block(row + index, 0, value);
  }
};

// Asks for what another launch may not have left in the device's cache: `bytes` from `from` on, by all of a cluster.
DEVICE void fetch(const void* from, size_t bytes, int rank, int tid) {
  const char* lines = static_cast<const char*>(from);
  for (size_t at = size_t(rank * THREADS + tid) * 128; at < bytes; at += size_t(CLUSTER * THREADS) * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(lines + at));
}

} // namespace straightline
