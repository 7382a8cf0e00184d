// Rotary causal attention over packed sequences on a CPU, with gradients. f32 and contiguous, which attention.rs checks.
//
// A sequence is a run of rows that may continue a prefix, the rows of an earlier sequence, whose keys and values it shares with others. Positions count from
// the prefix's beginning. The backward rebuilds the probabilities of one head at a time from the saved log-sum-exp. A sink is one more score of each head, of
// no key: it only takes probability.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "guarded.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Sequence {
  int64_t begin, len, prefix_begin, prefix;  // prefix: how many rows precede its own
  int64_t total() const { return prefix + len; }
  int64_t row_of(int64_t position) const { return position < prefix ? prefix_begin + position : begin + position - prefix; }
};

// Rows of a result that are computed together, and columns, in blocks: these sums stay in registers.
constexpr int64_t ROWS = 4, BLOCKS = 2;

int64_t whole(int64_t rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

// Weights of terms: that of term j in row r is at r · by_row + j · by_term.
struct Weights {
  const float* first;
  int64_t by_row, by_term;
};

// to = Σ_j weight_rj · term_j, or to += it, in ROWS rows and COUNT blocks.
template <int64_t V, bool ADDS, int64_t COUNT>
INLINE void sum_terms(const Weights& weights, const float* terms, int64_t term_row, int64_t n, float* to, int64_t to_row) {
  Lanes<V> sums[ROWS][COUNT];
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t b = 0; b < COUNT; b++) sums[r][b] = ADDS ? lanes<V>(to + r * to_row + b * V) : Lanes<V>{};
  for (int64_t j = 0; j < n; j++) {
    const float *term = terms + j * term_row, *weight = weights.first + j * weights.by_term;
    for (int64_t r = 0; r < ROWS; r++)
      for (int64_t b = 0; b < COUNT; b++) sums[r][b] += weight[r * weights.by_row] * lanes<V>(term + b * V);
  }
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t b = 0; b < COUNT; b++) lanes<V>(to + r * to_row + b * V) = sums[r][b];
}

// The same in rows of `width` numbers.
template <int64_t V, bool ADDS>
INLINE void sum_terms(const Weights& weights, const float* terms, int64_t term_row, int64_t n, int64_t width, float* to, int64_t to_row) {
  int64_t c = 0;
  for (; c + BLOCKS * V <= width; c += BLOCKS * V) sum_terms<V, ADDS, BLOCKS>(weights, terms + c, term_row, n, to + c, to_row);
  for (; c + V <= width; c += V) sum_terms<V, ADDS, 1>(weights, terms + c, term_row, n, to + c, to_row);
  for (int64_t r = 0; c < width && r < ROWS; r++) {
    if (!ADDS) std::fill(to + r * to_row + c, to + r * to_row + width, 0.0f);
    for (int64_t j = 0; j < n; j++)
      for (int64_t i = c; i < width; i++) to[r * to_row + i] += weights.first[r * weights.by_row + j * weights.by_term] * terms[j * term_row + i];
  }
}

INLINE void scaled(const float* from, float by, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = from[i] * by;
}

// Queries that are handled together, and the keys that they see, in whole blocks of keys.
struct Queries {
  int64_t begin, count, first, from, end;

  Queries(int64_t begin, const Sequence& s, const Shape& shape)
      : begin(begin), count(std::min(ROWS, s.total() - begin)), first(shape.first(begin)), from(first / LANES * LANES), end(padded(begin + count)) {}
};

// Scores of queries, from transposed keys [d, stride]; rows of scores are `stride` apart.
template <int64_t V>
INLINE void score(const float* queries, const float* keys_t, int64_t stride, const Queries& of, int64_t d, float* scores) {
  sum_terms<V, false>({queries, d, 1}, keys_t + of.from, stride, d, of.end - of.from, scores + of.from, stride);
}

// The keys of a key head in their positions and its values, of which those that fill up the last block are zeros, and their transposes [d, stride].
struct KeyHead {
  float *keys, *values, *keys_t, *values_t;

  static int64_t floats(const Sequence& s, int64_t d) { return 4 * padded(s.total()) * d; }

  KeyHead(float* scratch, const Sequence& s, int64_t d)
      : keys(scratch), values(keys + padded(s.total()) * d), keys_t(values + padded(s.total()) * d), values_t(keys_t + padded(s.total()) * d) {
    std::fill(keys + s.total() * d, values, 0.0f);
    std::fill(values + s.total() * d, keys_t, 0.0f);
  }

