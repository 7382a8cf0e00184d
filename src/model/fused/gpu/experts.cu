// ---- Logits of a router in f32: a block of four warps for 16 tokens and 8 experts, each warp a quarter of the columns, of a multiple of 8

DEVICE Four part_of(const u16* matrix, i64 row, i64 rows, i64 at, i64 width) {
  return row < rows && at < width ? *reinterpret_cast<const Four*>(matrix + row * width + at) : Four{};
}

KERNEL(router, RouterArgs) {
  SHARED float part[4][16 * 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const i64 token = 16 * static_cast<i64>(blockIdx.x), expert = 8 * static_cast<i64>(blockIdx.y);
  float sum[4] = {};
  // The order of a sum is free: columns are taken as they come in whole vectors, of both alike.
  for (i64 begin = 32 * warp; begin < a.width; begin += 32 * 4) {
    const i64 at = begin + 8 * quad;
    const Four low = part_of(a.x, token + row, a.tokens, at, a.width), high = part_of(a.x, token + row + 8, a.tokens, at, a.width),
               of = part_of(a.matrix, expert + row, a.experts, at, a.width);
    for (int half = 0; half < 4; half += 2) {
      const u32 x[4] = {low.at[half], high.at[half], low.at[half + 1], high.at[half + 1]};
      multiply(sum, x, of.at[half], of.at[half + 1]);
    }
  }
  for (int i = 0; i < 4; i++) part[warp][(row + i / 2 * 8) * 8 + 2 * quad + i % 2] = sum[i];
  all_threads();
  const i64 at_token = token + threadIdx.x / 8, at_expert = expert + threadIdx.x % 8;
  if (at_token >= a.tokens || at_expert >= a.experts) return;
  const float all = part[0][threadIdx.x] + part[1][threadIdx.x] + part[2][threadIdx.x] + part[3][threadIdx.x];
  a.logits[at_token * a.experts + at_expert] = all + (a.bias ? wide(a.bias[at_expert]) : 0.0f);
}

// ---- The likeliest experts of each token, and their probabilities: a warp a token. At most 32 of 512

constexpr int HELD_EXPERTS = 16;  // a lane

KERNEL(route, RouteArgs) {
  const int lane = threadIdx.x % 32;
  const i64 token = blockIdx.x * static_cast<i64>(blockDim.x / 32) + threadIdx.x / 32;
  if (token >= a.tokens) return;
  const float* logits = a.logits + token * a.experts;
  float held[HELD_EXPERTS], most = -infinite(), sum = 0.0f;
  for (int i = 0; i < HELD_EXPERTS; i++) {
    held[i] = lane + 32 * i < a.experts ? logits[lane + 32 * i] : -infinite();
    most = largest(held[i], most);
  }
  const float top = warp_largest(most);
  for (int i = 0; i < HELD_EXPERTS; i++) sum += held[i] == -infinite() ? 0.0f : exponential(held[i] - top);
  sum = warp_sum(sum);
  float own = 0.0f, chosen = 0.0f;
  for (int of = 0; of < a.each; of++) {
    // The first of those that are alike. A row without numbers has some expert, too.
    float best = -infinite();
    int at = 0;
    for (int i = 0; i < HELD_EXPERTS; i++)
      if (held[i] > best) best = held[i], at = i;
    const float over_all = warp_largest(best);
    const float expert = -warp_largest(best == over_all && best > -infinite() ? -static_cast<float>(lane + 32 * at) : -infinite());
    const int found = expert < static_cast<float>(a.experts) ? static_cast<int>(expert) : 0;
    for (int i = 0; i < HELD_EXPERTS; i++)
      if (lane + 32 * i == found) held[i] = -infinite();
    const float share = exponential(over_all - top) / sum;
    chosen += share;
    if (lane == of) {
      own = share;
      a.chosen[token * a.each + of] = found;
    }
  }
  if (lane < a.each) a.weights[token * a.each + lane] = a.normalized ? own / chosen : own;
}

// ---- Entries ordered by expert, and within one as they come: a block an expert, whose warps take a stretch of the entries each

KERNEL(sort_by_expert, SortArgs) {
  SHARED float before[32], own[32];
  const i64 expert = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const i64 stretch = (a.entries + 32 * warps - 1) / (32 * warps) * 32, begin = warp * stretch;
  const i64 end = begin + stretch < a.entries ? begin + stretch : a.entries;
  // Counts below 2^24 are exact.
  float lower = 0.0f, alike = 0.0f;
  for (i64 at = begin + lane; at < end; at += 32) {
    lower += a.chosen[at] < expert;
    alike += a.chosen[at] == expert;
  }
  lower = warp_sum(lower), alike = warp_sum(alike);
  if (lane == 0) before[warp] = lower, own[warp] = alike;
  all_threads();
  float first = 0.0f, all = 0.0f;
  for (int of = 0; of < warps; of++) first += before[of] + (of < warp ? own[of] : 0.0f), all += before[of] + own[of];
  if (threadIdx.x == 0) a.ends[expert] = static_cast<int>(all);
  i64 next = static_cast<i64>(first);
  for (i64 from = begin; from < end; from += 32) {
    const i64 at = from + lane;
    const bool is_own = at < end && a.chosen[at] == expert;
    float upto = is_own;
    for (int by = 1; by < 32; by *= 2) {
      const float below = lane_below(upto, by);
      if (lane >= by) upto += below;
    }
    if (is_own) {
      const i64 row = next + static_cast<i64>(upto) - 1;
      a.sources[row] = at / a.each, a.experts[row] = expert, a.places[at] = row;
    }
    next += static_cast<i64>(lane_at(upto, 31));
  }
}

// ---- gpt-oss's activation: (up + 1) · gate · sigmoid(alpha · gate), bounded, two outputs a thread

DEVICE float bounded(const BoundedArgs& a, u32 pair, u32 bias) {
  const float limit = static_cast<float>(a.limit), gate = wide(pair & 0xffff) + wide(bias & 0xffff), up = wide(pair >> 16) + wide(bias >> 16);
  const float low = gate > limit ? limit : gate, inner = up > limit ? limit : up < -limit ? -limit : up;
  return (inner + 1.0f) * low * sigmoid(static_cast<float>(a.alpha) * low);
}

KERNEL(bounded_gate, BoundedArgs) {
  const i64 all = a.rows * a.width / 2;
  for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    const i64 row = 2 * i / a.width, at = 2 * i % a.width;
    const Two pairs = *reinterpret_cast<const Two*>(a.gate_up + 2 * (row * a.width + at));
    const Two bias = *reinterpret_cast<const Two*>(a.bias + 2 * (a.experts[row] * a.width + at));
    *reinterpret_cast<u32*>(a.out + row * a.width + at) = pack(bounded(a, pairs.at[0], bias.at[0]), bounded(a, pairs.at[1], bias.at[1]));
  }
}

