// Each block leaves its part in memory, and a second kernel adds them up: for so many rows that eight blocks a head are
// too few (fast_merge.h). parts: [heads, blocks, HEAD_DIM]; scores: [heads, blocks, 2], the highest and the sum.
namespace straightline {

struct Out {
  float *parts, *scores;

  DEVICE void finish(const float* totals, const float* most, const float* sums, Place here) const {
    const int blocks = gridDim.x;
    for (int i = here.tid; i < GROUP * HEAD_DIM; i += BLOCK) {
      const int head = here.row * GROUP + i / HEAD_DIM;
      parts[(head * blocks + here.block) * HEAD_DIM + i % HEAD_DIM] = totals[i];
    }
    if (here.tid < GROUP) {
      const int at = 2 * ((here.row * GROUP + here.tid) * blocks + here.block);
      scores[at] = most[here.tid];
      scores[at + 1] = sums[here.tid];
    }
  }
};

} // namespace straightline
