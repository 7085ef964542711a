// As fast_attention.h, for all query heads of one KV head, up to sixteen, with products of 16 x 16 by 16 x 8 bfloat16
// numbers and float32 sums: scores of TILE rows at a time, their weights, the weighted sum. A weight goes in as two
// bfloat16 numbers that add up to it to 16 bits. Which dimension is which in a product is chosen so that each lane reads
// 16 bytes of a row; a sum does not mind.
namespace straightline {

CONSTANT int TILE = 64;
CONSTANT int KEYS = HEAD_DIM / 32;    // 16-byte reads of a key by a lane, two products each
CONSTANT int STEPS = TILE / 16;       // products along the rows
CONSTANT int OWN = HEAD_DIM / WARPS;  // dimensions of the result that a warp has
CONSTANT int APART = TILE + 8;        // floats from the scores of one head to those of the next

struct Four {
  unsigned v[4];
};

DEVICE Four four(const T* from) {
  const uint4 read_values = *reinterpret_cast<const uint4*>(from);
  return Four{{read_values.x, read_values.y, read_values.z, read_values.w}};
}

// sums += a b, of one warp.
DEVICE void multiply(float* sums, const Four& a, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
}

// The low or the high halves of two words, in one.
DEVICE unsigned halves(unsigned a, unsigned b, bool high) {
  return high ? (a >> 16) | (b & 0xffff0000u) : (a & 0xffffu) | (b << 16);
}

DEVICE unsigned pair_of(float a, float b) {
  const T low = narrow(a), high = narrow(b);
  return unsigned(*reinterpret_cast<const unsigned short*>(&low)) |
      unsigned(*reinterpret_cast<const unsigned short*>(&high)) << 16;
}

DEVICE void fast_tensor(
    const T* q, Rows keys, Rows values, int count, Out out, Four* queries, float* table, float* shrunk, Place here) {
  const int lane = here.tid & 31, warp = here.tid >> 5, line = lane >> 2, column = lane & 3;
  const int share = ((count + int(gridDim.x) - 1) / int(gridDim.x) + TILE - 1) / TILE * TILE;
  const int from = here.block * share, to = min(count, from + share);
  keys.enter(here.row, 0);
  values.enter(here.row, 0);

  // The queries as the left side of the products: [2 * KEYS, lane].
  for (int i = here.tid; i < 2 * KEYS * 32; i += BLOCK) {
    const int at = i & 31, step = i >> 5, head = at >> 2, first = step / 2 * 32 + (at & 3) * 8 + step % 2 * 4;
    const unsigned* own = reinterpret_cast<const unsigned*>(q + (here.row * REPEATS + head) * HEAD_DIM + first);
    const unsigned* other = own + 4 * HEAD_DIM; // eight heads further on
    const bool one = head < REPEATS, two = head + 8 < REPEATS;
    queries[i] = Four{{one ? own[0] : 0u, two ? other[0] : 0u, one ? own[1] : 0u, two ? other[1] : 0u}};
  }

  float held[OWN / 8][4];
  UNROLL
  for (int j = 0; j < OWN / 8; j++) {
    UNROLL
    for (int i = 0; i < 4; i++) held[j][i] = 0.0f;
  }
  const int weighed = 2 * warp + (lane >> 4); // the head whose weights this lane works out, with 15 others
  float highest = LEAST, sum = 0.0f;
  barrier();

  for (int row = from; row < to; row += TILE) {
    Four key[KEYS], value[STEPS][4];
    const T* key_row = keys.values + (long long)min(row + 8 * warp + line, to - 1) * keys.row_step + 8 * column;
    UNROLL
    for (int i = 0; i < KEYS; i++) key[i] = four(key_row + 32 * i);
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        const int at = min(row + 16 * s + 2 * column + (i & 1) + 8 * (i >> 1), to - 1);
        value[s][i] = four(values.values + (long long)at * values.row_step + warp * OWN + 8 * line);
      }
    }
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f}, more[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL
    for (int i = 0; i < KEYS; i++) {
      multiply(part, queries[(2 * i) * 32 + lane], key[i].v[0], key[i].v[1]);
      multiply(more, queries[(2 * i + 1) * 32 + lane], key[i].v[2], key[i].v[3]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int at = 8 * warp + 2 * column + (i & 1);
      table[(line + 8 * (i >> 1)) * APART + at] = row + at < to ? LOG2_E * (part[i] + more[i]) : LEAST;
    }
    barrier();
    float mine[4], best = highest;
    UNROLL
    for (int i = 0; i < 4; i++) {
      mine[i] = table[weighed * APART + (lane & 15) + 16 * i];
      best = fmaxf(best, mine[i]);
    }
    UNROLL
    for (int mask = 8; mask > 0; mask /= 2) best = fmaxf(best, __shfl_xor_sync(LANES, best, mask));
    const float factor = exp2f(highest - best);
    highest = best;
    sum *= factor;
    UNROLL
    for (int i = 0; i < 4; i++) {
      const float weight = exp2f(mine[i] - best);
      sum += weight;
      table[weighed * APART + (lane & 15) + 16 * i] = weight;
    }
    if ((lane & 15) == 0) shrunk[weighed] = factor;
    barrier();
    const float low = shrunk[line], high = shrunk[line + 8];
    UNROLL
    for (int j = 0; j < OWN / 8; j++) {
      held[j][0] *= low;
      held[j][1] *= low;
      held[j][2] *= high;
      held[j][3] *= high;
    }
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      Four rounded, rest;
      UNROLL
      for (int i = 0; i < 4; i++) {
        const float* two = table + (line + 8 * (i & 1)) * APART + 16 * s + 2 * column + 8 * (i >> 1);
        rounded.v[i] = pair_of(two[0], two[1]);
        rest.v[i] = pair_of(two[0] - wide(narrow(two[0])), two[1] - wide(narrow(two[1])));
      }
      UNROLL
      for (int j = 0; j < 8; j++) {
        const unsigned b0 = halves(value[s][0].v[j / 2], value[s][1].v[j / 2], j % 2);
        const unsigned b1 = halves(value[s][2].v[j / 2], value[s][3].v[j / 2], j % 2);
        multiply(held[j], rounded, b0, b1);
        multiply(held[j], rest, b0, b1);
      }
    }
    barrier(); // the weights are read before the next scores take their place
  }

  UNROLL
  for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(LANES, sum, mask);
  if ((lane & 15) == 0 && weighed < REPEATS) {
    out.scores[2 * ((here.row * REPEATS + weighed) * int(gridDim.x) + here.block)] = highest;
    out.scores[2 * ((here.row * REPEATS + weighed) * int(gridDim.x) + here.block) + 1] = sum;
  }
  UNROLL
  for (int i = 0; i < 4; i++) {
    const int head = line + 8 * (i >> 1);
    if (head < REPEATS) {
      float* to_part = out.parts + ((here.row * REPEATS + head) * int(gridDim.x) + here.block) * HEAD_DIM;
      UNROLL
      for (int j = 0; j < OWN / 8; j++) to_part[warp * OWN + 8 * (2 * column + (i & 1)) + j] = held[j][i];
    }
  }
}

} // namespace straightline
