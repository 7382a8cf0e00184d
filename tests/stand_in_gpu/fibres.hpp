// What our kernels need of a GPU, on a processor: the threads of a block are fibres that take turns, and the lanes of a warp wait for one another where they
// exchange numbers. Blocks run one after the other. Included before them by the stand-in's compiler (driver.cpp).

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace fibres {

constexpr size_t STACK = 64 << 10;

// Goes on where the stack `to` was left, and leaves this one in `from`. It keeps what a call has to keep, and asks nothing of the system.
extern "C" void fibres_switch(void** from, void* to);
asm(R"(
.text
.type fibres_switch, @function
fibres_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Fibre {
  void* place;
  std::vector<char> stack = std::vector<char>(STACK);
  bool done = false;

  // What the switch finds on a stack: six registers, where to go on, and above them no caller.
  void begin_at(void (*entry)()) {
    const auto top = reinterpret_cast<uintptr_t>(stack.data() + STACK) / 16 * 16;
    void** const words = reinterpret_cast<void**>(top) - 8;
    std::memset(words, 0, 8 * sizeof(void*));
    words[6] = reinterpret_cast<void*>(entry);
    place = words, done = false;
  }
};

static std::vector<Fibre> all;
static void* scheduler;
static std::function<void()> body;
static unsigned now;

// Who waits where: the block, then its warps.
struct Meeting {
  unsigned arrived = 0, round = 0;
};
static std::vector<Meeting> meetings;

inline void yield() { fibres_switch(&all[now].place, scheduler); }

inline void meet(size_t where, unsigned members) {
  const unsigned round = meetings[where].round;
  if (++meetings[where].arrived == members) {
    meetings[where].arrived = 0;
    meetings[where].round++;
  }
  while (meetings[where].round == round) yield();
}

inline void warp_meets() { meet(1 + now / 32, 32); }

inline void begin() {
  body();
  all[now].done = true;
  yield();
}

inline void run_block(unsigned threads) {
  if (all.size() < threads) all = std::vector<Fibre>(threads);
  meetings.assign(1 + threads / 32, {});
  for (unsigned at = 0; at < threads; at++) all[at].begin_at(begin);
  for (unsigned left = threads; left > 0;)
    for (now = 0; now < threads; now++) {
      if (all[now].done) continue;
      threadIdx.x = now;
      fibres_switch(&scheduler, all[now].place);
      left -= all[now].done;
    }
}

// What lanes lay down for one another.
struct Lane {
  float number;
  uint32_t a[4], b[2];
};
static Lane lanes[1024];

// An argument of the stand-in's device memory, as its addresses are told from numbers.
inline void come_home(void* words, size_t count) {
  constexpr uint64_t AWAY = uint64_t{1} << 62, END = uint64_t{1} << 47;
  for (size_t at = 0; at < count; at++) {
    uint64_t word;
    std::memcpy(&word, static_cast<char*>(words) + 8 * at, 8);
    if (word > AWAY + 4096 && word < AWAY + END) word -= AWAY;
    std::memcpy(static_cast<char*>(words) + 8 * at, &word, 8);
  }
}

}  // namespace fibres

#define DEVICE inline
#define SHARED static
#define KERNEL(name, Args)                                                        \
  static void name##_body(const Args& a);                                         \
  extern "C" const std::size_t name##_words;                                      \
  const std::size_t name##_words = sizeof(Args) / 8;                              \
  extern "C" void name(const void* given, const Dim* grid, unsigned threads) {    \
    Args args;                                                                    \
    std::memcpy(&args, given, sizeof args);                                       \
    fibres::come_home(&args, sizeof args / 8);                                    \
    gridDim = *grid, blockDim = {threads, 1, 1};                                  \
    fibres::body = [&] { name##_body(args); };                                    \
    for (blockIdx.z = 0; blockIdx.z < grid->z; blockIdx.z++)                      \
      for (blockIdx.y = 0; blockIdx.y < grid->y; blockIdx.y++)                    \
        for (blockIdx.x = 0; blockIdx.x < grid->x; blockIdx.x++) fibres::run_block(threads); \
  }                                                                               \
  static void name##_body(const Args& a)
#define BOUNDED_KERNEL(name, Args, threads) KERNEL(name, Args)

struct alignas(8) Two {
  uint32_t at[2];
};
struct alignas(16) Four {
  uint32_t at[4];
};
inline Four read_once(const Four* from) { return *from; }

inline float lane_number(float x, unsigned from) {
  fibres::lanes[fibres::now].number = x;
  fibres::warp_meets();
  const float other = fibres::lanes[fibres::now / 32 * 32 + from].number;
  fibres::warp_meets();
  return other;
}
inline float lane_xor(float x, int mask) { return lane_number(x, (fibres::now % 32) ^ mask); }
inline float lane_below(float x, int by) {
  const unsigned lane = fibres::now % 32;
  return lane_number(x, lane >= static_cast<unsigned>(by) ? lane - by : lane);
}
inline float lane_at(float x, int lane) { return lane_number(x, lane); }
inline uint32_t lanes_where(bool holds) {
  fibres::lanes[fibres::now].number = holds;
  fibres::warp_meets();
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < 32; lane++) bits |= static_cast<uint32_t>(fibres::lanes[fibres::now / 32 * 32 + lane].number != 0.0f) << lane;
  fibres::warp_meets();
  return bits;
}
inline int lowest_lane(uint32_t lanes) { return std::countr_zero(lanes); }
inline void all_threads() { fibres::meet(0, blockDim.x); }
inline float infinite() { return std::numeric_limits<float>::infinity(); }
inline float power2(float x) { return std::exp2(x); }
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
inline float number_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float tanh_of(float x) { return std::tanh(x); }
inline float log_of(float x) { return std::log(x); }
inline float root_of(float x) { return std::sqrt(x); }
inline uint32_t choose_bytes(uint32_t x, uint32_t y, uint32_t order) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t out = 0;
  for (int at = 0; at < 4; at++) out |= static_cast<uint32_t>(both >> (8 * (order >> (4 * at) & 7)) & 0xff) << (8 * at);
  return out;
}

#if FORMAT == 0
inline float wide(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
inline uint16_t half_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
inline float wide(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline uint16_t half_of(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
#endif
inline uint32_t pack(float low, float high) { return half_of(low) | static_cast<uint32_t>(half_of(high)) << 16; }

// d += a · b of matrices 16 × 16 and 16 × 8, whose parts lie in the lanes as the instruction mma.m16n8k16 has them.
inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace fibres;
  Lane& own = lanes[now];
  std::memcpy(own.a, a, sizeof a);
  own.b[0] = b0, own.b[1] = b1;
  warp_meets();
  const Lane* warp = lanes + now / 32 * 32;
  const auto part = [](uint32_t word, int k) { return wide(static_cast<uint16_t>(k % 2 ? word >> 16 : word & 0xffff)); };
  const int row = now % 32 / 4, column = 2 * (now % 4);
  for (int n = 0; n < 4; n++) {
    const int m = row + n / 2 * 8, to = column + n % 2;
    for (int k = 0; k < 16; k++) {
      const int quad = k % 8 / 2;
      d[n] += part(warp[4 * (m % 8) + quad].a[2 * (k / 8) + m / 8], k) * part(warp[4 * to + quad].b[k / 8], k);
    }
  }
  warp_meets();
}
