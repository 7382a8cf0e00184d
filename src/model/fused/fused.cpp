// Three operations of a decoder layer that libtorch runs as a dozen memory-bound passes on a CPU, each fused into one pass forward
// and one backward: RMS norm, SwiGLU, and rotary causal attention over packed sequences of different lengths. And what a loss asks of logits.
//
// f32, CPU, contiguous; fused.rs checks that and takes libtorch's own operations everywhere else. Held equal to them, gradients
// included, by the tests in fused.rs. Every entry catches C++ exceptions and hands back their text, which the caller frees.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

INLINE float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// Rows a worker thread should at least get.
int64_t grain(int64_t row_cost) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, row_cost)); }

// ---- RMS norm: y = x / sqrt(mean(x²) + eps) · w, row by row

EVERY_CPU void rms_norm_rows(const float* x, const float* w, float* y, float* rstd, int64_t begin, int64_t end, int64_t n, float eps) {
  for (int64_t r = begin; r < end; r++) {
    const float* xr = x + r * n;
    float* yr = y + r * n;
    const float scale = 1.0f / std::sqrt(dot(xr, xr, n) / n + eps);
    for (int64_t i = 0; i < n; i++) yr[i] = xr[i] * scale * w[i];
    rstd[r] = scale;
  }
}

EVERY_CPU void rms_norm_rows_backward(const float* x, const float* w, const float* rstd, const float* dy, float* dx, float* dw,
                                      int64_t begin, int64_t end, int64_t n) {
  for (int64_t r = begin; r < end; r++) {
    const float *xr = x + r * n, *dyr = dy + r * n;
    float* dxr = dx + r * n;
    const float s = rstd[r];
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++) {
      const float g = dyr[i] * xr[i];
      dw[i] += g * s;
      sum += g * w[i];
    }
    const float k = sum * s * s * s / n;
    for (int64_t i = 0; i < n; i++) dxr[i] = dyr[i] * w[i] * s - xr[i] * k;
  }
}

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, double eps) {
    const int64_t n = x.size(-1), rows = x.numel() / n;
    Tensor y = at::empty_like(x), rstd = at::empty({rows}, x.options());
    const float *px = x.const_data_ptr<float>(), *pw = w.const_data_ptr<float>();
    float *py = y.mutable_data_ptr<float>(), *pr = rstd.mutable_data_ptr<float>();
    at::parallel_for(0, rows, grain(n), [&](int64_t b, int64_t e) { rms_norm_rows(px, pw, py, pr, b, e, n, eps); });
    ctx->save_for_backward({x, w, rstd});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1], &rstd = saved[2];
    const Tensor dy = grads[0].contiguous();
    const int64_t n = x.size(-1), rows = x.numel() / n;
    // One row of dw a thread, summed in order: the result depends on the thread count only, never on timing.
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), rows / grain(n)));
    Tensor dx = at::empty_like(x), dw = at::zeros({threads, n}, x.options());
    const float *px = x.const_data_ptr<float>(), *pw = w.const_data_ptr<float>(), *pr = rstd.const_data_ptr<float>(),
                *pdy = dy.const_data_ptr<float>();
    float *pdx = dx.mutable_data_ptr<float>(), *pdw = dw.mutable_data_ptr<float>();
    at::parallel_for(0, threads, 1, [&](int64_t b, int64_t e) {
      for (int64_t t = b; t < e; t++)
        rms_norm_rows_backward(px, pw, pr, pdy, pdx, pdw + t * n, rows * t / threads, rows * (t + 1) / threads, n);
    });
    return {dx, threads == 1 ? dw.view({n}) : dw.sum(0), Tensor()};
  }
};

// ---- SwiGLU: gate and up side by side in one row → silu(gate) · up

EVERY_CPU void swiglu_rows(const float* gate_up, float* y, int64_t begin, int64_t end, int64_t n) {
  for (int64_t r = begin; r < end; r++) {
    const float *g = gate_up + r * 2 * n, *u = g + n;
    float* yr = y + r * n;
    for (int64_t i = 0; i < n; i++) yr[i] = g[i] / (1.0f + exp_approx(std::min(-g[i], 87.0f))) * u[i];
  }
}