// ---- Weighted sum of the rows of each token, of a multiple of 8 numbers: a token a block, added up in f32 in the order of `places`

DEVICE void add_by(float (&sum)[8], Four numbers, float weight) {
  for (int w = 0; w < 4; w++) {
    sum[2 * w] += weight * wide(numbers.at[w] & 0xffff);
    sum[2 * w + 1] += weight * wide(numbers.at[w] >> 16);
  }
}

KERNEL(combine, CombineArgs) {
  const i64 first = blockIdx.x * a.each;
  const float gate = a.gates ? sigmoid(wide(a.gates[blockIdx.x])) : 0.0f;
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    float sum[8] = {};
    for (i64 of = first; of < first + a.each; of++) {
      const float weight = a.weights ? a.weights[of] : 1.0f;
      add_by(sum, *reinterpret_cast<const Four*>(a.rows + a.places[of] * a.width + at), weight);
      if (a.bias) add_by(sum, *reinterpret_cast<const Four*>(a.bias + a.experts[of] * a.width + at), weight);
    }
    if (a.shared) add_by(sum, *reinterpret_cast<const Four*>(a.shared + blockIdx.x * a.width + at), gate);
    Four out;
    for (int w = 0; w < 4; w++) out.at[w] = pack(sum[2 * w], sum[2 * w + 1]);
    *reinterpret_cast<Four*>(a.out + blockIdx.x * a.width + at) = out;
  }
}

// A row a warp.
KERNEL(combine_backward, CombineArgs) {
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (i64 of = blockIdx.x * a.each + threadIdx.x / 32; of < (blockIdx.x + 1) * a.each; of += warps) {
    const i64 place = a.places[of] * a.width;
    const float weight = a.weights[of];
    float product = 0.0f;
    for (i64 at = 8 * lane; at < a.width; at += 8 * 32) {
      const Four row = *reinterpret_cast<const Four*>(a.rows + place + at),
                 by_out = *reinterpret_cast<const Four*>(a.by_out + blockIdx.x * a.width + at);
      Four by_row;
      for (int w = 0; w < 4; w++) {
        const float low = wide(by_out.at[w] & 0xffff), high = wide(by_out.at[w] >> 16);
        product += low * wide(row.at[w] & 0xffff) + high * wide(row.at[w] >> 16);
        by_row.at[w] = pack(weight * low, weight * high);
      }
      *reinterpret_cast<Four*>(a.out + place + at) = by_row;
    }
    product = warp_sum(product);
    if (lane == 0) a.by_weights[of] = product;
  }
}
