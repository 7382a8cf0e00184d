// Loops over numbers in f32 that vectorise.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// One body, compiled for three instruction sets; the loader picks at start.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_CPU
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

// Numbers of a vector.
constexpr int64_t LANES = 16;

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

INLINE Lanes& lanes(float* numbers) { return *reinterpret_cast<Lanes*>(numbers); }
INLINE const Lanes& lanes(const float* numbers) { return *reinterpret_cast<const Lanes*>(numbers); }

// The next multiple of LANES.
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

#if defined(__clang__)
// A square of `height` rows of `width` numbers to `width` rows of `height`. Clang has no shuffles by an order that is computed.
INLINE void turn(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t height, int64_t width) {
  for (int64_t r = 0; r < height; r++)
    for (int64_t c = 0; c < width; c++) to[c * to_row + r] = from[r * from_row + c];
}
#else
typedef int32_t Order __attribute__((vector_size(LANES * sizeof(int32_t))));

// Exchanges the two quarters of each pair of squares `S` wide that are off their diagonal.
template <int S>
INLINE void exchange(Lanes* rows) {
  Order first, second;
  for (int i = 0; i < LANES; i++) {
    first[i] = i & S ? LANES + i - S : i;
    second[i] = i & S ? LANES + i : i + S;
  }
  for (int i = 0; i < LANES; i++) {
    if (i & S) continue;
    const Lanes upper = rows[i], lower = rows[i + S];
    rows[i] = __builtin_shuffle(upper, lower, first);
    rows[i + S] = __builtin_shuffle(upper, lower, second);
  }
}

// A square of `height` rows of `width` numbers to `width` rows of `height`.
INLINE void turn(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t height, int64_t width) {
  Lanes square[LANES] = {};
  for (int64_t r = 0; r < height; r++) std::memcpy(&square[r], from + r * from_row, width * sizeof(float));
  exchange<1>(square);
  exchange<2>(square);
  exchange<4>(square);
  exchange<8>(square);
  for (int64_t r = 0; r < width; r++) std::memcpy(to + r * to_row, &square[r], height * sizeof(float));
}
#endif

// `count` rows of `len` numbers to `len` rows of `count`.
INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t count, int64_t len) {
  for (int64_t i = 0; i < count; i += LANES) {
    for (int64_t j = 0; j < len; j += LANES) {
      const int64_t height = std::min(LANES, count - i), width = std::min(LANES, len - j);
      const float* square = from + i * from_row + j;
      float* turned = to + j * to_row + i;
      // Of a whole square the compiler knows the sizes.
      if (height == LANES && width == LANES) turn(square, from_row, turned, to_row, LANES, LANES);
      else turn(square, from_row, turned, to_row, height, width);
    }
  }
}