EVERY_CPU void swiglu_rows_backward(const float* gate_up, const float* dy, float* dgate_up, int64_t begin, int64_t end, int64_t n) {
  for (int64_t r = begin; r < end; r++) {
    const float *g = gate_up + r * 2 * n, *u = g + n, *dyr = dy + r * n;
    float *dg = dgate_up + r * 2 * n, *du = dg + n;
    for (int64_t i = 0; i < n; i++) {
      const float sigmoid = 1.0f / (1.0f + exp_approx(std::min(-g[i], 87.0f)));
      const float silu = g[i] * sigmoid;
      du[i] = dyr[i] * silu;
      dg[i] = dyr[i] * u[i] * (sigmoid + silu * (1.0f - sigmoid));
    }
  }
}

struct SwiGlu : Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    const int64_t n = gate_up.size(1) / 2, rows = gate_up.size(0);
    Tensor y = at::empty({rows, n}, gate_up.options());
    const float* px = gate_up.const_data_ptr<float>();
    float* py = y.mutable_data_ptr<float>();
    at::parallel_for(0, rows, grain(8 * n), [&](int64_t b, int64_t e) { swiglu_rows(px, py, b, e, n); });
    ctx->save_for_backward({gate_up});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& gate_up = saved[0];
    const Tensor dy = grads[0].contiguous();
    const int64_t n = gate_up.size(1) / 2, rows = gate_up.size(0);
    Tensor dx = at::empty_like(gate_up);
    const float *px = gate_up.const_data_ptr<float>(), *pdy = dy.const_data_ptr<float>();
    float* pdx = dx.mutable_data_ptr<float>();
    at::parallel_for(0, rows, grain(8 * n), [&](int64_t b, int64_t e) { swiglu_rows_backward(px, pdy, pdx, b, e, n); });
    return {dx};
  }
};

// ---- Rotary causal attention over packed sequences
//
// A row of qkv is [heads·d | kv_heads·d | kv_heads·d] of one token; cosines and sines are rows of d by position, of which the second half is read. A sequence is a run of rows that may continue a prefix, the rows of an
// earlier sequence, whose keys and values it shares with others. Positions count from the prefix's beginning. The backward rebuilds the
// probabilities of one head at a time from the saved log-sum-exp. A sink is one more score of each head, of no key: it only takes probability.

struct Sequence {
  int64_t begin, len, prefix_begin, prefix;  // prefix: how many rows precede its own
  int64_t total() const { return prefix + len; }
  int64_t row_of(int64_t position) const { return position < prefix ? prefix_begin + position : begin + position - prefix; }
};

struct Shape {
  int64_t heads, kv_heads, d, window;  // window: how many tokens back a query sees, itself included; 0 = all
  float scale;
  float cap;  // scores become cap · tanh(score / cap); 0 = none
  int64_t row() const { return (heads + 2 * kv_heads) * d; }
  int64_t first(int64_t query) const { return window > 0 ? std::max<int64_t>(0, query - window + 1) : 0; }
};

// Rotates one head's vector by its position; `turn` = 1 forward, −1 back (the rotation's transpose).
INLINE void rotate(const float* x, const float* cos, const float* sin, float turn, float* y, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = cos[i + half], s = sin[i + half] * turn;
    y[i] = a * c - b * s;
    y[i + half] = b * c + a * s;
  }
}

// Keys are handled in blocks of this many: one vector register of the widest set. Scratch rows are padded to whole blocks.
constexpr int64_t BLOCK = 16;
typedef float Block __attribute__((vector_size(BLOCK * sizeof(float)), aligned(sizeof(float)), may_alias));
INLINE int64_t padded(int64_t len) { return (len + BLOCK - 1) / BLOCK * BLOCK; }

// scale · q·k for every key up to the block of `query`, from transposed keys [d, stride]. Two sums, for one would wait for itself.
INLINE void products(const float* q, const float* keys_t, int64_t stride, int64_t query, int64_t d, float scale, float* to) {
  for (int64_t j = 0; j <= query; j += BLOCK) {
    Block even = {}, odd = {};
    for (int64_t c = 0; c < d; c += 2) {
      even += q[c] * *reinterpret_cast<const Block*>(keys_t + c * stride + j);
      odd += q[c + 1] * *reinterpret_cast<const Block*>(keys_t + (c + 1) * stride + j);
    }
    *reinterpret_cast<Block*>(to + j) = (even + odd) * scale;
  }
}

