// The recurrence of gated delta nets (Yang et al., 2024) over chunks of tokens, with its gradient. For each head, with S the state before a chunk, γ its decays
// summed up, and P the decay from each token to those after it:
//
//   A = β K Kᵀ P below the diagonal,  T = (1 + A)⁻¹        what tokens of a chunk correct of each other
//   N = T β (V − e^γ K S)                                   what each token writes
//   out = e^γ Q S + (Q Kᵀ P) N,  S ← e^γ_last S + (e^(γ_last − γ) K)ᵀ N
//
// Only N and S are computed chunk after chunk; all else for all chunks at once. Kept are inputs, T and the states: the gradient computes the rest again.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "gpu/launch.hpp"
#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Rows of the inverse one after the other; `width` is at most that of a chunk.
EVERY_CPU void invert(const float* a, float* t, int64_t width) {
  for (int64_t i = 0; i < width; i++) {
    float* row = t + i * width;
    std::fill(row, row + width, 0.0f);
    row[i] = 1.0f;
    for (int64_t k = 0; k < i; k++) {
      const float by = a[i * width + k], *other = t + k * width;
      for (int64_t j = 0; j <= k; j++) row[j] -= by * other[j];
    }
  }
}

// (1 + A)⁻¹ of what is below the diagonals of [matrices, width, width].
Tensor inverted(const Tensor& a, bool kernels) {
  const int64_t width = a.size(-1);
  if (a.is_cpu() && a.scalar_type() == at::kFloat) {
    Tensor t = at::empty_like(a);
    const float* from = a.const_data_ptr<float>();
    float* to = t.mutable_data_ptr<float>();
    at::parallel_for(0, a.size(0), 4, [&](int64_t b, int64_t e) {
      for (int64_t at = b * width * width; at < e * width * width; at += width * width) invert(from + at, to + at, width);
    });
    return t;
  }
  if (kernels && width <= INVERTED) {
    Tensor t = at::empty_like(a);
    gpu::launch(a, "delta_inverse", {"-DFORMAT=0"}, {a.size(0)}, INVERTED, InverseArgs{gpu::floats(a), gpu::to_floats(t), width});
    return t;
  }
  return at::linalg_solve_triangular(a, at::eye(width, a.options()).expand_as(a), false, true, true);
}

// Chunks that are computed at a time, and the first of their states; then those of the next time.
struct Step {
  int64_t chunk, count, state;
};

struct Plan {
  std::vector<int64_t> steps;  // three numbers each
  int64_t second;              // from this step on, if not -1, sequences continue others,
  int64_t states;              // whose states are these and the following
  bool kernels;

  int64_t size() const { return static_cast<int64_t>(steps.size()) / 3; }
  Step at(int64_t step) const { return {steps[3 * step], steps[3 * step + 1], steps[3 * step + 2]}; }
};

// Factors [chunks, heads, chunk, 1], kept [chunks, heads, 1, 1], pairs [chunks, heads, chunk, chunk].
struct Decays {
  Tensor since, until, kept, pairs;

  explicit Decays(const Tensor& decay) {
    const Tensor sum = decay.cumsum(-1), last = sum.narrow(-1, sum.size(-1) - 1, 1);
    since = sum.exp().unsqueeze(-1), until = (last - sum).exp().unsqueeze(-1), kept = last.exp().unsqueeze(-1);
    pairs = (sum.unsqueeze(-1) - sum.unsqueeze(-2)).tril_().exp_().tril_();
  }
};

// [chunks, heads, …] → [chunks · heads, …]
Tensor flat(const Tensor& x) { return x.flatten(0, 1); }
Tensor turned(const Tensor& x) { return x.transpose(-1, -2); }

