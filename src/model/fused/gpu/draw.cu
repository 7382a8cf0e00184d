// ---- Softmax of f32 logits: a row a block


KERNEL(softmax_found, SoftmaxArgs) {
  SHARED float room[32];
  const float* row = a.logits + blockIdx.x * a.width;
  float most = -infinite(), sum = 0.0f, weighted = 0.0f;
  for (i64 at = threadIdx.x; at < a.width; at += blockDim.x) {
    const float x = row[at];
    if (!(x <= most)) {
      // The first number, a larger one, or no number.
      const float shrink = most == -infinite() ? 0.0f : exponential(most - x);
      if (shrink > 0.0f) weighted = shrink * (weighted + sum * (most - x));
      else weighted = 0.0f;
      sum *= shrink;
      most = x;
    }
    // A logit of −∞ adds nothing.
    if (x == -infinite()) continue;
    const float below = x - most, e = exponential(below);
    sum += e;
    weighted += e > 0.0f ? e * below : 0.0f;
  }
  const float top = block_largest(most, room);
  const float shrink = most == -infinite() ? 0.0f : exponential(most - top);
  const float moved = shrink > 0.0f ? shrink * (weighted + sum * (most - top)) : 0.0f;
  const float total = block_sum(sum * shrink, room), all = block_sum(moved, room);
  if (threadIdx.x == 0) {
    const float log_sum = log_of(total);
    float* found = a.found + 3 * blockIdx.x;
    found[0] = row[a.targets[blockIdx.x]] - top - log_sum;
    found[1] = log_sum - all / total;
    found[2] = top + log_sum;
  }
}

// slope · (1[target] − p) − entropy_slope · p · (log p + entropy), rounded
KERNEL(softmax_gradient, SoftmaxArgs) {
  const float* row = a.logits + blockIdx.x * a.width;
  u16* out = a.gradient + blockIdx.x * a.width;
  const i64 target = a.targets[blockIdx.x];
  const float slope = a.slopes[blockIdx.x], by_entropy = a.entropy_slopes ? a.entropy_slopes[blockIdx.x] : 0.0f;
  const float entropy = a.found[3 * blockIdx.x + 1], log_sum = a.found[3 * blockIdx.x + 2];
  for (i64 at = threadIdx.x; at < a.width; at += blockDim.x) {
    const float log_prob = largest(row[at] - log_sum, -87.0f), p = exponential(log_prob);
    float gradient = -p * (slope + by_entropy * (log_prob + entropy));
    if (at == target) gradient += slope;
    out[at] = narrow(gradient);
  }
}

// ---- A token drawn from each row of f32 logits: a row a block

// 1 less f32's epsilon.
constexpr float BELOW_ONE = 1.0f - 1.1920929e-7f;

// A row's scores and which of them are kept, as `warp` of sampling.rs keeps them.
struct Row {
  const float* logits;
  i64 width;
  float temperature;
  u32 least;     // the order of the smallest score that is kept
  u32 tie;       // of scores of this order, those from `first_tie` on are
  i64 first_tie;
};

