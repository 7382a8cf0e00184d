// Norms, gates, rotations, softmax, drawing and numbers in 4 bits: rows.cu and draw.cu.

#include <torch/csrc/autograd/custom_function.h>

#include "launch.hpp"

namespace {

using namespace gpu;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// RMS norm of x, or of x + y, which comes first then. `more` is added to the weight.
struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& y, const Tensor& weight, double eps, double more) {
    const bool adds = y.has_value();
    const Tensor a = x.contiguous(), b = adds ? y->contiguous() : Tensor(), w = weight.contiguous();
    const int64_t width = a.size(-1), rows = a.numel() / width;
    check("rms_norm", w, a, a.scalar_type());
    if (adds) check("rms_norm", b, a, a.scalar_type());
    auto of_rows = a.sizes().vec();
    of_rows.back() = 1;
    Tensor sum = adds ? at::empty_like(a) : a, normed = at::empty_like(a), factors = at::empty(of_rows, a.options().dtype(at::kFloat));
    launch(a, "rms_norm", {format(a.scalar_type())}, {rows}, width >= 2048 ? 256 : width >= 512 ? 128 : 32,
           NormArgs{halves(a), adds ? halves(b) : nullptr, halves(w), adds ? halves(sum) : nullptr, halves(normed), to_floats(factors), width, eps, more});
    ctx->save_for_backward({sum, w, factors});
    ctx->saved_data["more"] = more;
    return adds ? variable_list{sum, normed} : variable_list{normed};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &sum = saved[0], &weight = saved[1], &factors = saved[2], &by_normed = grads.back();
    const double more = ctx->saved_data["more"].toDouble();
    const bool adds = grads.size() == 2;
    if (!by_normed.defined()) return {grads[0], grads[0], Tensor(), Tensor(), Tensor()};
    // Of factors that are rounded once, the gradient is in f32.
    const at::ScalarType kind = sum.scalar_type(), inner = more == 0.0 ? kind : at::kFloat;
    const auto [by_sum, by_weight] = at::_fused_rms_norm_backward(by_normed.contiguous().to(inner), sum.to(inner), {sum.size(-1)}, factors,
                                                                  more == 0.0 ? weight : weight.to(inner) + more, {true, ctx->needs_input_grad(adds ? 2 : 1)});
    const Tensor by_norm = by_sum.to(kind), of_weight = by_weight.defined() ? by_weight.to(kind) : Tensor();
    const Tensor both = adds && grads[0].defined() ? by_norm + grads[0] : by_norm;
    return {both, adds ? both : Tensor(), of_weight, Tensor(), Tensor()};
  }
};

struct SwiGlu : Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    const Tensor from = gate_up.contiguous();
    const int64_t rows = from.size(0), width = from.size(1) / 2;
    Tensor out = at::empty({rows, width}, from.options());
    launch(from, "swiglu", {format(from.scalar_type())}, {std::min(BLOCKS, (rows * width / 8 + 255) / 256)}, 256,
           GateArgs{halves(from), nullptr, halves(out), rows, width});
    ctx->save_for_backward({from});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor from = ctx->get_saved_variables()[0], by_out = grads[0].contiguous();
    const int64_t rows = from.size(0), width = from.size(1) / 2;
    Tensor by_from = at::empty_like(from);
    launch(from, "swiglu_backward", {format(from.scalar_type())}, {std::min(BLOCKS, (rows * width / 8 + 255) / 256)}, 256,
           GateArgs{halves(from), halves(by_out), halves(by_from), rows, width});
    return {by_from};
  }
};

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, double turn) {
  const Tensor from = x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
  check("rotate", cos, x, at::kFloat), check("rotate", sin, x, at::kFloat);
  Tensor out = at::empty(x.sizes(), x.options());
  launch(x, "rotate", {format(x.scalar_type())}, {x.size(0)}, 128,
         RotateArgs{halves(from), floats(cos), floats(sin), halves(out), from.stride(0), x.size(1), x.size(2), turn});
  return out;
}

struct Rotate : Function<Rotate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated(x, cos, sin, 1.0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {rotated(grads[0].contiguous(), saved[0], saved[1], -1.0), Tensor(), Tensor()};
  }
};

// Of a block that goes through a row of logits.
int64_t threads_for(const Tensor& logits) { return logits.size(1) >= 1 << 15 ? 1024 : 256; }

