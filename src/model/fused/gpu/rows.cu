// ---- RMS norm, also of the sum of a branch and the stream: a row a block, of a multiple of 8 numbers

KERNEL(rms_norm, NormArgs) {
  SHARED float room[32];
  const i64 row = blockIdx.x * a.width;
  float squares = 0.0f;
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    Four sum = *reinterpret_cast<const Four*>(a.x + row + at);
    if (a.y) {
      const Four y = *reinterpret_cast<const Four*>(a.y + row + at);
      for (int i = 0; i < 4; i++) sum.at[i] = pack(wide(sum.at[i] & 0xffff) + wide(y.at[i] & 0xffff), wide(sum.at[i] >> 16) + wide(y.at[i] >> 16));
      *reinterpret_cast<Four*>(a.sum + row + at) = sum;
    }
    // Of the rounded sum, which is what goes on.
    for (int i = 0; i < 4; i++) {
      const float low = wide(sum.at[i] & 0xffff), high = wide(sum.at[i] >> 16);
      squares += low * low + high * high;
    }
  }
  const float scale = 1.0f / root_of(block_sum(squares, room) / static_cast<float>(a.width) + static_cast<float>(a.eps));
  if (threadIdx.x == 0) a.factors[blockIdx.x] = scale;
  const u16* from = a.y ? a.sum : a.x;
  const float more = static_cast<float>(a.more);
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    const Four x = *reinterpret_cast<const Four*>(from + row + at), weight = *reinterpret_cast<const Four*>(a.weight + at);
    Four normed;
    for (int i = 0; i < 4; i++)
      normed.at[i] = pack(wide(x.at[i] & 0xffff) * scale * (wide(weight.at[i] & 0xffff) + more), wide(x.at[i] >> 16) * scale * (wide(weight.at[i] >> 16) + more));
    *reinterpret_cast<Four*>(a.normed + row + at) = normed;
  }
}

// ---- SwiGLU: gate and up side by side in one row of 2 · width numbers → silu(gate) · up


KERNEL(swiglu, GateArgs) {
  const i64 all = a.rows * a.width / 8;
  for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    const i64 row = 8 * i / a.width, at = 8 * i % a.width;
    const u16* from = a.gate_up + 2 * row * a.width + at;
    const Four gate = *reinterpret_cast<const Four*>(from), up = *reinterpret_cast<const Four*>(from + a.width);
    Four out;
    for (int w = 0; w < 4; w++) {
      const float g = wide(gate.at[w] & 0xffff), h = wide(gate.at[w] >> 16);
      out.at[w] = pack(g / (1.0f + exponential(-g)) * wide(up.at[w] & 0xffff), h / (1.0f + exponential(-h)) * wide(up.at[w] >> 16));
    }
    *reinterpret_cast<Four*>(a.out + row * a.width + at) = out;
  }
}

// ---- Numbers in 4 bits, eight of them a thread

KERNEL(four_bits, FourBitsArgs) {
  for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < a.len / 8; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    const u32 codes = *reinterpret_cast<const u32*>(a.codes + 4 * i);
    const i64 block = 8 * i / a.block;
    const float scale = a.tables[16 + a.scales[block]] * a.outer[block / a.outer_block] + static_cast<float>(a.offset);
    Four out;
    for (int w = 0; w < 4; w++) out.at[w] = pack(a.tables[codes >> (8 * w + 4) & 15] * scale, a.tables[codes >> 8 * w & 15] * scale);
    *reinterpret_cast<Four*>(a.out + 8 * i) = out;
  }
}

DEVICE void swiglu_slopes(float gate, float up, float by_out, float& by_gate, float& by_up) {
  const float sigmoid = 1.0f / (1.0f + exponential(-gate)), silu = gate * sigmoid;
  by_up = by_out * silu;
  by_gate = by_out * up * (sigmoid + silu * (1.0f - sigmoid));
}

// `out`: the gradient by gate and up, as wide as they are.
KERNEL(swiglu_backward, GateArgs) {
  const i64 all = a.rows * a.width / 8;
  for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    const i64 row = 8 * i / a.width, at = 8 * i % a.width, place = 2 * row * a.width + at;
    const Four gate = *reinterpret_cast<const Four*>(a.gate_up + place), up = *reinterpret_cast<const Four*>(a.gate_up + place + a.width),
               by_out = *reinterpret_cast<const Four*>(a.by_out + row * a.width + at);
    Four by_gate, by_up;
    for (int w = 0; w < 4; w++) {
      float g[2], u[2];
      swiglu_slopes(wide(gate.at[w] & 0xffff), wide(up.at[w] & 0xffff), wide(by_out.at[w] & 0xffff), g[0], u[0]);
      swiglu_slopes(wide(gate.at[w] >> 16), wide(up.at[w] >> 16), wide(by_out.at[w] >> 16), g[1], u[1]);
      by_gate.at[w] = pack(g[0], g[1]);
      by_up.at[w] = pack(u[0], u[1]);
    }
    *reinterpret_cast<Four*>(a.out + place) = by_gate;
    *reinterpret_cast<Four*>(a.out + place + a.width) = by_up;
  }
}

// ---- Rotation of heads by their row's cosines and sines: x · cos + swap_halves(x) · sin · turn. `turn` = −1 turns back. A block a row.


KERNEL(rotate, RotateArgs) {
  const u16* x = a.x + blockIdx.x * a.row_stride;
  const float *cos = a.cos + blockIdx.x * a.dim, *sin = a.sin + blockIdx.x * a.dim;
  u16* out = a.out + blockIdx.x * a.heads * a.dim;
  const int half = static_cast<int>(a.dim) / 2, pairs = half / 2;
  const float turn = static_cast<float>(a.turn);
  // Two neighbours and their counterparts in the other half.
  for (int i = threadIdx.x; i < a.heads * pairs; i += blockDim.x) {
    const int at = i / pairs * static_cast<int>(a.dim) + 2 * (i % pairs), column = 2 * (i % pairs);
    const u32 first = *reinterpret_cast<const u32*>(x + at), second = *reinterpret_cast<const u32*>(x + at + half);
    float low[2], high[2];
    for (int n = 0; n < 2; n++) {
      const float p = wide(n ? first >> 16 : first & 0xffff), q = wide(n ? second >> 16 : second & 0xffff);
      low[n] = p * cos[column + n] + q * sin[column + n] * turn;
      high[n] = q * cos[column + n + half] + p * sin[column + n + half] * turn;
    }
    *reinterpret_cast<u32*>(out + at) = pack(low[0], low[1]);
    *reinterpret_cast<u32*>(out + at + half) = pack(high[0], high[1]);
  }
}
