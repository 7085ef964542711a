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

DEVICE void fast_attention(
    const T* q, Rows keys, Rows values, int count, Out out, float* spare, float* stats, float* ends, Place here) {
  const int lane = here.tid & 31, warp = here.tid >> 5;
  const int head = here.row * GROUP;
  const int share = ((count + int(gridDim.x) - 1) / int(gridDim.x) + TAKEN - 1) / TAKEN * TAKEN;
  const int from = here.block * share, to = min(count, from + share);
  keys.enter(head / REPEATS, lane);
  values.enter(head / REPEATS, lane);

  float query[GROUP][HELD], held[GROUP][HELD];
  UNROLL
  for (int g = 0; g < GROUP; g++) {
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
      const Vec read_values = read(q + (head + g) * HEAD_DIM + c * CHUNK, lane);
      UNROLL
      for (int i = 0; i < READS; i++) {
        query[g][c * READS + i] = wide(read_values.v[i]);
        held[g][c * READS + i] = 0.0f;
      }
    }
  }
  // Of the head and the row whose score this lane ends up with.
  const int mine = lane * SCORES / 32, row_of_mine = mine % TAKEN;
  float highest = LEAST, sum = 0.0f;

  for (int row = from + warp * TAKEN; row < to; row += WARPS * TAKEN) {
    Rows::Raw k[TAKEN][CHUNKS], v[TAKEN][CHUNKS];
    UNROLL
    for (int r = 0; r < TAKEN; r++) {
      const int at = min(row + r, to - 1);
      UNROLL
      for (int c = 0; c < CHUNKS; c++) k[r][c] = keys.load(at, c);
      UNROLL
      for (int c = 0; c < CHUNKS; c++) v[r][c] = values.load(at, c);
    }
    float scores[SCORES];
    UNROLL
    for (int r = 0; r < TAKEN; r++) {
      float x[HELD];
      UNROLL
      for (int c = 0; c < CHUNKS; c++) Rows::widen(k[r][c], x + c * READS);
      UNROLL
      for (int g = 0; g < GROUP; g++) {
        float dot = 0.0f;
        UNROLL
        for (int i = 0; i < HELD; i++) dot = wide_fma(query[g][i], x[i], dot);
        scores[g * TAKEN + r] = dot;
      }
    }
    float score = LOG2_E * spread_sum<SCORES, 16>(scores, lane);
    if (row + row_of_mine >= to) score = LEAST;
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
      for (int c = 0; c < CHUNKS; c++) Rows::widen(v[r][c], x + c * READS);
      UNROLL
      for (int g = 0; g < GROUP; g++) {
        const float factor = __shfl_sync(LANES, weight, (g * TAKEN + r) * 32 / SCORES);
        UNROLL
        for (int i = 0; i < HELD; i++) held[g][i] = wide_fma(factor, x[i], held[g][i]);
      }
    }
  }

  // The warps of the block: first to one highest score, then added up in pairs, always in the same order.
  sum = head_sum(sum);
  float *most = stats, *sums = stats + WARPS * GROUP;
  if (lane % (32 / GROUP) == 0) {
    most[warp * GROUP + lane * GROUP / 32] = highest;
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
    for (int i = 0; i < HELD; i++) held[g][i] *= factor;
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
      for (int i = 0; i < GROUP * HELD; i++) place[32 * i] = held[i / HELD][i % HELD];
    }
    barrier();
    if (warp < half) {
      UNROLL
      for (int i = 0; i < GROUP * HELD; i++) held[i / HELD][i % HELD] += place[32 * i];
    }
    barrier();
  }
  if (warp == 0) {
    UNROLL
    for (int i = 0; i < GROUP * HELD; i++) {
      const int c = i % HELD / READS, within = i % READS;
      spare[i / HELD * HEAD_DIM + c * CHUNK + lane * READS + within] = held[i / HELD][i % HELD];
    }
  }
  barrier();
  out.finish(spare, ends, ends + GROUP, here);
}

} // namespace straightline
