// Kernels for NVIDIA GPUs from Ampere on, compiled at run time for the device at hand (gpu.cpp). Numbers are bf16 or f16 in memory and f32 in registers.
//
// A kernel takes one structure (kernel_args.h). Definitions before the kernels: FORMAT (0 bf16, 1 f16), and for `attend` PAGE, DIM, HEADS and KEYS, the width and the
// numbers of query and key heads, and for `delta_step` KEY_DIM and VALUE_DIM. Without a GPU, tests compile this file as C++ for a processor, whose threads are fibres (tests/stand_in_gpu/fibres.hpp).

#ifdef __CUDACC_RTC__
#define KERNEL(name, Args) extern "C" __global__ void name(const Args a)
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
struct alignas(8) Two { u32 at[2]; };
struct alignas(16) Four { u32 at[4]; };
// What is read once takes no place of what is read again.
DEVICE Four read_once(const Four* from) {
  Four four;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(four.at[0]), "=r"(four.at[1]), "=r"(four.at[2]), "=r"(four.at[3]) : "l"(from) : "memory");
  return four;
}
DEVICE float lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float lane_below(float x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }
DEVICE float lane_at(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE void all_threads() { __syncthreads(); }
DEVICE float power2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float infinite() { return __int_as_float(0x7f800000); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float number_of(u32 bits) { return __uint_as_float(bits); }
DEVICE void add_to(float* sum, float x) { atomicAdd(sum, x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE float root_of(float x) { return sqrtf(x); }
// Bytes of two words, chosen by the digits of `order`.
DEVICE u32 choose_bytes(u32 x, u32 y, u32 order) { return __byte_perm(x, y, order); }
// d += a · b of matrices 16 × 16 and 16 × 8, spread over a warp.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FORMAT == 0
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if FORMAT == 0
DEVICE float wide(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
DEVICE u32 pack(float low, float high) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
#else
DEVICE float wide(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEVICE u32 pack(float low, float high) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
#endif
#endif

DEVICE float largest(float x, float y) { return x > y ? x : y; }
DEVICE u16 narrow(float x) { return static_cast<u16>(pack(x, 0.0f)); }
DEVICE u32 word(u16 low, u16 high) { return static_cast<u32>(low) | static_cast<u32>(high) << 16; }

constexpr float LOG2_E = 1.44269504088896341f;
DEVICE float exponential(float x) { return power2(x * LOG2_E); }

struct Sum {
  DEVICE float operator()(float x, float y) const { return x + y; }
};
struct Largest {
  DEVICE float operator()(float x, float y) const { return largest(x, y); }
};

template <typename Join>
DEVICE float over_warp(float x, Join join) {
  for (int mask = 16; mask > 0; mask /= 2) x = join(x, lane_xor(x, mask));
  return x;
}

// Over the block, given to all of its threads. `room`: a number for each warp.
template <typename Join>
DEVICE float over_block(float x, float* room, Join join) {
  x = over_warp(x, join);
  all_threads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  all_threads();
  float all = room[0];
  for (int warp = 1; warp < blockDim.x / 32; warp++) all = join(all, room[warp]);
  return all;
}

DEVICE float warp_sum(float x) { return over_warp(x, Sum()); }
DEVICE float warp_largest(float x) { return over_warp(x, Largest()); }
DEVICE float block_sum(float x, float* room) { return over_block(x, room, Sum()); }
DEVICE float block_largest(float x, float* room) { return over_block(x, room, Largest()); }

// ---- Sum of a branch and the stream, and its RMS norm: a row a block, of a multiple of 8 numbers


KERNEL(add_rms_norm, NormArgs) {
  SHARED float room[32];
  const i64 row = blockIdx.x * a.width;
  float squares = 0.0f;
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    const Four x = *reinterpret_cast<const Four*>(a.x + row + at), y = *reinterpret_cast<const Four*>(a.y + row + at);
    Four sum;
    for (int i = 0; i < 4; i++) {
      const float low = wide(x.at[i] & 0xffff) + wide(y.at[i] & 0xffff), high = wide(x.at[i] >> 16) + wide(y.at[i] >> 16);
      sum.at[i] = pack(low, high);
      // Of the rounded sum, which is what goes on.
      const float l = wide(sum.at[i] & 0xffff), h = wide(sum.at[i] >> 16);
      squares += l * l + h * h;
    }
    *reinterpret_cast<Four*>(a.sum + row + at) = sum;
  }
  const float scale = 1.0f / root_of(block_sum(squares, room) / static_cast<float>(a.width) + static_cast<float>(a.eps));
  if (threadIdx.x == 0) a.factors[blockIdx.x] = scale;
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    const Four sum = *reinterpret_cast<const Four*>(a.sum + row + at), weight = *reinterpret_cast<const Four*>(a.weight + at);
    Four normed;
    for (int i = 0; i < 4; i++)
      normed.at[i] = pack(wide(sum.at[i] & 0xffff) * scale * wide(weight.at[i] & 0xffff), wide(sum.at[i] >> 16) * scale * wide(weight.at[i] >> 16));
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

KERNEL(nf4, Nf4Args) {
  for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < a.len / 8; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    const u32 codes = *reinterpret_cast<const u32*>(a.codes + 4 * i);
    const i64 block = i / 8;
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

// ---- Weighted sum of the rows of each token, of a multiple of 8 numbers: a token a block, added up in f32 in the order of `places`

KERNEL(combine, CombineArgs) {
  const i64 first = blockIdx.x * a.each;
  for (i64 at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x) {
    float sum[8] = {};
    for (i64 of = first; of < first + a.each; of++) {
      const Four row = *reinterpret_cast<const Four*>(a.rows + a.places[of] * a.width + at);
      const float weight = a.weights ? a.weights[of] : 1.0f;
      for (int w = 0; w < 4; w++) {
        sum[2 * w] += weight * wide(row.at[w] & 0xffff);
        sum[2 * w + 1] += weight * wide(row.at[w] >> 16);
      }
    }
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
// pass. `bins`: 256 numbers.
DEVICE u32 reached(const Row& row, float top, float wanted, float* bins, float& above) {
  SHARED u32 digit;
  SHARED float so_far;
  u32 prefix = 0;
  if (threadIdx.x == 0) so_far = 0.0f;
  for (int shift = 24; shift >= 0; shift -= 8) {
    all_threads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0.0f;
    all_threads();
    for (i64 at = threadIdx.x; at < row.width; at += blockDim.x) {
      const u32 order = order_of(score(row, at));
      if (order < row.least || (shift < 24 && order >> (shift + 8) != prefix)) continue;
      const float weight = top == infinite() ? 1.0f : exponential(score(row, at) - top);
      if (weight > 0.0f) add_to(&bins[order >> shift & 0xff], weight);
    }
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
  SHARED float bins[256];
  SHARED float sums[32];
  SHARED float left;
  SHARED i64 piece, last_piece;
  const double* settings = a.settings + 5 * blockIdx.x;
  const float given = static_cast<float>(settings[0]), uniform = static_cast<float>(settings[1]);
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

// ---- One token of each sequence in a gated delta net: a block for each sequence and head of keys, two threads for each column of values

#ifdef KEY_DIM

DEVICE float rounded(float x) { return wide(narrow(x)); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

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

// ---- Attention of one token of each slot over its cache, rotation and what is written included
#ifdef DIM

constexpr int GROUP = HEADS / KEYS, ROWS = GROUP > 8 ? 16 : 8, WARPS = 2;
// Numbers of a key and of a value that a thread reads at a time. Products are sums over a head's columns and over positions, whose order is free: both are taken
// as they come in whole vectors, and the other operand alike.
constexpr int KEY_VECTOR = DIM % 32 == 0 ? 8 : 4, KEY_PARTS = DIM / (4 * KEY_VECTOR);
constexpr int VALUE_VECTOR = DIM % 64 == 0 ? 8 : DIM % 32 == 0 ? 4 : 2, VALUE_PARTS = DIM / (8 * VALUE_VECTOR);


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

// A head's vector by a warp: normed, if there is a weight, and rotated; rounded as it is stored.
DEVICE void turned(const u16* from, const u16* norm, float eps, const float* cos, const float* sin, u16* to) {
  const int lane = threadIdx.x % 32, half = DIM / 2;
  float scale = 1.0f;
  if (norm) {
    float squares = 0.0f;
    for (int i = lane; i < DIM; i += 32) squares += wide(from[i]) * wide(from[i]);
    scale = 1.0f / root_of(warp_sum(squares) / DIM + eps);
  }
  for (int i = lane; i < half; i += 32) {
    float x = wide(from[i]), y = wide(from[i + half]);
    if (norm) x = wide(narrow(x * scale * wide(norm[i]))), y = wide(narrow(y * scale * wide(norm[i + half])));
    to[i] = narrow(x * cos[i] + y * sin[i]);
    to[i + half] = narrow(y * cos[i + half] + x * sin[i + half]);
  }
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
  const u16* own = a.qkv + static_cast<i64>(slot) * (HEADS + 2 * KEYS) * DIM;
  const i64 stride = 2 * KEYS * DIM;
  u16* keys = a.cache + kv * DIM;
  const i64* table = a.table + slot * a.width;

  for (int i = threadIdx.x; i < (16 - GROUP) * DIM; i += 32 * WARPS) queries[GROUP * DIM + i] = 0;
  for (int head = warp; head < GROUP; head += WARPS)
    turned(own + (kv * GROUP + head) * DIM, a.q_norm, static_cast<float>(a.eps), cos, sin, queries + head * DIM);
  const i64 first = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
  // Splits and warps take sixteen positions at a time, which one page has.
  const i64 from_tile = first / 16, tiles = position / 16 - from_tile + 1, each = (tiles + a.splits - 1) / a.splits;
  const i64 end = (split + 1) * each < tiles ? (split + 1) * each : tiles;
  if (split == (tiles - 1) / each) {
    u16* to = keys + (table[position / PAGE] * PAGE + position % PAGE) * stride;
    if (warp == WARPS - 1) turned(own + (HEADS + kv) * DIM, a.k_norm, static_cast<float>(a.eps), cos, sin, to);
    if (warp == 0)
      for (int i = lane; i < DIM; i += 32) to[KEYS * DIM + i] = own[(HEADS + KEYS + kv) * DIM + i];
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
      a.out[place * DIM + column] = narrow(of / total);
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
    a.out[place * DIM + column] = narrow(of / total);
  }
}
#endif
