// ---- Attention of one token of each slot over its cache, rotation and what is written included. PAGE: rows of a page; DIM, HEADS, KEYS: the width and the numbers of
// query and key heads; ROTATED: how many columns of a head are rotated; GATED: 1 if each query is followed by the gate of its head's output.
#ifdef DIM

constexpr int GROUP = HEADS / KEYS, ROWS = GROUP > 8 ? 16 : 8, WARPS = 2;
// Numbers of a key and of a value that a thread reads at a time. Products are sums over a head's columns and over positions, whose order is free: both are taken
// as they come in whole vectors, and the other operand alike.
constexpr int KEY_VECTOR = DIM % 32 == 0 ? 8 : 4, KEY_PARTS = DIM / (4 * KEY_VECTOR);
constexpr int VALUE_VECTOR = DIM % 64 == 0 ? 8 : DIM % 32 == 0 ? 4 : 2, VALUE_PARTS = DIM / (8 * VALUE_VECTOR);
constexpr int QUERY = GATED ? 2 * DIM : DIM, PROJECTED = HEADS * QUERY + 2 * KEYS * DIM;

template <int N>
DEVICE void read(u32 (&to)[N], const u16* from) {
  if constexpr (N == 4) {
    const Four four = read_once(reinterpret_cast<const Four*>(from));
    for (int i = 0; i < 4; i++) to[i] = four.at[i];
  } else if constexpr (N == 2) {
    const Two two = *reinterpret_cast<const Two*>(from);
    to[0] = two.at[0], to[1] = two.at[1];
  } else {
    to[0] = *reinterpret_cast<const u32*>(from);
  }
}

// The column that is kept at `place`: those that turn together are half a head apart, and so are those that don't turn.
DEVICE int column_at(int place) {
  const int second = place >= DIM / 2, pair = place - second * (DIM / 2);
  return pair < ROTATED / 2 ? second * (ROTATED / 2) + pair : ROTATED + second * ((DIM - ROTATED) / 2) + pair - ROTATED / 2;
}

// A head's vector by a warp: normed, if there is a weight, and rotated; rounded as it is stored.
DEVICE void turned(const u16* from, const u16* norm, const AttendArgs& a, const float* cos, const float* sin, u16* to) {
  const int lane = threadIdx.x % 32, half = DIM / 2;
  const float more = static_cast<float>(a.more);
  float scale = 1.0f;
  if (norm) {
    float squares = 0.0f;
    for (int i = lane; i < DIM; i += 32) squares += wide(from[i]) * wide(from[i]);
    scale = 1.0f / root_of(warp_sum(squares) / DIM + static_cast<float>(a.eps));
  }
  for (int i = lane; i < half; i += 32) {
    const int first = column_at(i), second = column_at(i + half);
    float x = wide(from[first]), y = wide(from[second]);
    if (norm) x = rounded(x * scale * (wide(norm[first]) + more)), y = rounded(y * scale * (wide(norm[second]) + more));
    to[i] = narrow(x * cos[i] + y * sin[i]);
    to[i + half] = narrow(y * cos[i + half] + x * sin[i + half]);
  }
}

// An output, by its gate if there is one.
DEVICE u16 gated(const AttendArgs& a, i64 slot, int head, int column, float out) {
  return narrow(GATED ? out * sigmoid(wide(a.qkv[slot * PROJECTED + head * QUERY + DIM + column])) : out);
}

