// Loops over numbers in f32 that vectorise.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// One body, compiled for three instruction sets; the loader picks at start. FOR_EVERY_CPU does so with a function that a macro defines from the numbers of
// a vector: wider ones than a processor has would be kept in memory.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FOR_EVERY_CPU(define) \
  __attribute__((target("arch=x86-64-v4"))) define(16) __attribute__((target("arch=x86-64-v3"))) define(8) __attribute__((target("default"))) define(8)
#else
#define EVERY_CPU
#define FOR_EVERY_CPU(define) define(8)
#endif
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

INLINE float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// Rows a worker thread should at least get.
inline int64_t grain(int64_t row_cost) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, row_cost)); }

// e^x for x ≤ 88 to about 2 ulp, free of branches so that loops over it vectorise (the C library's expf does not).
INLINE float exp_approx(float x) {
  x = std::max(x, -87.0f);
  const float scaled = x * 1.44269504088896341f;
  const float whole = std::nearbyint(scaled);
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float poly = 1.9875691500e-4f;
  poly = poly * rest + 1.3981999507e-3f;
  poly = poly * rest + 8.3334519073e-3f;
  poly = poly * rest + 4.1665795894e-2f;
  poly = poly * rest + 1.6666665459e-1f;
  poly = poly * rest + 5.0000001201e-1f;
  poly = poly * rest * rest + rest + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return poly * power;
}

// Numbers of the widest vector. Rows of scratch are padded to whole ones.
constexpr int64_t LANES = 16;

// A vector of V numbers, and an order of them.
template <int64_t V>
struct Vector;
#define VECTOR(V) \
  template <> \
  struct Vector<V> { \
    typedef float Numbers __attribute__((vector_size(V * sizeof(float)), aligned(sizeof(float)), may_alias)); \
    typedef int32_t Order __attribute__((vector_size(V * sizeof(int32_t)))); \
  };
VECTOR(8)
VECTOR(16)
#undef VECTOR

template <int64_t V>
using Lanes = typename Vector<V>::Numbers;

template <int64_t V>
INLINE Lanes<V>& lanes(float* numbers) {
  return *reinterpret_cast<Lanes<V>*>(numbers);
}
template <int64_t V>
INLINE const Lanes<V>& lanes(const float* numbers) {
  return *reinterpret_cast<const Lanes<V>*>(numbers);
}

// The next multiple of LANES.
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

#if defined(__clang__)
// `height` rows of `width` numbers to `width` rows of `height`. Clang has no shuffles by an order that is computed.
template <int64_t V>
INLINE void turn(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t height = V, int64_t width = V) {
  for (int64_t r = 0; r < height; r++)
    for (int64_t c = 0; c < width; c++) to[c * to_row + r] = from[r * from_row + c];
}
#else
// Exchanges the two quarters of each pair of squares `S` wide that are off their diagonal.
template <int64_t V, int S>
INLINE void exchange(Lanes<V>* rows) {
  typename Vector<V>::Order first, second;
  for (int i = 0; i < V; i++) {
    first[i] = i & S ? V + i - S : i;
    second[i] = i & S ? V + i : i + S;
  }
  for (int i = 0; i < V; i++) {
    if (i & S) continue;
    const Lanes<V> upper = rows[i], lower = rows[i + S];
    rows[i] = __builtin_shuffle(upper, lower, first);
    rows[i + S] = __builtin_shuffle(upper, lower, second);
  }
}

template <int64_t V>
INLINE void turn(Lanes<V>* square) {
  exchange<V, 1>(square);
  exchange<V, 2>(square);
  exchange<V, 4>(square);
  if constexpr (V == 16) exchange<V, 8>(square);
}

// A square of V rows.
template <int64_t V>
INLINE void turn(const float* from, int64_t from_row, float* to, int64_t to_row) {
  Lanes<V> square[V];
  for (int64_t r = 0; r < V; r++) square[r] = lanes<V>(from + r * from_row);
  turn<V>(square);
  for (int64_t r = 0; r < V; r++) lanes<V>(to + r * to_row) = square[r];
}

// `height` rows of `width` numbers to `width` rows of `height`, each V at most.
template <int64_t V>
INLINE void turn(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t height, int64_t width) {
  Lanes<V> square[V] = {};
  for (int64_t r = 0; r < height; r++) std::memcpy(&square[r], from + r * from_row, width * sizeof(float));
  turn<V>(square);
  for (int64_t r = 0; r < width; r++) std::memcpy(to + r * to_row, &square[r], height * sizeof(float));
}
#endif

// `count` rows of `len` numbers to `len` rows of `count`.
template <int64_t V>
INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t count, int64_t len) {
  for (int64_t i = 0; i < count; i += V) {
    for (int64_t j = 0; j < len; j += V) {
      const int64_t height = std::min(V, count - i), width = std::min(V, len - j);
      const float* square = from + i * from_row + j;
      float* turned = to + j * to_row + i;
      if (height == V && width == V) turn<V>(square, from_row, turned, to_row);
      else turn<V>(square, from_row, turned, to_row, height, width);
    }
  }
}
