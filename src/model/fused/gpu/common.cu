// Kernels for NVIDIA GPUs from Ampere on, compiled at run time for the device at hand (launch.cpp): this file, then those next to it. Numbers are bf16 or f16 in memory
// and f32 in registers.
//
// A kernel takes one structure (args.h). Definitions before the kernels: FORMAT (0 bf16, 1 f16), those of delta.cu and those of attend.cu. Without a GPU, tests compile
// them as C++ for a processor, whose threads are fibres (tests/stand_in_gpu/fibres.hpp).

#ifdef __CUDACC_RTC__
#define KERNEL(name, Args) extern "C" __global__ void name(const Args a)
// In blocks of at most so many threads, for all of which there are registers.
#define BOUNDED_KERNEL(name, Args, threads) extern "C" __global__ void __launch_bounds__(threads) name(const Args a)
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
// Lanes for which it holds, a bit each; and the lowest of them.
DEVICE u32 lanes_where(bool holds) { return __ballot_sync(0xffffffffu, holds); }
DEVICE int lowest_lane(u32 lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
DEVICE void all_threads() { __syncthreads(); }
DEVICE float power2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float infinite() { return __int_as_float(0x7f800000); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float number_of(u32 bits) { return __uint_as_float(bits); }
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
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
DEVICE float rounded(float x) { return wide(narrow(x)); }

DEVICE float block_sum(float x, float* room) { return over_block(x, room, Sum()); }
DEVICE float block_largest(float x, float* room) { return over_block(x, room, Largest()); }
