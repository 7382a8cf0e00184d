// Operations on the rows of a matrix on a CPU, that libtorch runs as several passes over memory, each in one pass forward and one backward: RMS norm, SwiGLU, and
// what a loss asks of logits.
//
// f32 and contiguous, which rows.rs checks. Held equal to libtorch's operations, gradients included, by tests.rs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

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

}  // namespace

extern "C" {

char* rollflow_rms_norm(Tensor** out, Tensor* x, Tensor* w, double eps) {
  return guarded(out, [&] { return RmsNorm::apply(*x, *w, eps); });
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
}