  template <int64_t V>
  INLINE void read(const float* qkv, const float* cos, const float* sin, int64_t head, const Sequence& s, const Shape& shape, int64_t d, bool turns_values) const {
    const int64_t rows = padded(s.total());
    for (int64_t j = 0; j < s.total(); j++) {
      const float* key = qkv + s.row_of(j) * shape.row() + (shape.heads + head) * d;
      rotate(key, cos + j * d, sin + j * d, 1.0f, keys + j * d, d);
      std::copy_n(key + shape.kv_heads * d, d, values + j * d);
    }
    transpose<V>(keys, d, keys_t, rows, rows, d);
    if (turns_values) transpose<V>(values, d, values_t, rows, rows, d);
  }
};

// A query in its position, times the factor of products.
INLINE void turn_query(const float* qkv, const float* cos, const float* sin, int64_t head, int64_t position, const Sequence& s, const Shape& shape, int64_t d,
                       float* query) {
  rotate(qkv + s.row_of(position) * shape.row() + head * d, cos + position * d, sin + position * d, 1.0f, query, d);
  scaled(query, shape.scale, query, d);
}

// Floats that a sequence's forward pass works in.
int64_t forward_scratch(const Sequence& s, int64_t d) { return KeyHead::floats(s, d) + ROWS * (padded(s.total()) + 2 * d); }

template <int64_t V, int64_t D>
INLINE void attention_forward(const float* qkv, const float* cos, const float* sin, const float* sinks, float* out, float* lse, float* scratch, const Sequence& s,
                              const Shape& shape) {
  const int64_t d = D ? D : shape.d, per_kv = shape.heads / shape.kv_heads, total = s.total(), stride = padded(total);
  const KeyHead key_head(scratch, s, d);
  float *scores = scratch + KeyHead::floats(s, d), *queries = scores + ROWS * stride, *sums = queries + ROWS * d;
  for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
    key_head.read<V>(qkv, cos, sin, kv, s, shape, d, false);
    for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
      for (int64_t i = s.prefix; i < total; i += ROWS) {
        const Queries of(i, s, shape);
        float inverse[ROWS];
        for (int64_t r = 0; r < of.count; r++) turn_query(qkv, cos, sin, h, i + r, s, shape, d, queries + r * d);
        score<V>(queries, key_head.keys_t, stride, of, d, scores);
        for (int64_t r = 0; r < of.count; r++) {
          float* row_scores = scores + r * stride;
          if (shape.cap > 0) cap_scores(row_scores, of.from, of.end, shape.cap, nullptr);
          const int64_t first = shape.first(i + r);
          float top = largest(row_scores, first, i + r);
          if (sinks) top = std::max(top, sinks[h]);
          const float sum = weigh(row_scores, of.from, of.end, first, i + r, top) + (sinks ? std::exp(sinks[h] - top) : 0.0f);
          inverse[r] = 1.0f / sum;
          lse[s.row_of(i + r) * shape.heads + h] = top + std::log(sum);
        }
        sum_terms<V, false>({scores + of.first, stride, 1}, key_head.values + of.first * d, d, i + of.count - of.first, d, sums, d);
        for (int64_t r = 0; r < of.count; r++) scaled(sums + r * d, inverse[r], out + (s.row_of(i + r) * shape.heads + h) * d, d);
      }
    }
  }
}

// Floats that a sequence's backward pass works in.
int64_t backward_scratch(const Sequence& s, int64_t d) {
  const int64_t stride = padded(s.total()), own = whole(s.len);
  return KeyHead::floats(s, d) + stride * (2 * d + 2 * own + 1) + (2 * own + ROWS) * d;
}

