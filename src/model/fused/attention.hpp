// What attention over packed sequences and over a cache share, on a CPU.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors.hpp"

namespace {

// A row of qkv is [heads·d | kv_heads·d | kv_heads·d] of one token.
struct Shape {
  int64_t heads, kv_heads, d, window;  // window: how many tokens back a query sees, itself included; 0 = all
  float scale;
  float cap;  // scores become cap · tanh(score / cap); 0 = none
  int64_t row() const { return (heads + 2 * kv_heads) * d; }
  int64_t first(int64_t query) const { return window > 0 ? std::max<int64_t>(0, query - window + 1) : 0; }
};

// Rotates one head's vector by its position; `turn` = 1 forward, −1 back (the rotation's transpose). Cosines and sines are rows of d by position, of which the
// second half is read.
INLINE void rotate(const float* x, const float* cos, const float* sin, float turn, float* __restrict y, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = cos[i + half], s = sin[i + half] * turn;
    y[i] = a * c - b * s;
    y[i + half] = b * c + a * s;
  }
}

// Keys are handled in blocks of LANES. Scratch rows are padded to whole blocks.
// Caps the scores from..end. Leaves the slope 1 − (capped / cap)² of each in `slopes`, where that is given.
INLINE void cap_scores(float* scores, int64_t from, int64_t end, float cap, float* slopes) {
  for (int64_t j = from; j < end; j++) {
    const float x = scores[j] / cap, xx = x * x;
    const float far = 2.0f / (1.0f + exp_approx(std::min(-2.0f * x, 87.0f))) - 1.0f;
    // Its series, where the difference of near numbers would lose digits.
    const float near = x * (1.0f + xx * (-0.333333333f + xx * (0.133333333f + xx * (-0.0539682540f + xx * 0.0218694885f))));
    const float tanh = xx < 0.09f ? near : far;
    scores[j] = cap * tanh;
    if (slopes) slopes[j] = 1.0f - tanh * tanh;
  }
}

// The largest of the scores first..query. The block that has the last is whole.
INLINE float largest(const float* scores, int32_t first, int32_t query) {
  // An array, for comparisons of vectors are compiled for the oldest processors.
  float top[LANES];
  std::fill_n(top, LANES, -std::numeric_limits<float>::infinity());
  for (int32_t j = first / LANES * LANES; j <= query; j += LANES)
    for (int32_t l = 0; l < LANES; l++) {
      const float score = j + l >= first && j + l <= query ? scores[j + l] : -std::numeric_limits<float>::infinity();
      top[l] = score > top[l] ? score : top[l];
    }
  float most = top[0];
  for (int32_t l = 1; l < LANES; l++) most = std::max(most, top[l]);
  return most;
}

// e^(score − shift) where the query sees the key, else 0; over the blocks from..end. Returns the sum.
INLINE float weigh(float* scores, int32_t from, int32_t end, int32_t first, int32_t query, float shift) {
  float sum = 0.0f;
  for (int32_t j = from; j < end; j++) {
    const float weight = exp_approx(std::min(scores[j] - shift, 87.0f));
    scores[j] = j >= first && j <= query ? weight : 0.0f;
    sum += scores[j];
  }
  return sum;
}

}  // namespace
