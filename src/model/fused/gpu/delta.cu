// ---- One token of each sequence in a gated delta net: a block for each sequence and head of keys, two threads for each column of values. KEY_DIM and VALUE_DIM: widths of its heads

#ifdef KEY_DIM

// A channel's convolution, rounded as it is computed apart, and its inputs moved on.
DEVICE float convolved(const DeltaArgs& a, const u16* row, i64 mixed, i64 channel) {
  u16* past = a.inputs + (blockIdx.x / a.key_heads * mixed + channel) * (a.kernel - 1);
  const u16 *weights = a.conv + channel * a.kernel, newest = row[channel];
  float sum = wide(weights[a.kernel - 1]) * wide(newest);
  for (i64 at = 0; at + 1 < a.kernel; at++) {
    const u16 input = past[at];
    sum += wide(weights[at]) * wide(input);
    if (at > 0) past[at - 1] = input;
  }
  if (a.kernel > 1) past[a.kernel - 2] = newest;
  const float x = rounded(sum);
  return rounded(x * sigmoid(x));
}

KERNEL(delta_step, DeltaArgs) {
  SHARED float query[KEY_DIM], key[KEY_DIM], room[32];
  const i64 at_row = blockIdx.x / a.key_heads, key_head = blockIdx.x % a.key_heads, heads = a.key_heads * a.shared;
  const i64 keys = a.key_heads * KEY_DIM, values = heads * VALUE_DIM, mixed = 2 * keys + values;
  const u16* row = a.projected + at_row * (mixed + values + 2 * heads);
  float of_query = 0.0f, of_key = 0.0f;
  for (i64 at = threadIdx.x; at < KEY_DIM; at += blockDim.x) {
    const float q = convolved(a, row, mixed, key_head * KEY_DIM + at), k = convolved(a, row, mixed, keys + key_head * KEY_DIM + at);
    query[at] = q, key[at] = k;
    of_query += q * q, of_key += k * k;
  }
  const float to_query = 1.0f / (root_of(block_sum(of_query, room) + 1e-6f) * root_of(static_cast<float>(KEY_DIM)));
  const float to_key = 1.0f / root_of(block_sum(of_key, room) + 1e-6f);
  float product = 0.0f;
  for (i64 at = threadIdx.x; at < KEY_DIM; at += blockDim.x) {
    query[at] *= to_query, key[at] *= to_key;
    product += query[at] * key[at];
  }
  product = block_sum(product, room);
  // A column is spread over adjacent lanes.
  constexpr int PARTS = 2, HELD = KEY_DIM / PARTS;
  const int column = static_cast<int>(threadIdx.x) / PARTS, first = static_cast<int>(threadIdx.x) % PARTS * HELD;
  const bool is_column = column < VALUE_DIM, tells = is_column && first == 0;
  for (i64 head = key_head * a.shared; head < (key_head + 1) * a.shared; head++) {
    const float beta = sigmoid(wide(row[mixed + values + head])), step = wide(row[mixed + values + heads + head]) + wide(a.step_bias[head]);
    const float softplus = step > 20.0f ? step : log_of(1.0f + exponential(step));
    const float decay = exponential(-exponential(wide(a.decay[head])) * softplus);
    float* const state = a.states + ((at_row * heads + head) * KEY_DIM + first) * VALUE_DIM + column;
    float held[HELD], known = 0.0f, read = 0.0f, value = tells ? convolved(a, row, mixed, 2 * keys + head * VALUE_DIM + column) : 0.0f;
#pragma unroll
    for (int at = 0; at < HELD; at++) {
      held[at] = is_column ? state[at * VALUE_DIM] * decay : 0.0f;
      known += key[first + at] * held[at];
      read += query[first + at] * held[at];
    }
    known += lane_xor(known, 1), read += lane_xor(read, 1), value += lane_xor(value, 1);
    const float change = (value - known) * beta, out = read + product * change;
#pragma unroll
    for (int at = 0; at < HELD; at++)
      if (is_column) state[at * VALUE_DIM] = held[at] + key[first + at] * change;
    const float scale = 1.0f / root_of(block_sum(tells ? out * out : 0.0f, room) / static_cast<float>(VALUE_DIM) + static_cast<float>(a.eps));
    if (tells) {
      const i64 place = head * VALUE_DIM + column;
      const float gate = wide(row[mixed + place]);
      a.out[at_row * values + place] = narrow(out * scale * wide(a.norm[column]) * (gate * sigmoid(gate)));
    }
  }
}

#endif
