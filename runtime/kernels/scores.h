// Softmax over the products of q with the rows of k, of one token: a cluster a query head. Its warps take a row each, in
// the order of MLX's gemv; its first block then takes softmax over the rounded products, eight a thread, in the order of
// MLX's softmax (which adds nothing that is not zero for threads without one, so how many there are does not matter).
// With bounds as wide as MLX leaves them, ptxas saves registers and waits for one row before it asks for the next.
#undef __global__
#define __global__                                                      \
  __attribute__((global)) __cluster_dims__(straightline::CLUSTER, 1, 1) \
      __launch_bounds__(straightline::THREADS, 1)

namespace straightline {

CONSTANT int WARPS = THREADS / 32;
CONSTANT int STEP = CLUSTER * WARPS; // rows that a cluster's warps take at once
CONSTANT int SHARE = 32 / TAKEN;     // lanes that end up with the same sum
CONSTANT int CHUNK = 32 * 4;         // values of a row that a warp reads at once
CONSTANT int CHUNKS = HEAD_DIM / CHUNK;

// What a lane takes of a row.
struct Part {
  struct __align__(8) Four {
    T v[4];
  } chunk[CHUNKS];

  DEVICE void read_from(const T* row, int lane) {
    UNROLL
    for (int c = 0; c < CHUNKS; c++) chunk[c] = reinterpret_cast<const Four*>(row + c * CHUNK)[lane];
  }

  DEVICE float times(const Part& other) const {
    float sum = 0.0f;
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
      UNROLL
      for (int i = 0; i < 4; i++) sum = wide_fma(wide(chunk[c].v[i]), wide(other.chunk[c].v[i]), sum);
    }
    return sum;
  }
};

// As `warp_sum` of each of N values, with the same sums in the same order: a lane has that of value lane / (32 / N).
template <int N>
DEVICE float warp_sums(float (&x)[N], int lane) {
  int mask = 16;
  UNROLL
  for (int half = N / 2; half > 0; half /= 2, mask /= 2) {
    const bool upper = lane & mask;
    UNROLL
    for (int i = 0; i < half; i++) {
      const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
      x[i] = wide_add(kept, __shfl_xor_sync(0xffffffffu, given, mask));
    }
  }
  UNROLL
  for (; mask > 0; mask /= 2) x[0] = wide_add(x[0], __shfl_xor_sync(0xffffffffu, x[0], mask));
  return x[0];
}

DEVICE float below_all() { return __uint_as_float(0xff800000u); } // minus infinity

DEVICE float larger(float a, float b) { return a < b ? b : a; }

// Over a warp, in every lane.
DEVICE float warp_max(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) x = larger(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// e to the power of how far x is below `most`.
DEVICE float falling(float x, float most) { return __expf(wide_add(x, -most)); }

// `scores` of the cluster's first block: the products of q with `count` rows.
DEVICE void fill(const T* q, const T* k, long long row_step, int count, T* scores, int rank, int tid) {
  const int lane = tid & 31;
  Part query;
  query.read_from(q, lane);
  for (int first = rank * WARPS + (tid >> 5); first < count; first += STEP * TAKEN) {
    Part rows[TAKEN];
    UNROLL
    for (int r = 0; r < TAKEN; r++) // beyond the last: done twice, kept once
      rows[r].read_from(k + min(first + r * STEP, count - 1) * row_step, lane);
    float sums[TAKEN];
    UNROLL
    for (int r = 0; r < TAKEN; r++) sums[r] = rows[r].times(query);
    const T score = narrow(warp_sums(sums, lane));
    const int row = first + lane / SHARE * STEP;
    if (lane % SHARE == 0 && row < count) put_in_block(scores + row, 0, score);
  }
}

// By one block. `ends` holds 2 * WARPS values.
DEVICE void softmax(const T* scores, int count, T* out, float* ends, int tid) {
  const int lane = tid & 31, warp = tid >> 5;
  float *highest = ends, *totals = ends + WARPS;
  float own[READS], most = -3.402823466e38f;
  UNROLL
  for (int i = 0; i < READS; i++) {
    own[i] = tid * READS + i < count ? wide(scores[tid * READS + i]) : below_all();
    most = larger(most, own[i]);
  }
  float sum = falling(own[0], most);
  UNROLL
  for (int i = 1; i < READS; i++) sum = wide_add(sum, falling(own[i], most));

  const float of_warp = warp_max(most);
  sum = warp_sum(wide_mul(sum, falling(most, of_warp)));
  if (lane == 0) highest[warp] = of_warp;
  barrier();
  most = warp_max(lane < WARPS ? highest[lane] : below_all());
  if (lane == 0) totals[warp] = wide_mul(sum, falling(of_warp, most));
  barrier();
  const float inverse = __frcp_rn(warp_sum(lane < WARPS ? totals[lane] : 0.0f));
  for (int i = tid; i < count; i += THREADS) out[i] = narrow(wide_mul(falling(wide(scores[i]), most), inverse));
}

template <typename Shape, typename Strides>
DEVICE void attention_scores(
    const T* q, const T* k, const Shape& shape, const Strides& strides, T* out, T* scores, float* ends, Place here) {
  const int head = here.block / CLUSTER, rank = here.block % CLUSTER, count = shape[4];
  cluster_barrier(); // all blocks are there
  fill(q + head * HEAD_DIM, k + (head / REPEATS) * strides[1], strides[4], count, scores, rank, here.tid);
  cluster_barrier();
  if (rank == 0) softmax(scores, count, out + head * count, ends, here.tid);
}

} // namespace straightline
