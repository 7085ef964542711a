// Adds up the parts that fast_parts.h leaves. A block takes MERGED values of one head; its MERGERS groups of threads
// take turns with the parts.
namespace straightline {

CONSTANT float LEAST = -1e30f;

template <typename S>
DEVICE void fast_merge(const float* parts, const float* scores, const S& shape, T* out, float* shared, Place here) {
  const int count = shape[1], head = here.row, within = here.tid % MERGED, group = here.tid / MERGED;
  float highest = LEAST, sum = 0.0f, total = 0.0f;
  for (int i = 0; i < count; i++) highest = fmaxf(highest, scores[2 * (head * count + i)]);
#pragma unroll 8
  for (int i = group; i < count; i += MERGERS) {
    const int at = head * count + i;
    const float weight = exp2f(scores[2 * at] - highest);
    sum += weight * scores[2 * at + 1];
    total += weight * parts[at * HEAD_DIM + here.block * MERGED + within];
  }
  shared[2 * here.tid] = sum;
  shared[2 * here.tid + 1] = total;
  barrier();
  if (group > 0) return;
  for (int other = 1; other < MERGERS; other++) {
    sum += shared[2 * (other * MERGED + within)];
    total += shared[2 * (other * MERGED + within) + 1];
  }
  out[head * HEAD_DIM + here.block * MERGED + within] = narrow(total / sum);
}

} // namespace straightline
