// Mixtures of experts: experts.cu.

#include <torch/csrc/autograd/custom_function.h>

#include "launch.hpp"

namespace {

using namespace gpu;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// What is added to the rows of a token's experts: a bias of each, [experts, width], which `experts` names; and rows by the sigmoids of gates. All or some may be null.
struct Added {
  const Tensor *bias, *experts, *shared, *gates;
};

// Sum of the rows at each token's places, [tokens, each], weighed unless `weights` is null.
Tensor combined(const Tensor& rows, const Tensor& places, const Tensor* weights, const Added& added = {}) {
  const Tensor from = rows.contiguous();
  check("combine", places, from, at::kLong);
  if (weights) check("combine", *weights, from, at::kFloat);
  if (added.bias) check("combine", *added.bias, from, from.scalar_type()), check("combine", *added.experts, from, at::kLong);
  if (added.shared) check("combine", *added.shared, from, from.scalar_type()), check("combine", *added.gates, from, from.scalar_type());
  const int64_t tokens = places.size(0), width = from.size(1);
  Tensor out = at::empty({tokens, width}, from.options());
  const auto numbers = [](const Tensor* of) { return of ? halves(*of) : nullptr; };
  const CombineArgs args{halves(from), nullptr, whole(places), weights ? floats(*weights) : nullptr, numbers(added.bias), added.bias ? whole(*added.experts) : nullptr,
                         numbers(added.shared), numbers(added.gates), halves(out), nullptr, places.size(1), width};
  launch(from, "combine", {format(from.scalar_type())}, {tokens}, std::min<int64_t>(256, (width / 8 + 31) / 32 * 32), args);
  return out;
}

struct Combine : Function<Combine> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& places, const Tensor& weights) {
    const Tensor from = rows.contiguous(), by = weights.contiguous();
    ctx->save_for_backward({from, places, by});
    return combined(from, places, &by);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &rows = saved[0], &places = saved[1], &weights = saved[2], by_out = grads[0].contiguous();
    Tensor by_rows = at::empty_like(rows), by_weights = at::empty_like(weights);
    launch(rows, "combine_backward", {format(rows.scalar_type())}, {places.size(0)}, 256,
           CombineArgs{halves(rows), halves(by_out), whole(places), floats(weights), nullptr, nullptr, nullptr, nullptr, halves(by_rows), to_floats(by_weights),
                       places.size(1), rows.size(1)});
    return {by_rows, Tensor(), by_weights};
  }
};

// Rows of x, of which each is sent to `each` places.
struct Send : Function<Send> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& sources, const Tensor& places) {
    ctx->save_for_backward({places});
    return x.index_select(0, sources);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {combined(grads[0], ctx->get_saved_variables()[0], nullptr), Tensor(), Tensor()};
  }
};

// Logits of a router in f32, [tokens, experts].
struct Router : Function<Router> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& matrix, const std::optional<Tensor>& bias) {
    const Tensor from = x.contiguous();
    const int64_t tokens = from.size(0), experts = matrix.size(0), width = matrix.size(1);
    check("router", matrix, from, from.scalar_type());
    if (bias) check("router", *bias, from, from.scalar_type());
    Tensor logits = at::empty({tokens, experts}, from.options().dtype(at::kFloat));
    launch(from, "router", {format(from.scalar_type())}, {(tokens + 15) / 16, (experts + 7) / 8}, 128,
           RouterArgs{halves(from), halves(matrix), bias ? halves(*bias) : nullptr, to_floats(logits), tokens, experts, width});
    ctx->save_for_backward({from, matrix});
    ctx->saved_data["biased"] = bias.has_value();
    return logits;
  }

  // In f32, as libtorch's would be.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &matrix = saved[1], &by_logits = grads[0];
    Tensor by_x, by_matrix, by_bias;
    if (ctx->needs_input_grad(0)) by_x = by_logits.mm(matrix.to(at::kFloat)).to(x.scalar_type());
    if (ctx->needs_input_grad(1)) by_matrix = by_logits.t().mm(x.to(at::kFloat)).to(matrix.scalar_type());
    if (ctx->saved_data["biased"].toBool() && ctx->needs_input_grad(2)) by_bias = by_logits.sum(0).to(x.scalar_type());
    return {by_x, by_matrix, by_bias};
  }
};