// Numbers whose order is that of scores.
DEVICE u32 order_of(float x) {
  const u32 bits = bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float score_of(u32 order) { return number_of(order & 0x80000000u ? order & 0x7fffffffu : ~order); }

DEVICE float tempered(float x, const Row& row) { return row.temperature == 1.0f ? x : x / row.temperature; }
DEVICE float score(const Row& row, i64 at) { return tempered(row.logits[at], row); }

// e^(score − top), or 0 of what is not kept.
DEVICE float share(const Row& row, i64 at, float top) {
  const float x = score(row, at);
  const u32 order = order_of(x);
  return order < row.least || (order == row.tie && at < row.first_tie) ? 0.0f : exponential(x - top);
}

// The order at which the scores above it, counted (`top` = +∞) or by their shares, reach `wanted`, and what those above it amount to. A digit of eight bits a
// pass. `bins`: 256 numbers of each warp. They are summed in the same order each time, so that results are the same to the bit.
DEVICE u32 reached(const Row& row, float top, float wanted, float* bins, float& above) {
  SHARED u32 digit;
  SHARED float so_far;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float* own = bins + threadIdx.x / 32 * 256;
  u32 prefix = 0;
  if (threadIdx.x == 0) so_far = 0.0f;
  for (int shift = 24; shift >= 0; shift -= 8) {
    all_threads();
    for (int i = threadIdx.x; i < 256 * warps; i += blockDim.x) bins[i] = 0.0f;
    all_threads();
    for (i64 begin = threadIdx.x - lane; begin < row.width; begin += blockDim.x) {
      const bool is_there = begin + lane < row.width;
      const float x = is_there ? score(row, begin + lane) : 0.0f;
      const u32 order = order_of(x), bin = order >> shift & 0xff;
      const bool counts = is_there && order >= row.least && (shift == 24 || order >> (shift + 8) == prefix);
      const float weight = !counts ? 0.0f : top == infinite() ? 1.0f : exponential(x - top);
      // Most logits of a warp are in few bins, each of which is added to once, always by the same lane.
      for (u32 left = lanes_where(weight > 0.0f); left != 0;) {
        const u32 next = static_cast<u32>(lane_at(static_cast<float>(bin), lowest_lane(left)));
        const bool is_in = weight > 0.0f && bin == next;
        const float sum = warp_sum(is_in ? weight : 0.0f);
        if (lane == next % 32) own[next] += sum;
        left &= ~lanes_where(is_in);
      }
    }
    all_threads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
      for (int warp = 1; warp < warps; warp++) bins[i] += bins[256 * warp + i];
    all_threads();
    if (threadIdx.x == 0) {
      int last = -1, bin = 255;
      for (; bin >= 0; bin--) {
        if (bins[bin] == 0.0f) continue;
        last = bin;
        if (so_far + bins[bin] >= wanted) break;
        so_far += bins[bin];
      }
      // Rounding may leave less than is wanted: then all are taken.
      if (bin < 0) so_far -= last < 0 ? 0.0f : bins[last];
      digit = static_cast<u32>(last < 0 ? 0 : last);
    }
    all_threads();
    prefix = prefix << 8 | digit;
  }
  above = so_far;
  return prefix;
}

// Leaves of scores of the order `tie` only the last ones, as many as fit below `wanted` of each one's share.
DEVICE void cut_ties(Row& row, u32 tie, float each, float wanted, float* room) {
  float count = 0.0f;
  for (i64 at = threadIdx.x; at < row.width; at += blockDim.x) count += order_of(score(row, at)) == tie;
  const float all = block_sum(count, room);
  float kept = 1.0f;
  while (kept < all && kept * each < wanted) kept += 1.0f;
  if (kept >= all) return;
  // Counts up to 2^24 are exact.
  i64 low = 0, high = row.width;
  while (low + 1 < high) {
    const i64 middle = (low + high) / 2;
    count = 0.0f;
    for (i64 at = middle + threadIdx.x; at < row.width; at += blockDim.x) count += order_of(score(row, at)) == tie;
    if (block_sum(count, room) >= kept) low = middle;
    else high = middle;
  }
  row.tie = tie;
  row.first_tie = low;
}

// Of a part of a row: its largest score, the sum of e^(score − that), and where it first is. NaN is larger than all. A block a row and part.
KERNEL(draw_parts, DrawArgs) {
  SHARED float room[32];
  const float given = static_cast<float>(a.settings[5 * blockIdx.x]);
  const Row row{a.logits + blockIdx.x * a.width, a.width, given == 0.0f ? 1.0f : given, 0, 0, 0};
  const i64 begin = blockIdx.y * PART, end = begin + PART < a.width ? begin + PART : a.width;
  float most = -infinite(), sum = 0.0f;
  i64 where = end;
  const auto take = [&](float x, i64 at) {
    if (!(x <= most)) {
      sum *= most == -infinite() ? 0.0f : exponential(most - x);
      most = x;
      where = at;
    }
    if (x != -infinite()) sum += exponential(x - most);
  };
  if (a.width % 4 == 0) {
    for (i64 at = begin + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) {
      const Four four = read_once(reinterpret_cast<const Four*>(row.logits + at));
      for (int i = 0; i < 4; i++) take(tempered(number_of(four.at[i]), row), at + i);
    }
  } else {
    for (i64 at = begin + threadIdx.x; at < end; at += blockDim.x) take(score(row, at), at);
  }
  const float top = block_largest(most, room);
  const float total = block_sum(most == -infinite() ? 0.0f : sum * exponential(most - top), room);
  // Positions up to 2^24 are exact in f32; vocabularies are smaller.
  const float first = -block_largest(most == top ? -static_cast<float>(where) : -2e7f, room);
  if (threadIdx.x == 0) {
    float* part = a.parts + 3 * (blockIdx.x * a.count + blockIdx.y);
    part[0] = top, part[1] = total, part[2] = first;
  }
}

KERNEL(draw, DrawArgs) {
  SHARED float room[32];
  SHARED float bins[256 * DRAW_WARPS];
  SHARED float sums[32];
  SHARED float left;
  SHARED i64 piece, last_piece;
  const double* settings = a.settings + 5 * blockIdx.x;
  const float given = static_cast<float>(settings[0]), asked = static_cast<float>(settings[1]);
  // Below 1 also after rounding to f32, so that the share that is sought is below the total.
  const float uniform = asked < BELOW_ONE ? asked : BELOW_ONE;
  const float top_k = static_cast<float>(settings[2]), top_p = static_cast<float>(settings[3]), min_p = static_cast<float>(settings[4]);
  const bool greedy = given == 0.0f;
  Row row{a.logits + blockIdx.x * a.width, a.width, greedy ? 1.0f : given, 0, 0, 0};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

  const float* parts = a.parts + 3 * blockIdx.x * a.count;
  float top = -infinite(), total = 0.0f, first = -1.0f;
  for (int part = 0; part < a.count; part++) top = largest(top, parts[3 * part]);
  for (int part = 0; part < a.count; part++) {
    const float most = parts[3 * part];
    // A part that is not finite has such a sum.
    total += most == -infinite() ? 0.0f : parts[3 * part + 1] * exponential(most - top);
    if (most == top && first < 0.0f) first = parts[3 * part + 2];
  }
  double* drawn = a.drawn + 2 * blockIdx.x;
  if (!(total > 0.0f && total < infinite())) {
    if (threadIdx.x == 0) drawn[0] = 0.0, drawn[1] = static_cast<double>(infinite() - infinite());
    return;
  }
  if (greedy) {
    if (threadIdx.x == 0) drawn[0] = static_cast<double>(first), drawn[1] = static_cast<double>(-log_of(total));
    return;
  }

  const bool cuts = (top_k > 0.0f && top_k < static_cast<float>(a.width)) || top_p < 1.0f || min_p > 0.0f;
  if (cuts) {
    const auto kept = [&] {
      float own = 0.0f;
      for (i64 at = threadIdx.x; at < a.width; at += blockDim.x) own += share(row, at, top);
      return block_sum(own, room);
    };
    float above;
    if (top_k > 0.0f && top_k < static_cast<float>(a.width)) row.least = reached(row, infinite(), top_k, bins, above);
    if (top_p < 1.0f) {
      const float wanted = top_p * kept();
      const u32 order = reached(row, top, wanted, bins, above);
      row.least = order;
      cut_ties(row, order, exponential(score_of(order) - top), wanted - above, room);
    }
    if (min_p > 0.0f) {
      const u32 least = order_of(top + log_of(min_p));
      if (least > row.least) row.least = least;
    }
    total = kept();
  }

  // The part that holds the share, whose sums are known unless the row was cut; the last one that has any, where rounding leaves nothing.
  i64 low = 0, high = a.width;
  float sought = uniform * total;
  if (!cuts) {
    float rest = sought;
    for (int part = 0; part < a.count; part++) {
      const float most = parts[3 * part], own = most == -infinite() ? 0.0f : parts[3 * part + 1] * exponential(most - top);
      if (own <= 0.0f) continue;
      low = part * PART;
      sought = rest;
      if (rest < own) break;
      rest -= own;
    }
    high = low + PART < a.width ? low + PART : a.width;
  }
  // Which piece of it, of as many numbers as a warp takes at a time times 32, holds the share: warps sum pieces in turn.
  const i64 length = 1024;
  if (threadIdx.x == 0) left = sought, piece = -1, last_piece = low;
  all_threads();
  for (i64 begin = low; begin < high; begin += length * warps) {
    float own = 0.0f;
    const i64 first = begin + length * warp;
    for (i64 at = first + lane; at < first + length && at < high; at += 32) own += share(row, at, top);
    own = warp_sum(own);
    if (lane == 0) sums[warp] = own;
    all_threads();
    if (threadIdx.x == 0) {
      for (int w = 0; w < warps; w++) {
        const i64 start = begin + length * w;
        if (start >= high || piece >= 0) break;
        if (sums[w] > 0.0f) last_piece = start;
        if (left < sums[w]) piece = start;
        else left -= sums[w];
      }
    }
    all_threads();
    if (piece >= 0) break;
  }
  if (warp == 0) {
    // Rounding may leave nothing: then it is the last token that has a share.
    const bool past = piece < 0;
    const i64 start = past ? last_piece : piece;
    float before = 0.0f;
    i64 chosen = -1, last = -1;
    for (i64 begin = start; begin < start + length && begin < high && chosen < 0; begin += 32) {
      const i64 at = begin + lane;
      const float own = at < high ? share(row, at, top) : 0.0f;
      float until = own;
      for (int step = 1; step < 32; step *= 2) {
        // Sums over the lanes up to this one, by what lies `step` below.
        const float other = lane_below(until, step);
        if (lane >= step) until += other;
      }
      const bool found = own > 0.0f && !past && left < before + until;
      const float at_first = -warp_largest(found ? -static_cast<float>(lane) : -1e9f);
      const float at_last = warp_largest(own > 0.0f ? static_cast<float>(lane) : -1.0f);
      if (at_first < 32.0f) chosen = begin + static_cast<i64>(at_first);
      if (at_last >= 0.0f) last = begin + static_cast<i64>(at_last);
      before += lane_at(until, 31);
    }
    if (chosen < 0) chosen = last;
    if (lane == 0) {
      const i64 token = chosen < 0 ? 0 : chosen;
      drawn[0] = static_cast<double>(token);
      drawn[1] = chosen < 0 ? static_cast<double>(infinite() - infinite()) : static_cast<double>(score(row, token) - top - log_of(total));
    }
  }
}
