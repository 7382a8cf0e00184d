// ---- (1 + A)⁻¹ of what is below the diagonal of matrices of up to INVERTED rows: a block a matrix, a thread a column

KERNEL(delta_inverse, InverseArgs) {
  SHARED float below[INVERTED * INVERTED], inverse[INVERTED * INVERTED];
  const int width = static_cast<int>(a.width), column = threadIdx.x;
  const i64 matrix = blockIdx.x * a.width * a.width;
  for (int at = threadIdx.x; at < width * width; at += blockDim.x) below[at] = a.matrices[matrix + at];
  all_threads();
  if (column >= width) return;
  for (int row = 0; row < width; row++) {
    float sum = row == column ? 1.0f : 0.0f;
#pragma unroll 4
    for (int at = 0; at < row; at++) sum -= below[row * width + at] * inverse[at * INVERTED + column];
    inverse[row * INVERTED + column] = sum;
    a.inverses[matrix + row * width + column] = sum;
  }
}

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

// A block's 65,536 registers are given to four warps at a time: those of up to 256 threads always suffice, and are left to the compiler.
#if VALUE_DIM > 128
BOUNDED_KERNEL(delta_step, DeltaArgs, (2 * VALUE_DIM + 127) / 128 * 128)
#else
KERNEL(delta_step, DeltaArgs)
#endif
{
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

// ---- Queries, keys and values of chunks of a gated delta net (delta_inputs.cpp): a warp for each chunk and head, which goes through the chunk's tokens. A lane has
// pairs of columns. CONV: tokens that the convolution sees

#if defined KEY_DIM && defined CONV

constexpr float LENGTH = 1e-6f;

template <int WIDTH>
struct Head {
  static constexpr int HELD = (WIDTH + 63) / 64 * 2;
  float weights[CONV][HELD], inputs[CONV][HELD], sum[HELD], silu[HELD];

  DEVICE static int column(int at) { return 64 * (at / 2) + 2 * static_cast<int>(threadIdx.x) + at % 2; }

  DEVICE static void read(const u16* from, float (&to)[HELD]) {
#pragma unroll
    for (int at = 0; at < HELD; at += 2) {
      const u32 pair = column(at) < WIDTH ? *reinterpret_cast<const u32*>(from + column(at)) : 0;
      to[at] = wide(pair & 0xffff), to[at + 1] = wide(pair >> 16);
    }
  }

  DEVICE static void write(const float (&from)[HELD], u16* to) {
#pragma unroll
    for (int at = 0; at < HELD; at += 2)
      if (column(at) < WIDTH) *reinterpret_cast<u32*>(to + column(at)) = pack(from[at], from[at + 1]);
  }

  DEVICE static void write(const float (&from)[HELD], float* to) {
#pragma unroll
    for (int at = 0; at < HELD; at++)
      if (column(at) < WIDTH) to[column(at)] = from[at];
  }

  DEVICE void next(const NetInputsArgs& a, i64 source, i64 first, i64 mixed) {
#pragma unroll
    for (int tap = 0; tap + 1 < CONV; tap++)
#pragma unroll
      for (int at = 0; at < HELD; at++) inputs[tap][at] = inputs[tap + 1][at];
    read((source < a.count ? a.packed + source * a.stride : a.others + (source - a.count) * mixed) + first, inputs[CONV - 1]);
  }

  // Weights, and the inputs before the chunk's.
  DEVICE void begin(const NetInputsArgs& a, const i64* sources, i64 first, i64 mixed) {
#pragma unroll
    for (int at = 0; at < HELD; at++)
#pragma unroll
      for (int tap = 0; tap < CONV; tap++) weights[tap][at] = column(at) < WIDTH ? wide(a.conv[(first + column(at)) * CONV + tap]) : 0.0f;
    for (int tap = 0; tap + 1 < CONV; tap++) next(a, sources[tap], first, mixed);
  }

  // Rounded as they are computed apart; returns the sum of squares.
  DEVICE float mix() {
    float squares = 0.0f;
#pragma unroll
    for (int at = 0; at < HELD; at++) {
      sum[at] = 0.0f;
#pragma unroll
      for (int tap = 0; tap < CONV; tap++) sum[at] += weights[tap][at] * inputs[tap][at];
      sum[at] = rounded(sum[at]);
      silu[at] = rounded(sum[at] * sigmoid(sum[at]));
      squares += silu[at] * silu[at];
    }
    return warp_sum(squares);
  }
};

// Columns from `first` on, whose results are scaled by `scale`, and to their length if it is not 0, for each of `copies` heads from `head` on.
template <int WIDTH>
DEVICE void head_inputs(const NetInputsArgs& a, i64 first, i64 mixed, float* out, i64 head, i64 copies, float scale) {
  Head<WIDTH> of;
  const i64* sources = a.sources + blockIdx.x * (CONV - 1 + a.chunk);
  const i64 heads = a.key_heads * a.shared;
  of.begin(a, sources, first, mixed);
  for (i64 token = 0; token < a.chunk; token++) {
    of.next(a, sources[token + CONV - 1], first, mixed);
    const float squares = of.mix(), by = scale == 0.0f ? 1.0f : scale / root_of(squares + LENGTH);
    for (i64 copy = 0; copy < copies; copy++) {
      float* const to = out + ((blockIdx.x * heads + head + copy) * a.chunk + token) * WIDTH;
#pragma unroll
      for (int at = 0; at < Head<WIDTH>::HELD; at++)
        if (of.column(at) < WIDTH) to[of.column(at)] = of.silu[at] * by;
    }
  }
}

KERNEL(delta_inputs, NetInputsArgs) {
  const i64 keys = a.key_heads * KEY_DIM, mixed = 2 * keys + a.key_heads * a.shared * VALUE_DIM, item = blockIdx.y;
  const float to_query = 1.0f / root_of(static_cast<float>(KEY_DIM));
  if (item < a.key_heads) head_inputs<KEY_DIM>(a, item * KEY_DIM, mixed, a.query, item * a.shared, a.shared, to_query);
  else if (item < 2 * a.key_heads) head_inputs<KEY_DIM>(a, item * KEY_DIM, mixed, a.key, (item - a.key_heads) * a.shared, a.shared, 1.0f);
  else head_inputs<VALUE_DIM>(a, 2 * keys + (item - 2 * a.key_heads) * VALUE_DIM, mixed, a.value, item - 2 * a.key_heads, 1, 0.0f);
}

template <int WIDTH>
DEVICE void head_gradients(const NetInputsArgs& a, i64 first, i64 mixed, const float* by_out, i64 head, i64 copies, float scale) {
  constexpr int HELD = Head<WIDTH>::HELD;
  Head<WIDTH> of;
  const i64* sources = a.sources + blockIdx.x * (CONV - 1 + a.chunk);
  const i64 heads = a.key_heads * a.shared;
  of.begin(a, sources, first, mixed);
  // By the sums of this token and of those before it, and by the weights.
  float by[CONV][HELD] = {}, by_weights[CONV][HELD] = {};
  for (i64 place = 0; place < a.chunk + CONV - 1; place++) {
#pragma unroll
    for (int ago = CONV - 1; ago > 0; ago--)
#pragma unroll
      for (int at = 0; at < HELD; at++) by[ago][at] = by[ago - 1][at];
#pragma unroll
    for (int at = 0; at < HELD; at++) by[0][at] = 0.0f;
    if (place < a.chunk) {
      of.next(a, sources[place + CONV - 1], first, mixed);
      const float squares = of.mix(), length = 1.0f / root_of(squares + LENGTH);
      float along = 0.0f;
      for (i64 copy = 0; copy < copies; copy++) {
        const float* from = by_out + ((blockIdx.x * heads + head + copy) * a.chunk + place) * WIDTH;
#pragma unroll
        for (int at = 0; at < HELD; at++) by[0][at] += of.column(at) < WIDTH ? from[of.column(at)] : 0.0f;
      }
#pragma unroll
      for (int at = 0; at < HELD; at++) along += by[0][at] * of.silu[at];
      along = warp_sum(along) * length * length;
#pragma unroll
      for (int at = 0; at < HELD; at++) {
        if (scale != 0.0f) by[0][at] = scale * length * (by[0][at] - of.silu[at] * along);
        const float s = sigmoid(of.sum[at]);
        by[0][at] *= s * (1.0f + of.sum[at] * (1.0f - s));
#pragma unroll
        for (int tap = 0; tap < CONV; tap++) by_weights[tap][at] += by[0][at] * of.inputs[tap][at];
      }
    }
    // What is at this place was seen by this token and those before it.
    float by_input[HELD];
#pragma unroll
    for (int at = 0; at < HELD; at++) {
      by_input[at] = 0.0f;
#pragma unroll
      for (int tap = 0; tap < CONV; tap++) by_input[at] += of.weights[tap][at] * by[tap][at];
    }
    const i64 source = sources[place];
    if (place < CONV - 1) of.write(by_input, a.by_seen + (blockIdx.x * (CONV - 1) + place) * mixed + first);
    else if (source < a.count) of.write(by_input, a.by_packed + source * mixed + first);
  }
#pragma unroll
  for (int at = 0; at < HELD; at++)
#pragma unroll
    for (int tap = 0; tap < CONV; tap++)
      if (of.column(at) < WIDTH) a.by_taps[(blockIdx.x * mixed + first + of.column(at)) * CONV + tap] = by_weights[tap][at];
}

KERNEL(delta_inputs_backward, NetInputsArgs) {
  const i64 keys = a.key_heads * KEY_DIM, mixed = 2 * keys + a.key_heads * a.shared * VALUE_DIM, item = blockIdx.y;
  const float to_query = 1.0f / root_of(static_cast<float>(KEY_DIM));
  if (item < a.key_heads) head_gradients<KEY_DIM>(a, item * KEY_DIM, mixed, a.by_query, item * a.shared, a.shared, to_query);
  else if (item < 2 * a.key_heads) head_gradients<KEY_DIM>(a, item * KEY_DIM, mixed, a.by_key, (item - a.key_heads) * a.shared, a.shared, 1.0f);
  else head_gradients<VALUE_DIM>(a, 2 * keys + (item - 2 * a.key_heads) * VALUE_DIM, mixed, a.by_value, item - 2 * a.key_heads, 1, 0.0f);
}

#endif