// Writes the gradient of the sequence's own rows and adds to that of its prefix, which must have been written before.
template <int64_t V, int64_t D>
INLINE void attention_backward(const float* qkv, const float* cos, const float* sin, const float* sinks, const float* out, const float* lse, const float* dout,
                               float* dqkv, float* dsinks, float* scratch, const Sequence& s, const Shape& shape) {
  const int64_t d = D ? D : shape.d, row = shape.row(), per_kv = shape.heads / shape.kv_heads, total = s.total(), stride = padded(total), out_row = shape.heads * d;
  const int64_t own = whole(s.len);
  const KeyHead key_head(scratch, s, d);
  float *dkeys = scratch + KeyHead::floats(s, d), *dvalues = dkeys + stride * d, *queries = dvalues + stride * d, *douts = queries + own * d, *dq = douts + own * d;
  float *probabilities = dq + ROWS * d, *slopes = probabilities + own * stride, *bends = slopes + own * stride;
  for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
    key_head.read<V>(qkv, cos, sin, kv, s, shape, d, true);
    std::fill(dkeys, dkeys + 2 * stride * d, 0.0f);  // dvalues too
    for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
      for (int64_t i = s.prefix; i < total; i++) {
        turn_query(qkv, cos, sin, h, i, s, shape, d, queries + (i - s.prefix) * d);
        std::copy_n(dout + s.row_of(i) * out_row + h * d, d, douts + (i - s.prefix) * d);
      }
      for (int64_t at = 0; at < s.len; at += ROWS) {
        const Queries of(s.prefix + at, s, shape);
        float *p = probabilities + at * stride, *ds = slopes + at * stride;
        score<V>(queries + at * d, key_head.keys_t, stride, of, d, p);
        score<V>(douts + at * d, key_head.values_t, stride, of, d, ds);
        for (int64_t r = 0; r < of.count; r++) {
          const int64_t i = of.begin + r, of_head = s.row_of(i) * shape.heads + h;
          const float mean = dot(out + of_head * d, douts + (at + r) * d, d);
          if (sinks) dsinks[of_head] = -std::exp(sinks[h] - lse[of_head]) * mean;
          if (shape.cap > 0) cap_scores(p + r * stride, of.from, of.end, shape.cap, bends);
          weigh(p + r * stride, of.from, of.end, shape.first(i), i, lse[of_head]);
          for (int64_t j = r * stride + of.from; j < r * stride + of.end; j++) ds[j] = p[j] * (ds[j] - mean);
          if (shape.cap > 0)
            for (int64_t j = of.from; j < of.end; j++) ds[r * stride + j] *= bends[j];
        }
        sum_terms<V, false>({ds + of.first, stride, 1}, key_head.keys + of.first * d, d, of.begin + of.count - of.first, d, dq, d);
        for (int64_t r = 0; r < of.count; r++) {
          const int64_t i = of.begin + r;
          scaled(dq + r * d, shape.scale, dq + r * d, d);
          rotate(dq + r * d, cos + i * d, sin + i * d, -1.0f, dqkv + s.row_of(i) * row + h * d, d);
        }
      }
      for (int64_t j = 0; j < total; j += ROWS) {
        const int64_t from = std::max(j, s.prefix), to = shape.window > 0 ? std::min(total, j + ROWS - 1 + shape.window) : total, at = from - s.prefix;
        if (from >= to) continue;
        sum_terms<V, true>({slopes + at * stride + j, 1, stride}, queries + at * d, d, to - from, d, dkeys + j * d, d);
        sum_terms<V, true>({probabilities + at * stride + j, 1, stride}, douts + at * d, d, to - from, d, dvalues + j * d, d);
      }
    }
    for (int64_t j = 0; j < total; j++) {
      float *to = dqkv + s.row_of(j) * row + (shape.heads + kv) * d, *to_value = to + shape.kv_heads * d;
      const bool shared = j < s.prefix;
      rotate(dkeys + j * d, cos + j * d, sin + j * d, -1.0f, dq, d);
      for (int64_t c = 0; c < d; c++) {
        to[c] = (shared ? to[c] : 0.0f) + dq[c];
        to_value[c] = (shared ? to_value[c] : 0.0f) + dvalues[j * d + c];
      }
    }
  }
}

// A width that the compiler knows saves heads of 32 an eighth of the time, and wider ones nothing. 0 takes it from the shape.
constexpr int64_t NARROW = 32;

#define ATTENTION_FORWARD_OF(V) \
  void attention_forward_of(const float* qkv, const float* cos, const float* sin, const float* sinks, float* out, float* lse, float* scratch, const Sequence& s, \
                            const Shape& shape) { \
    if (shape.d == NARROW) return attention_forward<V, NARROW>(qkv, cos, sin, sinks, out, lse, scratch, s, shape); \
    attention_forward<V, 0>(qkv, cos, sin, sinks, out, lse, scratch, s, shape); \
  }
FOR_EVERY_CPU(ATTENTION_FORWARD_OF)

#define ATTENTION_BACKWARD_OF(V) \
  void attention_backward_of(const float* qkv, const float* cos, const float* sin, const float* sinks, const float* out, const float* lse, const float* dout, \
                             float* dqkv, float* dsinks, float* scratch, const Sequence& s, const Shape& shape) { \
    if (shape.d == NARROW) return attention_backward<V, NARROW>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape); \
    attention_backward<V, 0>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape); \
  }
FOR_EVERY_CPU(ATTENTION_BACKWARD_OF)

