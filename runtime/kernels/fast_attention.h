// Attention of one token over `count` rows, float32 inside: scores, an online softmax, the weighted sum of the values.
// Along x, blocks share the rows; along y, each takes GROUP query heads of one KV head. A warp takes TAKEN rows at a
// time and each of its lanes HELD values of them. Not the bits of MLX's operations, which round scores and weights.
namespace straightline {

// Adds up COUNT values over a warp. Each step halves the values that a lane is left with: lane i ends up with the sum
// of value i * COUNT / 32.
template <int COUNT, int MASK>
DEVICE float spread_sum(float* values, int lane) {
  if constexpr (MASK == 0) {
    return values[0];
  } else {
    if constexpr (COUNT == 1) {
      values[0] += __shfl_xor_sync(LANES, values[0], MASK);
    } else {
      const bool upper = lane & MASK;
      UNROLL
      for (int i = 0; i < COUNT / 2; i++) {
        const float kept = upper ? values[i + COUNT / 2] : values[i];
        const float given = upper ? values[i] : values[i + COUNT / 2];
        values[i] = kept + __shfl_xor_sync(LANES, given, MASK);
      }
    }
    return spread_sum<(COUNT + 1) / 2, MASK / 2>(values, lane);
  }
}

// Over the lanes that hold scores of one head.
DEVICE float head_max(float x) {
  UNROLL
  for (int mask = 32 / SCORES; mask < 32 / GROUP; mask *= 2) x = fmaxf(x, __shfl_xor_sync(LANES, x, mask));
  return x;
}

DEVICE float head_sum(float x) {
  UNROLL
  for (int mask = 32 / SCORES; mask < 32 / GROUP; mask *= 2) x += __shfl_xor_sync(LANES, x, mask);
  return x;
}

// TAKEN rows of keys and of values, as they lie in memory.
struct Taken {
  Rows::Raw keys[TAKEN][CHUNKS], values[TAKEN][CHUNKS];

  // Rows from `to` on are read as the last one before it, and weigh nothing.
  DEVICE void load(const Rows& k, const Rows& v, int row, int to) {
    UNROLL
    for (int r = 0; r < TAKEN; r++) {
      const int at = min(row + r, to - 1);
      UNROLL
      for (int c = 0; c < CHUNKS; c++) keys[r][c] = k.load(at, c);
      UNROLL
      for (int c = 0; c < CHUNKS; c++) values[r][c] = v.load(at, c);
    }
  }
};

// What one warp has found: held is a lane's part of the weighted sums; highest and sum, of the head and the one row of
// each TAKEN whose score it ends up with.
struct Found {
  float query[GROUP][HELD], held[GROUP][HELD];
  float highest, sum;

  DEVICE void start(const T* q, int lane) {
    UNROLL
    for (int g = 0; g < GROUP; g++) {
      UNROLL
      for (int c = 0; c < CHUNKS; c++) {
        const Vec part = read(q + g * HEAD_DIM + c * CHUNK, lane);
        UNROLL
        for (int i = 0; i < READS; i++) {
          query[g][c * READS + i] = wide(part.v[i]);
          held[g][c * READS + i] = 0.0f;
        }
      }
    }
    highest = LEAST;
    sum = 0.0f;
  }

