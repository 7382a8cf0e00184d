// libtorch's flash attention (Dao, 2023) over packed rows [tokens, heads, d], with gradients, and with sinks, which it does not know.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <optional>

#include "guarded.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Sequences are told by the ends of their queries and of their keys, from 0 on, in int32. A query sees the keys up to its own, counted from the last ones, or
// `window` of them.
struct Runs {
  const Tensor &q_ends, &k_ends;
  int64_t most_q, most_k, window;
  double scale;
  std::optional<int64_t> left() const { return window > 0 ? std::optional<int64_t>(window - 1) : std::nullopt; }
  std::optional<int64_t> right() const { return window > 0 ? std::optional<int64_t>(0) : std::nullopt; }
};

auto forward_of(const Tensor& q, const Tensor& k, const Tensor& v, const Runs& of) {
  return at::_flash_attention_forward(q, k, v, of.q_ends, of.k_ends, of.most_q, of.most_k, 0.0, true, false, of.scale, of.left(), of.right());
}

// Sinks [heads] are scores of no key. A query's other shares shrink by e^(own − all), of the logarithms of its sums of e^score without and with the sink.
// With the latter, the gradient of plain attention is that of attention with a sink.
struct WithSinks : Function<WithSinks> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& sinks, const Tensor& q_ends, const Tensor& k_ends,
                        int64_t most_q, int64_t most_k, double scale, int64_t window) {
    const auto [plain, own, random, unused, mask] = forward_of(q, k, v, {q_ends, k_ends, most_q, most_k, window, scale});
    TORCH_CHECK(own.dim() == 2 && own.size(0) == q.size(1) && own.size(1) == q.size(0), "flash attention: sums of each head and token");
    const Tensor all = at::logaddexp(own, sinks.to(at::kFloat).unsqueeze(1));
    const Tensor out = (plain * (own - all).exp().t().unsqueeze(2)).to(q.scalar_type());
    ctx->save_for_backward({q, k, v, sinks, q_ends, k_ends, out, all, random, unused});
    ctx->saved_data["most_q"] = most_q, ctx->saved_data["most_k"] = most_k, ctx->saved_data["window"] = window, ctx->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &sinks = saved[3], &out = saved[6], &all = saved[7];
    const auto number = [&](const char* of) { return ctx->saved_data[of].toInt(); };
    const Runs of{saved[4], saved[5], number("most_q"), number("most_k"), number("window"), ctx->saved_data["scale"].toDouble()};
    const Tensor by_out = gradients[0].contiguous();
    const auto [by_q, by_k, by_v] =
        at::_flash_attention_backward(by_out, q, k, v, out, all, of.q_ends, of.k_ends, of.most_q, of.most_k, 0.0, true, saved[8], saved[9], of.scale, of.left(), of.right());
    const Tensor slopes = (by_out.to(at::kFloat) * out.to(at::kFloat)).sum(-1).t();
    const Tensor by_sinks = -((sinks.to(at::kFloat).unsqueeze(1) - all).exp() * slopes).sum(1).to(sinks.scalar_type());
    return {by_q, by_k, by_v, by_sinks, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

extern "C" char* rollflow_flash(Tensor** out, Tensor* q, Tensor* k, Tensor* v, Tensor* sinks, Tensor* q_ends, Tensor* k_ends, int64_t most_q, int64_t most_k,
                                double scale, int64_t window) {
  return guarded(out, [&] {
    if (sinks) return WithSinks::apply(*q, *k, *v, *sinks, *q_ends, *k_ends, most_q, most_k, scale, window);
    return std::get<0>(forward_of(*q, *k, *v, {*q_ends, *k_ends, most_q, most_k, window, scale}));
  });
}