// Caps scores up to the block of `query`. Leaves the slope 1 − (capped / cap)² of each in `slopes`, where that is given.
INLINE void cap_scores(float* scores, int64_t query, float cap, float* slopes) {
  for (int64_t j = 0; j < padded(query + 1); j++) {
    const float x = scores[j] / cap, xx = x * x;
    const float far = 2.0f / (1.0f + exp_approx(std::min(-2.0f * x, 87.0f))) - 1.0f;
    // Its series, where the difference of near numbers would lose digits.
    const float near = x * (1.0f + xx * (-0.333333333f + xx * (0.133333333f + xx * (-0.0539682540f + xx * 0.0218694885f))));
    const float tanh = xx < 0.09f ? near : far;
    scores[j] = cap * tanh;
    if (slopes) slopes[j] = 1.0f - tanh * tanh;
  }
}

// e^(score − shift) where the query sees the key, else 0; over whole blocks.
INLINE void weigh(float* scores, int64_t first, int64_t query, float shift) {
  const int64_t end = padded(query + 1);
  for (int64_t j = 0; j < end; j++) {
    const float p = exp_approx(std::min(scores[j] - shift, 87.0f));
    scores[j] = (j >= first && j <= query) ? p : 0.0f;
  }
}

// to += Σ weight_j · row_j over n rows. D is the head size where it is one of the usual ones, so that the sums stay in registers; 0
// takes it from d. Two sums again.
template <int64_t D>
INLINE void combine(const float* weights, int64_t weight_stride, const float* rows, int64_t row_stride, int64_t n, int64_t d, float* to) {
  if constexpr (D > 0) {
    Block even[D / BLOCK] = {}, odd[D / BLOCK] = {};
    int64_t j = 0;
    for (; j + 1 < n; j += 2) {
      const Block* first = reinterpret_cast<const Block*>(rows + j * row_stride);
      const Block* second = reinterpret_cast<const Block*>(rows + (j + 1) * row_stride);
      for (int64_t b = 0; b < D / BLOCK; b++) {
        even[b] += weights[j * weight_stride] * first[b];
        odd[b] += weights[(j + 1) * weight_stride] * second[b];
      }
    }
    Block* out = reinterpret_cast<Block*>(to);
    for (int64_t b = 0; b < D / BLOCK; b++) {
      if (j < n) even[b] += weights[j * weight_stride] * reinterpret_cast<const Block*>(rows + j * row_stride)[b];
      out[b] += even[b] + odd[b];
    }
  } else {
    for (int64_t j = 0; j < n; j++)
      for (int64_t c = 0; c < d; c++) to[c] += weights[j * weight_stride] * rows[j * row_stride + c];
  }
}

template <int64_t D>
INLINE void attention_forward(const float* qkv, const float* cos, const float* sin, const float* sinks, float* out, float* lse, float* scratch, const Sequence& s,
                              const Shape& shape) {
  const int64_t d = D ? D : shape.d, row = shape.row(), per_kv = shape.heads / shape.kv_heads, total = s.total(),
                stride = padded(total);
  float *keys_t = scratch, *scores = keys_t + d * stride, *k = scores + stride, *q = k + d;
  std::fill(keys_t, keys_t + d * stride, 0.0f);
  for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
    const float* values = qkv + (shape.heads + shape.kv_heads + kv) * d;
    for (int64_t j = 0; j < total; j++) {
      rotate(qkv + s.row_of(j) * row + (shape.heads + kv) * d, cos + j * d, sin + j * d, 1.0f, k, d);
      for (int64_t c = 0; c < d; c++) keys_t[c * stride + j] = k[c];
    }
    for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
      for (int64_t i = s.prefix; i < total; i++) {
        rotate(qkv + s.row_of(i) * row + h * d, cos + i * d, sin + i * d, 1.0f, q, d);
        products(q, keys_t, stride, i, d, shape.scale, scores);
        if (shape.cap > 0) cap_scores(scores, i, shape.cap, nullptr);
        const int64_t first = shape.first(i), own = std::max(first, s.prefix);
        float top = sinks ? std::max(scores[first], sinks[h]) : scores[first];
        for (int64_t j = first; j <= i; j++) top = std::max(top, scores[j]);
        float sum = sinks ? std::exp(sinks[h] - top) : 0.0f;
        weigh(scores, first, i, top);
        for (int64_t j = 0; j < padded(i + 1); j++) sum += scores[j];
        for (int64_t j = 0; j < padded(i + 1); j++) scores[j] /= sum;
        float* o = out + s.row_of(i) * shape.heads * d + h * d;
        for (int64_t c = 0; c < d; c++) o[c] = 0.0f;
        if (first < s.prefix) combine<D>(scores + first, 1, values + s.row_of(first) * row, row, s.prefix - first, d, o);
        combine<D>(scores + own, 1, values + s.row_of(own) * row, row, i + 1 - own, d, o);
        lse[s.row_of(i) * shape.heads + h] = top + std::log(sum);
      }
    }
  }
}