// Sequences as they are handed over, four numbers each. One that continues a prefix follows it, with nothing but others that do between.
struct Sequences {
  const Sequence* all;
  std::vector<int64_t> families;  // where each sequence without a prefix stands, and the end

  explicit Sequences(at::IntArrayRef numbers) : all(reinterpret_cast<const Sequence*>(numbers.data())) {
    const int64_t count = static_cast<int64_t>(numbers.size()) / 4;
    for (int64_t s = 0; s < count; s++)
      if (all[s].prefix == 0) families.push_back(s);
    families.push_back(count);
  }

  // A thread takes whole families, for their gradients meet in the prefix.
  template <typename F>
  void each(F&& f) const {
    at::parallel_for(0, static_cast<int64_t>(families.size()) - 1, 1, [&](int64_t b, int64_t e) {
      std::vector<float> scratch;
      for (int64_t s = families[b]; s < families[e]; s++) f(all[s], scratch);
    });
  }
};

struct Attention : Function<Attention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& sinks, at::IntArrayRef sequences,
                        int64_t heads, int64_t kv_heads, int64_t window, double scale, double cap) {
    const Shape shape{heads, kv_heads, qkv.size(1) / (heads + 2 * kv_heads), window, static_cast<float>(scale), static_cast<float>(cap)};
    const int64_t rows = qkv.size(0);
    Tensor out = at::empty({rows, heads * shape.d}, qkv.options()), lse = at::empty({rows, heads}, qkv.options());
    const float *px = qkv.const_data_ptr<float>(), *pc = cos.const_data_ptr<float>(), *ps = sin.const_data_ptr<float>();
    const float* pk = sinks ? sinks->const_data_ptr<float>() : nullptr;
    float *po = out.mutable_data_ptr<float>(), *pl = lse.mutable_data_ptr<float>();
    Sequences(sequences).each([&](const Sequence& s, std::vector<float>& scratch) {
      scratch.resize(forward_scratch(s, shape.d));
      attention_forward_of(px, pc, ps, pk, po, pl, scratch.data(), s, shape);
    });
    ctx->save_for_backward({qkv, cos, sin, out, lse, sinks.value_or(Tensor())});
    ctx->saved_data["sequences"] = sequences.vec();
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["kv_heads"] = kv_heads;
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["cap"] = cap;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &qkv = saved[0], &cos = saved[1], &sin = saved[2], &out = saved[3], &lse = saved[4], &sinks = saved[5];
    const Tensor dout = grads[0].contiguous();
    const auto sequences = ctx->saved_data["sequences"].toIntVector();
    const int64_t heads = ctx->saved_data["heads"].toInt(), kv_heads = ctx->saved_data["kv_heads"].toInt();
    const Shape shape{heads, kv_heads, qkv.size(1) / (heads + 2 * kv_heads), ctx->saved_data["window"].toInt(),
                      static_cast<float>(ctx->saved_data["scale"].toDouble()), static_cast<float>(ctx->saved_data["cap"].toDouble())};
    Tensor dqkv = at::empty_like(qkv), dsinks = sinks.defined() ? at::empty_like(lse) : Tensor();
    const float* pk = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
    float* pdk = sinks.defined() ? dsinks.mutable_data_ptr<float>() : nullptr;
    const float *px = qkv.const_data_ptr<float>(), *pc = cos.const_data_ptr<float>(), *ps = sin.const_data_ptr<float>(),
                *po = out.const_data_ptr<float>(), *pl = lse.const_data_ptr<float>(), *pg = dout.const_data_ptr<float>();
    float* pd = dqkv.mutable_data_ptr<float>();
    Sequences(sequences).each([&](const Sequence& s, std::vector<float>& scratch) {
      scratch.resize(backward_scratch(s, shape.d));
      attention_backward_of(px, pc, ps, pk, po, pl, pg, pd, pdk, scratch.data(), s, shape);
    });
    if (sinks.defined()) dsinks = dsinks.sum(0);
    return {dqkv, Tensor(), Tensor(), dsinks, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

extern "C" {

char* rollflow_attention(Tensor** out, Tensor* qkv, Tensor* cos, Tensor* sin, Tensor* sinks, const int64_t* sequences, int64_t count, int64_t heads,
                         int64_t kv_heads, int64_t window, double scale, double cap) {
  return guarded(out, [&] {
    return Attention::apply(*qkv, *cos, *sin, sinks ? std::optional<Tensor>(*sinks) : std::nullopt, at::IntArrayRef(sequences, 4 * count), heads, kv_heads, window, scale, cap);
  });
}
}