KERNEL(attend, AttendArgs) {
  SHARED u16 queries[16 * DIM];
  SHARED float most_of[WARPS * ROWS], sum_of[WARPS * ROWS];
  SHARED float out_of[WARPS * ROWS * DIM];
  // Key heads of a slot are neighbours in memory, and are read at the same time.
  const int slot = blockIdx.y, kv = blockIdx.x, split = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const i64 position = a.positions[slot];
  if (position < 0) {
    if (split == 0 && a.splits == 1)
      for (int i = threadIdx.x; i < GROUP * DIM; i += 32 * WARPS) a.out[(static_cast<i64>(slot) * HEADS + kv * GROUP) * DIM + i] = 0;
    return;
  }
  const float *cos = a.cos + position * DIM, *sin = a.sin + position * DIM;
  const u16 *own = a.qkv + static_cast<i64>(slot) * PROJECTED, *own_keys = own + HEADS * QUERY;
  const i64 stride = 2 * KEYS * DIM;
  u16* keys = a.cache + kv * DIM;
  const i64* table = a.table + slot * a.width;

  for (int i = threadIdx.x; i < (16 - GROUP) * DIM; i += 32 * WARPS) queries[GROUP * DIM + i] = 0;
  for (int head = warp; head < GROUP; head += WARPS)
    turned(own + (kv * GROUP + head) * QUERY, a.q_norm, a, cos, sin, queries + head * DIM);
  const i64 first = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
  // Splits and warps take sixteen positions at a time, which one page has.
  const i64 from_tile = first / 16, tiles = position / 16 - from_tile + 1, each = (tiles + a.splits - 1) / a.splits;
  const i64 end = (split + 1) * each < tiles ? (split + 1) * each : tiles;
  if (split == (tiles - 1) / each) {
    u16* to = keys + (table[position / PAGE] * PAGE + position % PAGE) * stride;
    if (warp == WARPS - 1) turned(own_keys + kv * DIM, a.k_norm, a, cos, sin, to);
    if (warp == 0)
      for (int i = lane; i < DIM; i += 32) to[KEYS * DIM + i] = own_keys[(KEYS + kv) * DIM + i];
  }
  all_threads();

  u32 query[DIM / 16][4];
  for (int part = 0; part < KEY_PARTS; part++)
    for (int step = 0; step < KEY_VECTOR / 4; step++) {
      const int column = part * 4 * KEY_VECTOR + quad * KEY_VECTOR + step * 4;
      for (int i = 0; i < 4; i++) {
        const u16* at = queries + (row + (i % 2) * 8) * DIM + column + i / 2 * 2;
        query[part * (KEY_VECTOR / 4) + step][i] = word(at[0], at[1]);
      }
    }

  const float scale = static_cast<float>(a.scale), cap = static_cast<float>(a.cap);
  float most[2] = {-infinite(), -infinite()}, sum[2] = {0.0f, 0.0f};
  float out[DIM / 8][4];
  for (int i = 0; i < DIM / 8; i++)
    for (int n = 0; n < 4; n++) out[i][n] = 0.0f;
  // The next tile's page is read ahead of its keys.
  const auto page_of = [&](i64 tile) { return table[(from_tile + tile) * 16 / PAGE]; };
  i64 page = split * each + warp < end ? page_of(split * each + warp) : 0;
  for (i64 tile = split * each + warp; tile < end; tile += WARPS) {
    const i64 begin = 16 * (from_tile + tile), last = position - begin;
    const u16* rows = keys + (page * PAGE + begin % PAGE) * stride;
    if (tile + WARPS < end) page = page_of(tile + WARPS);
    u32 key[2][KEY_PARTS][KEY_VECTOR / 2], value[4][VALUE_PARTS][VALUE_VECTOR / 2];
    for (int half = 0; half < 2; half++) {
      const i64 at = half * 8 + row;
      const u16* from = rows + (at < last ? at : last) * stride + quad * KEY_VECTOR;
      for (int part = 0; part < KEY_PARTS; part++) read(key[half][part], from + part * 4 * KEY_VECTOR);
    }
    for (int i = 0; i < 4; i++) {
      const i64 at = i / 2 * 8 + 2 * quad + i % 2;
      const u16* from = rows + KEYS * DIM + (at < last ? at : last) * stride + row * VALUE_VECTOR;
      for (int part = 0; part < VALUE_PARTS; part++) read(value[i][part], from + part * 8 * VALUE_VECTOR);
    }
    float scores[2][4];
    for (int half = 0; half < 2; half++) {
      for (int n = 0; n < 4; n++) scores[half][n] = 0.0f;
      for (int part = 0; part < KEY_PARTS; part++)
        for (int step = 0; step < KEY_VECTOR / 4; step++)
          multiply(scores[half], query[part * (KEY_VECTOR / 4) + step], key[half][part][2 * step], key[half][part][2 * step + 1]);
      for (int n = 0; n < 4; n++) {
        float score = scores[half][n] * scale;
        if (cap > 0.0f) score = cap * tanh_of(score / cap);
        const i64 at = begin + half * 8 + 2 * quad + n % 2;
        scores[half][n] = at >= first && at <= position ? score * LOG2_E : -infinite();
      }
    }
    for (int r = 0; r < ROWS / 8; r++) {
      float top = largest(largest(scores[0][2 * r], scores[0][2 * r + 1]), largest(scores[1][2 * r], scores[1][2 * r + 1]));
      top = largest(top, lane_xor(top, 1));
      top = largest(largest(top, lane_xor(top, 2)), most[r]);
      const float shrink = power2(most[r] - top);
      most[r] = top;
      float own_sum = 0.0f;
      for (int half = 0; half < 2; half++)
        for (int n = 2 * r; n < 2 * r + 2; n++) own_sum += scores[half][n] = power2(scores[half][n] - top);
      sum[r] = sum[r] * shrink + own_sum;
      for (int i = 0; i < DIM / 8; i++) out[i][2 * r] *= shrink, out[i][2 * r + 1] *= shrink;
    }
    u32 shares[4] = {pack(scores[0][0], scores[0][1]), 0, pack(scores[1][0], scores[1][1]), 0};
    if (ROWS > 8) shares[1] = pack(scores[0][2], scores[0][3]), shares[3] = pack(scores[1][2], scores[1][3]);
    for (int part = 0; part < VALUE_PARTS; part++)
      for (int i = 0; i < VALUE_VECTOR; i++) {
        const u32 order = i % 2 ? 0x7632 : 0x5410;
        multiply(out[part * VALUE_VECTOR + i], shares, choose_bytes(value[0][part][i / 2], value[1][part][i / 2], order),
                 choose_bytes(value[2][part][i / 2], value[3][part][i / 2], order));
      }
  }

  for (int r = 0; r < ROWS / 8; r++) {
    sum[r] += lane_xor(sum[r], 1);
    sum[r] += lane_xor(sum[r], 2);
    const int at = warp * ROWS + row + 8 * r;
    if (quad == 0) most_of[at] = most[r], sum_of[at] = sum[r];
    for (int part = 0; part < VALUE_PARTS; part++)
      for (int i = 0; i < VALUE_VECTOR; i++)
        for (int n = 0; n < 2; n++)
          out_of[at * DIM + part * 8 * VALUE_VECTOR + (2 * quad + n) * VALUE_VECTOR + i] = out[part * VALUE_VECTOR + i][2 * r + n];
  }
  all_threads();
  for (int i = threadIdx.x; i < GROUP * DIM; i += 32 * WARPS) {
    const int head = i / DIM, column = i % DIM;
    // With several splits, the kernel that puts them together has the sink.
    const float sink = a.sinks && a.splits == 1 ? a.sinks[kv * GROUP + head] * LOG2_E : -infinite();
    float top = sink, of = 0.0f;
    for (int w = 0; w < WARPS; w++) top = largest(top, most_of[w * ROWS + head]);
    float total = sink == -infinite() ? 0.0f : power2(sink - top);
    for (int w = 0; w < WARPS; w++) {
      const float share = top == -infinite() ? 0.0f : power2(most_of[w * ROWS + head] - top);
      total += share * sum_of[w * ROWS + head];
      of += share * out_of[(w * ROWS + head) * DIM + column];
    }
    const i64 place = static_cast<i64>(slot) * HEADS + kv * GROUP + head;
    if (a.splits == 1) {
      a.out[place * DIM + column] = gated(a, slot, kv * GROUP + head, column, of / total);
    } else {
      float* part = a.parts + (place * a.splits + split) * (DIM + 1);
      part[column] = total > 0.0f ? of / total : 0.0f;
      // The logarithm to base 2 of the part's sum.
      if (column == 0) part[DIM] = total > 0.0f ? top + log_of(total) * LOG2_E : -infinite();
    }
  }
}

// The parts of a head, put together: a block a slot and head.
KERNEL(merge, AttendArgs) {
  const i64 place = static_cast<i64>(blockIdx.x) * HEADS + blockIdx.y;
  const float* parts = a.parts + place * a.splits * (DIM + 1);
  if (a.positions[blockIdx.x] < 0) {
    for (int column = threadIdx.x; column < DIM; column += blockDim.x) a.out[place * DIM + column] = 0;
    return;
  }
  const float sink = a.sinks ? a.sinks[blockIdx.y] * LOG2_E : -infinite();
  float top = sink;
  for (int split = 0; split < a.splits; split++) top = largest(top, parts[split * (DIM + 1) + DIM]);
  for (int column = threadIdx.x; column < DIM; column += blockDim.x) {
    float total = sink == -infinite() ? 0.0f : power2(sink - top), of = 0.0f;
    for (int split = 0; split < a.splits; split++) {
      const float share = power2(parts[split * (DIM + 1) + DIM] - top);
      total += share;
      of += share * parts[split * (DIM + 1) + column];
    }
    a.out[place * DIM + column] = gated(a, blockIdx.x, blockIdx.y, column, of / total);
  }
}
#endif