// Weights and numbers of the likeliest `each` experts, [tokens, each].
void likeliest(const Tensor& logits, int64_t each, bool normalized, Tensor** results) {
  const Tensor from = logits.contiguous();
  const int64_t tokens = from.size(0);
  Tensor weights = at::empty({tokens, each}, from.options()), chosen = at::empty({tokens, each}, from.options().dtype(at::kLong));
  launch(from, "route", {"-DFORMAT=0"}, {(tokens + 3) / 4}, 128,
         RouteArgs{floats(from), to_floats(weights), reinterpret_cast<i64*>(chosen.data_ptr()), tokens, from.size(1), each, normalized});
  results[0] = new Tensor(weights), results[1] = new Tensor(chosen);
}

// Of entries [tokens, each]: the token and the expert of each row, the row of each entry, and where the rows of each expert end, in i32.
void sort_by_expert(const Tensor& chosen, int64_t experts, Tensor** results) {
  const Tensor from = chosen.contiguous();
  check("sort_by_expert", from, from, at::kLong);
  const int64_t entries = from.numel();
  const auto to = [](const Tensor& of) { return reinterpret_cast<i64*>(of.data_ptr()); };
  Tensor sources = at::empty({entries}, from.options()), places = at::empty(from.sizes(), from.options()), sorted = at::empty({entries}, from.options()),
         ends = at::empty({experts}, from.options().dtype(at::kInt));
  launch(from, "sort_by_expert", {"-DFORMAT=0"}, {experts}, entries > 8192 ? 1024 : 256,
         SortArgs{whole(from), to(sources), to(places), to(sorted), reinterpret_cast<int*>(ends.data_ptr()), entries, from.size(-1)});
  results[0] = new Tensor(sources), results[1] = new Tensor(sorted), results[2] = new Tensor(places), results[3] = new Tensor(ends);
}

Tensor bounded_gate(const Tensor& gate_up, const Tensor& bias, const Tensor& experts, double alpha, double limit) {
  const Tensor from = gate_up.contiguous();
  const int64_t rows = from.size(0), width = from.size(1) / 2;
  check("bounded_gate", bias, from, from.scalar_type()), check("bounded_gate", experts, from, at::kLong);
  Tensor out = at::empty({rows, width}, from.options());
  launch(from, "bounded_gate", {format(from.scalar_type())}, {std::min(BLOCKS, (rows * width / 2 + 255) / 256)}, 256,
         BoundedArgs{halves(from), halves(bias), whole(experts), halves(out), rows, width, alpha, limit});
  return out;
}

}  // namespace

// What they take is in experts.rs.
extern "C" {

char* rollflow_gpu_send(Tensor** out, Tensor* x, Tensor* sources, Tensor* places) {
  return guarded([&] { *out = new Tensor(Send::apply(*x, *sources, *places)); });
}

char* rollflow_gpu_combine(Tensor** out, Tensor* rows, Tensor* places, Tensor* weights) {
  return guarded(out, [&] { return Combine::apply(*rows, *places, *weights); });
}

// Without gradients. The last four may be null, two by two.
char* rollflow_gpu_combine_all(Tensor** out, Tensor* rows, Tensor* places, Tensor* weights, Tensor* bias, Tensor* experts, Tensor* shared, Tensor* gates) {
  return guarded(out, [&] { return combined(*rows, *places, weights, {bias, experts, shared, gates}); });
}

// `bias` may be null.
char* rollflow_gpu_router(Tensor** out, Tensor* x, Tensor* matrix, Tensor* bias) {
  return guarded(out, [&] { return Router::apply(*x, *matrix, bias ? std::optional<Tensor>(*bias) : std::nullopt); });
}

// Two results.
char* rollflow_gpu_likeliest(Tensor** results, Tensor* logits, int64_t each, bool normalized) {
  return guarded([&] { likeliest(*logits, each, normalized, results); });
}

// Four results.
char* rollflow_gpu_sort_by_expert(Tensor** results, Tensor* chosen, int64_t experts) {
  return guarded([&] { sort_by_expert(*chosen, experts, results); });
}

char* rollflow_gpu_bounded_gate(Tensor** out, Tensor* gate_up, Tensor* bias, Tensor* experts, double alpha, double limit) {
  return guarded(out, [&] { return bounded_gate(*gate_up, *bias, *experts, alpha, limit); });
}
}