// Floats that the backward of one sequence works in.
INLINE int64_t backward_scratch(const Sequence& s, int64_t d) {
  return padded(s.total()) * (2 * d + 2 * s.len + 1) + (3 * s.total() + s.len + 1) * d;
}

// Writes the gradient of the sequence's own rows and adds to that of its prefix, which must have been written before.
template <int64_t D>
INLINE void attention_backward(const float* qkv, const float* cos, const float* sin, const float* sinks, const float* out, const float* lse,
                               const float* dout, float* dqkv, float* dsinks, float* scratch, const Sequence& s, const Shape& shape) {
  const int64_t d = D ? D : shape.d, row = shape.row(), per_kv = shape.heads / shape.kv_heads, total = s.total(),
                stride = padded(total), out_row = shape.heads * d;
  float *keys_t = scratch, *values_t = keys_t + d * stride, *probabilities = values_t + d * stride,
        *slopes = probabilities + s.len * stride, *keys = slopes + s.len * stride, *dkeys = keys + d * total, *dvalues = dkeys + d * total,
        *queries = dvalues + d * total, *dq = queries + d * s.len, *bends = dq + d;
  std::fill(keys_t, keys_t + 2 * d * stride, 0.0f);  // values_t too
  for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
    for (int64_t j = 0; j < total; j++) {
      const float* v = qkv + s.row_of(j) * row + (shape.heads + shape.kv_heads + kv) * d;
      rotate(qkv + s.row_of(j) * row + (shape.heads + kv) * d, cos + j * d, sin + j * d, 1.0f, keys + j * d, d);
      for (int64_t c = 0; c < d; c++) {
        keys_t[c * stride + j] = keys[j * d + c];
        values_t[c * stride + j] = v[c];
      }
    }
    std::fill(dkeys, dkeys + 2 * d * total, 0.0f);  // dvalues too
    for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
      const float* dhead = dout + s.begin * out_row + h * d;
      for (int64_t i = s.prefix; i < total; i++) {
        const int64_t at = i - s.prefix;
        const float *o = out + s.row_of(i) * out_row + h * d, *go = dhead + at * out_row;
        float *q = queries + at * d, *p = probabilities + at * stride, *ds = slopes + at * stride;
        const float mean = dot(o, go, d);
        const int64_t of_head = s.row_of(i) * shape.heads + h;
        if (sinks) dsinks[of_head] = -std::exp(sinks[h] - lse[of_head]) * mean;
        rotate(qkv + s.row_of(i) * row + h * d, cos + i * d, sin + i * d, 1.0f, q, d);
        products(q, keys_t, stride, i, d, shape.scale, p);
        if (shape.cap > 0) cap_scores(p, i, shape.cap, bends);
        products(go, values_t, stride, i, d, 1.0f, ds);
        const int64_t first = shape.first(i);
        weigh(p, first, i, lse[of_head]);
        for (int64_t j = 0; j < padded(i + 1); j++) ds[j] = p[j] * (ds[j] - mean) * shape.scale;
        if (shape.cap > 0)
          for (int64_t j = 0; j < padded(i + 1); j++) ds[j] *= bends[j];
        for (int64_t c = 0; c < d; c++) dq[c] = 0.0f;
        combine<D>(ds + first, 1, keys + first * d, d, i + 1 - first, d, dq);
        rotate(dq, cos + i * d, sin + i * d, -1.0f, dqkv + s.row_of(i) * row + h * d, d);
      }
      for (int64_t j = 0; j < total; j++) {
        const int64_t from = std::max(j, s.prefix), to = shape.window > 0 ? std::min(total, j + shape.window) : total;
        if (from >= to) continue;
        const int64_t at = from - s.prefix;
        combine<D>(slopes + at * stride + j, stride, queries + at * d, d, to - from, d, dkeys + j * d);
        combine<D>(probabilities + at * stride + j, stride, dhead + at * out_row, out_row, to - from, d, dvalues + j * d);
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

EVERY_CPU void attention_forward_of(const float* qkv, const float* cos, const float* sin, const float* sinks, float* out, float* lse, float* scratch,
                                    const Sequence& s, const Shape& shape) {
  switch (shape.d) {
    case 32: return attention_forward<32>(qkv, cos, sin, sinks, out, lse, scratch, s, shape);
    case 64: return attention_forward<64>(qkv, cos, sin, sinks, out, lse, scratch, s, shape);
    case 128: return attention_forward<128>(qkv, cos, sin, sinks, out, lse, scratch, s, shape);
    default: return attention_forward<0>(qkv, cos, sin, sinks, out, lse, scratch, s, shape);
  }
}

EVERY_CPU void attention_backward_of(const float* qkv, const float* cos, const float* sin, const float* sinks, const float* out, const float* lse,
                                     const float* dout, float* dqkv, float* dsinks, float* scratch, const Sequence& s, const Shape& shape) {
  switch (shape.d) {
    case 32: return attention_backward<32>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape);
    case 64: return attention_backward<64>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape);
    case 128: return attention_backward<128>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape);
    default: return attention_backward<0>(qkv, cos, sin, sinks, out, lse, dout, dqkv, dsinks, scratch, s, shape);
  }
}

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
      scratch.resize(padded(s.total()) * (shape.d + 1) + 2 * shape.d);
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