struct DeltaChunks : Function<DeltaChunks> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& beta,
                               const std::optional<Tensor>& before, const std::optional<Tensor>& prefixes, const Plan& plan, int64_t sequences) {
    const Tensor q = query.contiguous(), k = key.contiguous(), v = value.contiguous();
    const int64_t heads = k.size(1), keys = k.size(3), values = v.size(3);
    const Decays decays(decay);
    const Tensor t = inverted(at::bmm(flat(k), turned(flat(k))).mul_(flat(decays.pairs)).mul_(flat(beta).unsqueeze(-1)), plan.kernels);
    Tensor written = (t * flat(beta).unsqueeze(-2)).view({k.size(0), heads, k.size(2), k.size(2)}), read = k * decays.since, left = k * decays.until;
    Tensor states = at::empty({k.size(0), heads, keys, values}, k.options()), news = at::empty_like(v);
    Tensor now = at::zeros({sequences, heads, keys, values}, k.options());
    if (before) now.narrow(0, 0, before->size(0)).copy_(*before);
    for (int64_t at = 0; at < plan.size(); at++) {
      if (at == plan.second) now.narrow(0, plan.states, sequences - plan.states).copy_(now.index_select(0, *prefixes));
      const auto [chunk, count, state] = plan.at(at);
      const auto of = [&, chunk = chunk, count = count](const Tensor& x) { return flat(x.narrow(0, chunk, count)); };
      Tensor held = now.narrow(0, state, count);
      states.narrow(0, chunk, count).copy_(held);
      held = flat(held);
      Tensor fresh = of(news);
      at::bmm_out(fresh, of(written), at::baddbmm(of(v), of(read), held, 1, -1));
      held.mul_(of(decays.kept)).baddbmm_(turned(of(left)), fresh);
    }
    // What is not needed any more makes room.
    written = read = left = Tensor();
    const Tensor attention = at::bmm(flat(q), turned(flat(k))).mul_(flat(decays.pairs));
    Tensor out = at::bmm(attention, flat(news));
    out.baddbmm_(flat(q * decays.since), flat(states));
    ctx->save_for_backward({q, k, v, decay, beta, t, states, prefixes ? *prefixes : Tensor()});
    ctx->saved_data["steps"] = plan.steps;
    ctx->saved_data["second"] = plan.second;
    ctx->saved_data["states"] = plan.states;
    ctx->saved_data["sequences"] = sequences;
    ctx->saved_data["begun"] = before.has_value();
    return {out.view_as(v), now};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &decay = saved[3], &beta = saved[4], &t = saved[5], &states = saved[6], &prefixes = saved[7];
    const Plan plan{ctx->saved_data["steps"].toIntVector(), ctx->saved_data["second"].toInt(), ctx->saved_data["states"].toInt(), false};
    const int64_t sequences = ctx->saved_data["sequences"].toInt(), chunks = k.size(0), heads = k.size(1), chunk_size = k.size(2);
    const Tensor by_out = grads[0].defined() ? grads[0].contiguous() : at::zeros_like(v);
    const Decays decays(decay);
    const Tensor pairs = flat(decays.pairs), rows = flat(beta).unsqueeze(-1), columns = flat(beta).unsqueeze(-2);
    const Tensor read = k * decays.since, left = k * decays.until, asked = q * decays.since;
    const Tensor attention = at::bmm(flat(q), turned(flat(k))).mul_(pairs);
    Tensor written = t * columns, values = at::baddbmm(flat(v), flat(read), flat(states), 1, -1);
    const Tensor news = at::bmm(written, values);

    // Backwards: by what was written, by values less what was known, and by the states after each chunk.
    Tensor by_news = at::bmm(turned(attention), flat(by_out)).view_as(v), by_values = at::empty_like(v), by_states = at::empty_like(states);
    Tensor by_read_states = at::bmm(turned(flat(asked)), flat(by_out)).view_as(states);
    written = written.view({chunks, heads, chunk_size, chunk_size});
    Tensor by_now = grads[1].defined() ? grads[1].clone() : at::zeros({sequences, heads, k.size(3), v.size(3)}, k.options());
    for (int64_t at = plan.size() - 1; at >= 0; at--) {
      const auto [chunk, count, state] = plan.at(at);
      const auto of = [&, chunk = chunk, count = count](const Tensor& x) { return flat(x.narrow(0, chunk, count)); };
      Tensor held = by_now.narrow(0, state, count);
      by_states.narrow(0, chunk, count).copy_(held);
      held = flat(held);
      Tensor fresh = of(by_news), known = of(by_values);
      fresh.baddbmm_(of(left), held);
      at::bmm_out(known, turned(of(written)), fresh);
      held.mul_(of(decays.kept)).add_(of(by_read_states)).baddbmm_(turned(of(read)), known, 1, -1);
      if (at == plan.second) by_now.index_add_(0, prefixes, by_now.narrow(0, plan.states, sequences - plan.states).clone());
    }
    by_read_states = written = Tensor();

    // By the matrices of pairs, all below the diagonal or on it.
    Tensor by_written = at::bmm(flat(by_news), turned(values));
    by_news = values = Tensor();
    Tensor by_beta = (by_written * t).sum(-2);
    Tensor by_products = at::bmm(turned(t), at::bmm(by_written.mul_(columns), turned(t))).tril_(-1).neg_();
    by_written = Tensor();
    Tensor by_pairs = at::bmm(flat(k), turned(flat(k))).mul_(pairs).mul_(by_products);
    by_beta.add_(by_pairs.sum(-1));
    by_products.mul_(pairs).mul_(rows);
    Tensor by_asked = at::bmm(flat(by_out), turned(news)).tril_();
    by_pairs.mul_(rows).addcmul_(by_asked, attention);
    by_asked.mul_(pairs);

    const Tensor of_states = at::bmm(flat(by_values), turned(flat(states))).neg_(), of_news = at::bmm(news, turned(flat(by_states)));
    const Tensor of_queries = at::bmm(flat(by_out), turned(flat(states)));
    Tensor by_key = at::bmm(by_products + turned(by_products), flat(k));
    by_key.baddbmm_(turned(by_asked), flat(q)).addcmul_(of_states, flat(decays.since)).addcmul_(of_news, flat(decays.until));
    Tensor by_query = at::bmm(by_asked, flat(k)).addcmul_(of_queries, flat(decays.since));

    const Tensor by_left = (of_news * flat(left)).sum(-1);
    Tensor by_sum = (of_states * flat(read)).sum(-1) + (of_queries * flat(asked)).sum(-1) - by_left + by_pairs.sum(-1) - by_pairs.sum(-2);
    const Tensor by_kept = (flat(states) * flat(by_states)).sum({-1, -2}) * flat(decays.kept).view({-1});
    by_sum.select(-1, chunk_size - 1).add_(by_left.sum(-1)).add_(by_kept);
    // A decay is in its token's sum, and in those of the tokens after it.
    const Tensor by_decay = at::mm(by_sum, at::ones({chunk_size, chunk_size}, by_sum.options()).tril_());
    const Tensor by_before = ctx->saved_data["begun"].toBool() ? by_now.narrow(0, 0, plan.states) : Tensor();
    return {by_query.view_as(q), by_key.view_as(k), by_values, by_decay.view_as(decay), by_beta.view_as(beta), by_before, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

// Queries, keys and values [chunks, heads, chunk, …], decays' logarithms and betas [chunks, heads, chunk], states before of the first sequences, or null, and which of
// these the sequences from `states` on continue, or null. Results: outputs like values, and the states [sequences, heads, …] after them.
extern "C" char* rollflow_delta_chunks(Tensor** results, Tensor** of, Tensor* before, Tensor* prefixes, const int64_t* steps, int64_t count, int64_t second,
                                       int64_t states, int64_t sequences, bool kernels) {
  return guarded([&] {
    const Plan plan{std::vector<int64_t>(steps, steps + 3 * count), second, states, kernels};
    const auto maybe = [](const Tensor* x) { return x ? std::optional<Tensor>(*x) : std::nullopt; };
    for (const Tensor& result : DeltaChunks::apply(*of[0], *of[1], *of[2], of[3]->contiguous(), of[4]->contiguous(), maybe(before), maybe(prefixes), plan, sequences))
      *results++ = new Tensor(result);
  });
}
