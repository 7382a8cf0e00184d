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
#define INLINE inline __attribute__((always_inline))

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