// ---- Tokens of sequences in a cache: their keys and values are written, and they attend to their sequences up to themselves

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

// The queries of a row that read one key head.
template <int64_t D>
INLINE void attend(const float* qkv, const float* cos, const float* sin, const float* sinks, const Paged& slots, float* out, float* scratch, const Place& at, int64_t kv,
                   const Shape& shape) {
  const int64_t d = D ? D : shape.d, per_kv = shape.heads / shape.kv_heads, stride = 2 * shape.kv_heads * d, slot = at.slot, position = at.position;
  const float* row = qkv + at.row * shape.row();
  float *q = scratch, *scores = scratch + d;
  const int64_t first = shape.first(position), count = position + 1 - first;
  // Positions from..to of one page at a time, so that sums do not depend on where pages are.
  const auto pages = [&](auto of) {
    for (int64_t from = first, to; from <= position; from = to) {
      to = std::min(position + 1, (from / slots.page + 1) * slots.page);
      of(from - first, to - from, slots.at(slot, from, shape) + kv * d);
    }
  };
  for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
    rotate(row + h * d, cos + position * d, sin + position * d, 1.0f, q, d);
    float top = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
    pages([&](int64_t at, int64_t len, const float* keys) {
      for (int64_t j = 0; j < len; j++) scores[at + j] = dot(q, keys + j * stride, d) * shape.scale;
    });
    if (shape.cap > 0) cap_scores(scores, count - 1, shape.cap, nullptr);
    for (int64_t j = 0; j < count; j++) top = std::max(top, scores[j]);
    float sum = sinks ? std::exp(sinks[h] - top) : 0.0f;
    weigh(scores, 0, count - 1, top);
    for (int64_t j = 0; j < padded(count); j++) sum += scores[j];
    for (int64_t j = 0; j < padded(count); j++) scores[j] /= sum;
    float* o = out + (at.row * shape.heads + h) * d;
    for (int64_t c = 0; c < d; c++) o[c] = 0.0f;
    pages([&](int64_t at, int64_t len, const float* keys) { combine<D>(scores + at, 1, keys + shape.kv_heads * d, stride, len, d, o); });
  }
}

EVERY_CPU void attend_of(const float* qkv, const float* cos, const float* sin, const float* sinks, const Paged& slots, float* out, float* scratch, const Place& at,
                         int64_t kv, const Shape& shape) {
  switch (shape.d) {
    case 32: return attend<32>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape);
    case 64: return attend<64>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape);
    case 128: return attend<128>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape);
    default: return attend<0>(qkv, cos, sin, sinks, slots, out, scratch, at, kv, shape);
  }
}

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

// ---- Numbers in 4 bits: two a byte, blocks of 64 with a scale each, and of `outer_block` scales