  // The first `rows` of them.
  DEVICE void add(const Taken& taken, int rows, int lane) {
    float scores[SCORES];
    UNROLL
    for (int r = 0; r < TAKEN; r++) {
      float x[HELD];
      UNROLL
      for (int c = 0; c < CHUNKS; c++) Rows::widen(taken.keys[r][c], x + c * READS);
      UNROLL
      for (int g = 0; g < GROUP; g++) {
        float dot = 0.0f;
        UNROLL
        for (int i = 0; i < HELD; i++) dot = wide_fma(query[g][i], x[i], dot);
        scores[g * TAKEN + r] = dot;
      }
    }
    float score = LOG2_E * spread_sum<SCORES, 16>(scores, lane);
    if (lane * SCORES / 32 % TAKEN >= rows) score = LEAST;
    const float higher = fmaxf(highest, head_max(score));
    const float shrunk = exp2f(highest - higher), weight = exp2f(score - higher);
    highest = higher;
    sum = sum * shrunk + weight;
    UNROLL
    for (int g = 0; g < GROUP; g++) {
      const float factor = __shfl_sync(LANES, shrunk, g * 32 / GROUP);
      UNROLL
      for (int i = 0; i < HELD; i++) held[g][i] *= factor;
    }
    UNROLL
    for (int r = 0; r < TAKEN; r++) {
      float x[HELD];
      UNROLL
      for (int c = 0; c < CHUNKS; c++) Rows::widen(taken.values[r][c], x + c * READS);
      UNROLL
      for (int g = 0; g < GROUP; g++) {
        const float factor = __shfl_sync(LANES, weight, (g * TAKEN + r) * 32 / SCORES);
        UNROLL
        for (int i = 0; i < HELD; i++) held[g][i] = wide_fma(factor, x[i], held[g][i]);
      }
    }
  }
};

DEVICE void fast_attention(
    const T* q, Rows keys, Rows values, int count, Out out, float* spare, float* stats, float* ends, Place here) {
  const int lane = here.tid & 31, warp = here.tid >> 5;
  const int head = here.row * GROUP;
  const int share = ((count + int(gridDim.x) - 1) / int(gridDim.x) + TAKEN - 1) / TAKEN * TAKEN;
  const int from = here.block * share, to = min(count, from + share);
  keys.enter(head / REPEATS, lane);
  values.enter(head / REPEATS, lane);

  Found found;
  found.start(q + head * HEAD_DIM, lane);
  int row = from + warp * TAKEN;
  Taken taken;
  if (AHEAD && row < to) taken.load(keys, values, row, to);
  for (; row < to; row += WARPS * TAKEN) {
    if (AHEAD) {
      Taken next;
      if (row + WARPS * TAKEN < to) next.load(keys, values, row + WARPS * TAKEN, to);
      found.add(taken, to - row, lane);
      taken = next;
    } else {
      taken.load(keys, values, row, to);
      found.add(taken, to - row, lane);
    }
  }

  // The warps of the block: first to one highest score, then added up in pairs, always in the same order.
  const float sum = head_sum(found.sum);
  float *most = stats, *sums = stats + WARPS * GROUP;
  if (lane % (32 / GROUP) == 0) {
    most[warp * GROUP + lane * GROUP / 32] = found.highest;
    sums[warp * GROUP + lane * GROUP / 32] = sum;
  }
  barrier();
  UNROLL
  for (int g = 0; g < GROUP; g++) {
    float best = LEAST;
    UNROLL
    for (int w = 0; w < WARPS; w++) best = fmaxf(best, most[w * GROUP + g]);
    const float factor = exp2f(most[warp * GROUP + g] - best);
    UNROLL
    for (int i = 0; i < HELD; i++) found.held[g][i] *= factor;
    if (here.tid == 0) {
      float total = 0.0f;
      for (int w = 0; w < WARPS; w++) total += sums[w * GROUP + g] * exp2f(most[w * GROUP + g] - best);
      ends[g] = best;
      ends[GROUP + g] = total;
    }
  }
  UNROLL
  for (int half = WARPS / 2; half > 0; half /= 2) {
    float* place = spare + (warp % half) * GROUP * HEAD_DIM + lane;
    if (warp >= half && warp < 2 * half) {
      UNROLL
      for (int i = 0; i < GROUP * HELD; i++) place[32 * i] = found.held[i / HELD][i % HELD];
    }
    barrier();
    if (warp < half) {
      UNROLL
      for (int i = 0; i < GROUP * HELD; i++) found.held[i / HELD][i % HELD] += place[32 * i];
    }
    barrier();
  }
  if (warp == 0) {
    UNROLL
    for (int i = 0; i < GROUP * HELD; i++) {
      const int c = i % HELD / READS, within = i % READS;
      spare[i / HELD * HEAD_DIM + c * CHUNK + lane * READS + within] = found.held[i / HELD][i % HELD];
    }
  }
  barrier();
  out.finish(spare, ends, ends + GROUP, here);
}

} // namespace straightline