// [rows, 3].
Tensor softmax(const Tensor& logits, const Tensor& targets) {
  check("softmax", logits, logits, at::kFloat), check("softmax", targets, logits, at::kLong);
  Tensor found = at::empty({logits.size(0), 3}, logits.options());
  SoftmaxArgs args{floats(logits), whole(targets), to_floats(found), nullptr, nullptr, nullptr, logits.size(1)};
  launch(logits, "softmax_found", {"-DFORMAT=0"}, {logits.size(0)}, threads_for(logits), args);
  return found;
}

Tensor softmax_gradient(const Tensor& logits, const Tensor& targets, const Tensor& found, const Tensor& slopes, const Tensor* entropy_slopes,
                            at::ScalarType kind) {
  Tensor gradient = at::empty(logits.sizes(), logits.options().dtype(kind));
  for (const Tensor* of : {&found, &slopes}) check("softmax", *of, logits, at::kFloat);
  if (entropy_slopes) check("softmax", *entropy_slopes, logits, at::kFloat);
  SoftmaxArgs args{floats(logits),   whole(targets),    to_floats(found), floats(slopes), entropy_slopes ? floats(*entropy_slopes) : nullptr,
                   halves(gradient), logits.size(1)};
  launch(logits, "softmax_gradient", {format(kind)}, {logits.size(0)}, threads_for(logits), args);
  return gradient;
}

// Tokens and log-probabilities [rows, 2].
Tensor draw(const Tensor& logits, const Tensor& settings) {
  check("draw", logits, logits, at::kFloat), check("draw", settings, logits, at::kDouble);
  const int64_t rows = logits.size(0), count = (logits.size(1) + PART - 1) / PART;
  Tensor drawn = at::empty({rows, 2}, settings.options()), parts = at::empty({rows, count, 3}, logits.options());
  const DrawArgs args{floats(logits), reinterpret_cast<const double*>(settings.data_ptr()), reinterpret_cast<double*>(drawn.data_ptr()),
                      to_floats(parts), logits.size(1), count};
  launch(logits, "draw_parts", {"-DFORMAT=0"}, {rows, count}, 128, args);
  launch(logits, "draw", {"-DFORMAT=0"}, {rows}, 32 * DRAW_WARPS, args);
  return drawn;
}

}  // namespace

// What they take is in gpu.rs.
extern "C" {

// The norm, or, where `y` is not null, the sum and its norm.
char* rollflow_gpu_rms_norm(Tensor** results, Tensor* x, Tensor* y, Tensor* weight, double eps, double more) {
  return guarded([&] {
    for (const Tensor& of : RmsNorm::apply(*x, y ? std::optional<Tensor>(*y) : std::nullopt, *weight, eps, more)) *results++ = new Tensor(of);
  });
}

// Codes and scales in bytes, outer scales and tables in f32; `out` has as many numbers as the codes, a multiple of 64.
char* rollflow_gpu_four_bits(Tensor* codes, Tensor* scales, Tensor* outer, Tensor* tables, int64_t block, int64_t outer_block, double offset, Tensor* out) {
  return guarded([&] {
    check("four_bits", *codes, *out, at::kByte), check("four_bits", *scales, *out, at::kByte);
    check("four_bits", *outer, *out, at::kFloat), check("four_bits", *tables, *out, at::kFloat);
    const auto bytes = [](Tensor* of) { return static_cast<const unsigned char*>(of->data_ptr()); };
    const int64_t len = out->numel();
    launch(*out, "four_bits", {format(out->scalar_type())}, {std::min(BLOCKS, (len / 8 + 255) / 256)}, 256,
           FourBitsArgs{bytes(codes), bytes(scales), floats(*outer), floats(*tables), halves(*out), len, block, outer_block, offset});
  });
}

char* rollflow_gpu_swiglu(Tensor** out, Tensor* gate_up) {
  return guarded(out, [&] { return SwiGlu::apply(*gate_up); });
}

char* rollflow_gpu_rotate(Tensor** out, Tensor* x, Tensor* cos, Tensor* sin) {
  return guarded(out, [&] { return Rotate::apply(*x, *cos, *sin); });
}

char* rollflow_gpu_softmax(Tensor** out, Tensor* logits, Tensor* targets) {
  return guarded(out, [&] { return softmax(*logits, *targets); });
}

char* rollflow_gpu_softmax_gradient(Tensor** out, Tensor* logits, Tensor* targets, Tensor* found, Tensor* slopes, Tensor* entropy_slopes, bool half) {
  return guarded(out, [&] { return softmax_gradient(*logits, *targets, *found, *slopes, entropy_slopes, half ? at::kHalf : at::kBFloat16); });
}

char* rollflow_gpu_draw(Tensor** out, Tensor* logits, Tensor* settings) {
  return guarded(out, [&] { return draw(*logits, *settings); });
}
}