template <typename T>
void nf4_blocks(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t outer_block, float offset, const Tensor& out) {
  const uint8_t *from = codes.const_data_ptr<uint8_t>(), *scale = scales.const_data_ptr<uint8_t>();
  const float *above = outer.const_data_ptr<float>(), *levels = tables.const_data_ptr<float>();
  T* to = static_cast<T*>(out.data_ptr());
  const int64_t len = out.numel();
  at::parallel_for(0, (len + 63) / 64, grain(256), [&](int64_t b, int64_t e) {
    for (int64_t block = b; block < e; block++) {
      const float of_block = levels[16 + scale[block]] * above[block / outer_block] + offset;
      for (int64_t i = 64 * block; i < std::min(64 * block + 64, len); i++)
        to[i] = static_cast<T>(levels[i % 2 ? from[i / 2] & 15 : from[i / 2] >> 4] * of_block);
    }
  });
}

void nf4(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t outer_block, float offset, const Tensor& out) {
  const int64_t len = out.numel(), blocks = (len + 63) / 64;
  TORCH_CHECK(out.is_contiguous() && codes.numel() == (len + 1) / 2 && scales.numel() == blocks && outer_block > 0 && outer.numel() == (blocks + outer_block - 1) / outer_block &&
                  tables.numel() == 272, "numbers in 4 bits: codes, scales and levels of ", len, " numbers");
  if (out.scalar_type() == at::kBFloat16) return nf4_blocks<at::BFloat16>(codes, scales, outer, tables, outer_block, offset, out);
  if (out.scalar_type() == at::kHalf) return nf4_blocks<at::Half>(codes, scales, outer, tables, outer_block, offset, out);
  nf4_blocks<float>(codes, scales, outer, tables, outer_block, offset, out);
}

// ---- Softmax of logits, row by row: what a loss asks of it, and its gradient by the logits. Nothing is larger than the logits themselves.

// Of each row the log-probability of its target, the entropy, and the logarithm of the sum of e^logit.
EVERY_CPU void softmax_rows(const float* logits, const int64_t* targets, float* found, int64_t begin, int64_t end, int64_t n) {
  for (int64_t r = begin; r < end; r++) {
    const float* row = logits + r * n;
    float most = row[0];
    for (int64_t i = 1; i < n; i++) most = std::max(most, row[i]);
    float sum = 0.0f, weighted = 0.0f;
    for (int64_t i = 0; i < n; i++) {
      // A logit of −∞ is a token that can't be: e^−87 of it adds nothing.
      const float below = std::max(row[i] - most, -87.0f);
      const float e = exp_approx(below);
      sum += e;
      weighted += e * below;
    }
    const float log_sum = std::log(sum);
    found[3 * r] = row[targets[r]] - most - log_sum;
    found[3 * r + 1] = log_sum - weighted / sum;
    found[3 * r + 2] = most + log_sum;
  }
}

// slope · (1[target] − p) − entropy_slope · p · (log p + entropy)
EVERY_CPU void softmax_gradient_rows(const float* logits, const int64_t* targets, const float* found, const float* slopes,
                                     const float* entropy_slopes, float* gradient, int64_t begin, int64_t end, int64_t n) {
  for (int64_t r = begin; r < end; r++) {
    const float* row = logits + r * n;
    float* out = gradient + r * n;
    const float entropy = found[3 * r + 1], log_sum = found[3 * r + 2], slope = slopes[r];
    if (entropy_slopes) {
      const float by_entropy = entropy_slopes[r];
      for (int64_t i = 0; i < n; i++) {
        const float log_prob = std::max(row[i] - log_sum, -87.0f);
        out[i] = -exp_approx(log_prob) * (slope + by_entropy * (log_prob + entropy));
      }
    } else {
      for (int64_t i = 0; i < n; i++) out[i] = -slope * exp_approx(std::max(row[i] - log_sum, -87.0f));
    }
    out[targets[r]] += slope;
  }
}

Tensor softmax(const Tensor& logits, const Tensor& targets) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  Tensor found = at::empty({rows, 3}, logits.options());
  const float* pl = logits.const_data_ptr<float>();
  const int64_t* pt = targets.const_data_ptr<int64_t>();
  float* pf = found.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain(8 * n), [&](int64_t b, int64_t e) { softmax_rows(pl, pt, pf, b, e, n); });
  return found;
}

