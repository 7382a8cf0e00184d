// Attention of tokens of sequences in a cache on a CPU: their keys and values are written, and they attend to their sequences up to themselves.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.hpp"
#include "guarded.hpp"

namespace {

using at::Tensor;

// A cache's rows hold keys and then values of all key heads. They are pages of `page` positions; `table` has the pages of each slot, `width` of them.
struct Paged {
  float* cache;
  const int64_t* table;
  int64_t width, page;
  float* at(int64_t slot, int64_t position, const Shape& shape) const {
    return cache + (table[slot * width + position / page] * page + position % page) * 2 * shape.kv_heads * shape.d;
  }
};

// Where a row of qkv stands in the cache.
struct Place {
  int64_t row, slot, position;
};

// A row's key and value of one head.
EVERY_CPU void keep(const float* qkv, const float* cos, const float* sin, const Paged& slots, const Place& at, int64_t kv, const Shape& shape) {
  const int64_t d = shape.d;
  const float* row = qkv + at.row * shape.row();
  float* own = slots.at(at.slot, at.position, shape) + kv * d;
  rotate(row + (shape.heads + kv) * d, cos + at.position * d, sin + at.position * d, 1.0f, own, d);
  std::memcpy(own + shape.kv_heads * d, row + (shape.heads + shape.kv_heads + kv) * d, d * sizeof(float));
}

// to += Σ weight_j · row_j over n rows. D is the head size where it is one of the usual ones, whose columns are summed in registers; 0
// takes it from d. Two sums, for one would wait for itself.
template <int64_t V, int64_t D>
INLINE void combine(const float* weights, const float* rows, int64_t row_stride, int64_t n, int64_t d, float* to) {
  if constexpr (D > 0) {
    constexpr int64_t COUNT = std::min<int64_t>(4, D / V);
    for (int64_t c = 0; c < D; c += COUNT * V) {
      Lanes<V> even[COUNT] = {}, odd[COUNT] = {};
      int64_t j = 0;
      for (; j + 1 < n; j += 2) {
        const float *first = rows + j * row_stride + c, *second = first + row_stride;
        for (int64_t b = 0; b < COUNT; b++) {
          even[b] += weights[j] * lanes<V>(first + b * V);
          odd[b] += weights[j + 1] * lanes<V>(second + b * V);
        }
      }
      for (int64_t b = 0; b < COUNT; b++) {
        if (j < n) even[b] += weights[j] * lanes<V>(rows + j * row_stride + c + b * V);
        lanes<V>(to + c + b * V) += even[b] + odd[b];
      }
    }
  } else {
    for (int64_t j = 0; j < n; j++)
      for (int64_t c = 0; c < d; c++) to[c] += weights[j] * rows[j * row_stride + c];
  }
}

// The queries of a row that read one key head.
template <int64_t V, int64_t D>
INLINE void attend(const float* qkv, const float* cos, const float* sin, const float* sinks, const Paged& slots, float* out, float* scratch, const Place& at, int64_t kv,
                   const Shape& shape) {
  const int64_t d = D ? D : shape.d, per_kv = shape.heads / shape.kv_heads, stride = 2 * shape.kv_heads * d, slot = at.slot, position = at.position;
  const float* row = qkv + at.row * shape.row();
  float *q = scratch, *scores = scratch + d;
  const int64_t first = shape.first(position), count = position + 1 - first;
  // Positions from..to of one page at a time, so that sums do not depend on where pages are.
  const auto pages = [&](auto of) INLINED {
    for (int64_t from = first, to; from <= position; from = to) {
      to = std::min(position + 1, (from / slots.page + 1) * slots.page);
      of(from - first, to - from, slots.at(slot, from, shape) + kv * d);
    }
  };
  for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
    rotate(row + h * d, cos + position * d, sin + position * d, 1.0f, q, d);
    float top = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
    pages([&](int64_t at, int64_t len, const float* keys) INLINED {
      for (int64_t j = 0; j < len; j++) scores[at + j] = dot(q, keys + j * stride, d) * shape.scale;
    });
    if (shape.cap > 0) cap_scores(scores, 0, padded(count), shape.cap, nullptr);
    top = std::max(top, largest(scores, 0, count - 1));
    const float sum = weigh(scores, 0, padded(count), 0, count - 1, top) + (sinks ? std::exp(sinks[h] - top) : 0.0f);
    for (int64_t j = 0; j < padded(count); j++) scores[j] /= sum;
    float* o = out + (at.row * shape.heads + h) * d;
    for (int64_t c = 0; c < d; c++) o[c] = 0.0f;
    pages([&](int64_t at, int64_t len, const float* keys) INLINED { combine<V, D>(scores + at, keys + shape.kv_heads * d, stride, len, d, o); });
  }
}

#define ATTEND_OF(V) \
  void attend_of(const float* qkv, const float* cos, const float* sin, const float* sinks, const Paged& slots, float* out, float* scratch, const Place& at, \
                 int64_t kv, const Shape& shape) { \
    switch (shape.d) { \
      case 32: return attend<V, 32>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape); \
      case 64: return attend<V, 64>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape); \
      case 128: return attend<V, 128>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape); \
      default: return attend<V, 0>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape); \
    } \
  }
FOR_EVERY_CPU(ATTEND_OF)

// Row i of qkv is the token at position `at[i]` of slot `of[i]`, or of slot i if `of` is empty. Several rows of a slot see each other's keys.
Tensor attend_slots(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const float* sinks, const Paged& slots, at::IntArrayRef of, at::IntArrayRef at, Shape shape) {
  const int64_t rows = qkv.size(0), longest = *std::max_element(at.begin(), at.end()) + 1;
  Tensor out = at::empty({rows, shape.heads * shape.d}, qkv.options());
  const float *px = qkv.const_data_ptr<float>(), *pc = cos.const_data_ptr<float>(), *ps = sin.const_data_ptr<float>();
  float* po = out.mutable_data_ptr<float>();
  const auto place = [&](int64_t row) { return Place{row, of.empty() ? row : of[row], at[row]}; };
  for (int64_t i = 0; !of.empty() && i < rows * shape.kv_heads; i++) keep(px, pc, ps, slots, place(i / shape.kv_heads), i % shape.kv_heads, shape);
  at::parallel_for(0, rows * shape.kv_heads, grain(longest * shape.d * shape.heads / shape.kv_heads), [&](int64_t b, int64_t e) {
    std::vector<float> scratch(shape.d + padded(longest));
    for (int64_t i = b; i < e; i++) {
      const Place own = place(i / shape.kv_heads);
      if (of.empty()) keep(px, pc, ps, slots, own, i % shape.kv_heads, shape);
      attend_of(px, pc, ps, sinks, slots, po, scratch.data(), own, i % shape.kv_heads, shape);
    }
  });
  return out;
}

}  // namespace

extern "C" {

// Tokens of sequences: qkv [rows, …], cache [rows, 2, key heads, d], which gets their keys and values. Row i is of slot i if `of` is null.
char* rollflow_attend(Tensor** out, Tensor* qkv, Tensor* cos, Tensor* sin, Tensor* sinks, Tensor* cache, const int64_t* table, int64_t width, int64_t page,
                      const int64_t* of, const int64_t* positions, int64_t heads, int64_t kv_heads, int64_t window, double scale, double cap) {
  return guarded(out, [&] {
    const Shape shape{heads, kv_heads, cache->size(3), window, static_cast<float>(scale), static_cast<float>(cap)};
    const Paged slots{cache->mutable_data_ptr<float>(), table, width, page};
    const int64_t rows = qkv->size(0);
    return attend_slots(*qkv, *cos, *sin, sinks ? sinks->const_data_ptr<float>() : nullptr, slots, of ? at::IntArrayRef(of, rows) : at::IntArrayRef(), at::IntArrayRef(positions, rows), shape);
  });
}
}