Tensor softmax_gradient(const Tensor& logits, const Tensor& targets, const Tensor& found, const Tensor& slopes,
                        const Tensor* entropy_slopes) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  Tensor gradient = at::empty_like(logits);
  const float *pl = logits.const_data_ptr<float>(), *pf = found.const_data_ptr<float>(), *ps = slopes.const_data_ptr<float>(),
              *pe = entropy_slopes ? entropy_slopes->const_data_ptr<float>() : nullptr;
  const int64_t* pt = targets.const_data_ptr<int64_t>();
  float* pg = gradient.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain(8 * n), [&](int64_t b, int64_t e) { softmax_gradient_rows(pl, pt, pf, ps, pe, pg, b, e, n); });
  return gradient;
}

std::vector<Tensor> list(Tensor** tensors, int64_t count) {
  std::vector<Tensor> out;
  for (int64_t i = 0; i < count; i++) out.push_back(*tensors[i]);
  return out;
}

}  // namespace

extern "C" {

char* rollflow_rms_norm(Tensor** out, Tensor* x, Tensor* w, double eps) {
  return guarded(out, [&] { return RmsNorm::apply(*x, *w, eps); });
}

char* rollflow_nf4(Tensor* codes, Tensor* scales, Tensor* outer, Tensor* tables, int64_t outer_block, double offset, Tensor* out) {
  return guarded([&] { nf4(*codes, *scales, *outer, *tables, outer_block, static_cast<float>(offset), *out); });
}

char* rollflow_swiglu(Tensor** out, Tensor* gate_up) {
  return guarded(out, [&] { return SwiGlu::apply(*gate_up); });
}

char* rollflow_softmax(Tensor** out, Tensor* logits, Tensor* targets) {
  return guarded(out, [&] { return softmax(*logits, *targets); });
}

char* rollflow_softmax_gradient(Tensor** out, Tensor* logits, Tensor* targets, Tensor* found, Tensor* slopes, Tensor* entropy_slopes) {
  return guarded(out, [&] { return softmax_gradient(*logits, *targets, *found, *slopes, entropy_slopes); });
}

char* rollflow_attention(Tensor** out, Tensor* qkv, Tensor* cos, Tensor* sin, Tensor* sinks, const int64_t* sequences, int64_t count, int64_t heads,
                         int64_t kv_heads, int64_t window, double scale, double cap) {
  return guarded(out, [&] {
    return Attention::apply(*qkv, *cos, *sin, sinks ? std::optional<Tensor>(*sinks) : std::nullopt, at::IntArrayRef(sequences, 4 * count), heads, kv_heads, window, scale, cap);
  });
}

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

// What libtorch should do on a GPU. cuDNN's attention builds a plan for every new shape, for 0.1 to 1 s each, and shapes of rollouts are new nearly every time;
// sums of bf16 products that are split between blocks would be rounded to bf16. Gives back what is set then.
char* rollflow_gpu_defaults(bool* cudnn_attention, bool* rounded_sums) {
  return guarded([&] {
    auto& context = at::globalContext();
    context.setSDPUseCuDNN(false);
    context.setAllowBF16ReductionCuBLAS(false);
    *cudnn_attention = context.userEnabledCuDNNSDP();
    *rounded_sums = context.allowBF16ReductionCuBLAS() == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  });
}

// Sets how many threads share an operation that the caller starts. When a thread first computes in a library, libtorch or this one, the library replaces the
// thread's number by the one that any thread set last. Both do so here, before the number is set.
void rollflow_use_threads(int threads) {
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  at::set_num_threads(threads);
}

// Copies tensors to others of their shapes, all at a time on a GPU.
char* rollflow_copy_all(Tensor** to, Tensor** from, int64_t count) {
  return guarded([&] { at::_foreach_copy_(list(to, count), list(from, count)); });
}

// One update of `count` tensors. `maxima` is null without amsgrad, `divisor` where gradients are taken as they are.
char* rollflow_adamw(Tensor** params, Tensor** grads, Tensor** means, Tensor** squares, Tensor** maxima, int64_t count, Tensor* step,
                     Tensor* divisor, double lr, double beta1, double beta2, double weight_decay, double eps) {
  return guarded([&] {
    const std::vector<Tensor> steps(count, *step);
    at::_fused_adamw_(list(params, count), list(grads, count), list(means, count), list(squares, count),
                      maxima ? list(maxima, count) : std::vector<Tensor>{}, steps, lr, beta1, beta2, weight_decay, eps, maxima != nullptr,
                      false, divisor ? std::optional<Tensor>(*divisor) : std::nullopt);
  });
}
}
