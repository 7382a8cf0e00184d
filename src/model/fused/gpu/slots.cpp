// One token of each sequence: attend.cu and delta.cu.

#include <array>

#include "launch.hpp"

namespace {

using namespace gpu;

// One token of each sequence in a gated delta net, whose inputs and states become those after it.
Tensor delta_step(const Tensor& projected, const Tensor& conv, const Tensor& inputs, const Tensor& states, const std::array<const Tensor*, 3>& by_head,
                  double eps) {
  const Tensor from = projected.contiguous();
  const int64_t rows = states.size(0), heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  const int64_t key_heads = (inputs.size(1) - heads * value_dim) / (2 * key_dim);
  for (const Tensor* of : {&conv, &inputs, by_head[0], by_head[1], by_head[2]}) check("delta_step", *of, from, from.scalar_type());
  check("delta_step", states, from, at::kFloat);
  Tensor out = at::empty({rows, heads * value_dim}, from.options());
  const DeltaArgs args{halves(from),        halves(conv),        halves(inputs), to_floats(states), halves(*by_head[0]), halves(*by_head[1]),
                       halves(*by_head[2]), halves(out),         key_heads,      heads / key_heads, conv.size(1),        eps};
  const std::vector<std::string> definitions{format(from.scalar_type()), define("KEY_DIM", key_dim), define("VALUE_DIM", value_dim),
                                             define("CONV", conv.size(1))};
  launch(from, "delta_step", definitions, {rows * key_heads}, (2 * value_dim + 31) / 32 * 32, args);
  return out;
}

struct Attended {
  int64_t page, heads, longest, window, rotated;
  bool gated;
  double scale, cap, eps, more;
  const Tensor *q_norm, *k_norm, *sinks;
};

// One token of each slot, of which `table` [slots, width] has the pages in `cache`, and whose largest position is `longest` − 1.
Tensor attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& cache, const Tensor& positions, const Tensor& table, const Attended& of) {
  const int64_t slots = table.size(0), width = table.size(1), keys = cache.size(2), dim = cache.size(3), heads = of.heads;
  const Tensor from = qkv.contiguous();
  for (const Tensor* cosines : {&cos, &sin}) check("attend", *cosines, qkv, at::kFloat);
  check("attend", cache, qkv, qkv.scalar_type()), check("attend", positions, qkv, at::kLong), check("attend", table, qkv, at::kLong);
  TORCH_CHECK(from.size(0) == slots && positions.size(0) == slots && of.longest <= width * of.page && of.longest <= cos.size(0),
              "attend: a slot per row, and room for its position");
  // Long sequences of few slots are divided, so that all of the device works: four blocks for each of 132 processors.
  const int64_t splits = std::max<int64_t>(1, std::min((of.longest + 127) / 128, 528 / (slots * keys)));
  Tensor out = at::empty({slots, heads * dim}, from.options()), parts;
  if (splits > 1) parts = at::empty({slots * heads * splits * (dim + 1)}, from.options().dtype(at::kFloat));
  const AttendArgs args{halves(from),
                        floats(cos),
                        floats(sin),
                        of.q_norm ? halves(*of.q_norm) : nullptr,
                        of.k_norm ? halves(*of.k_norm) : nullptr,
                        halves(cache),
                        whole(positions),
                        whole(table),
                        of.sinks ? floats(*of.sinks) : nullptr,
                        halves(out),
                        splits > 1 ? to_floats(parts) : nullptr,
                        width,
                        of.window,
                        splits,
                        of.scale,
                        of.cap,
                        of.eps,
                        of.more};
  const std::vector<std::string> definitions{format(from.scalar_type()), define("PAGE", of.page), define("DIM", dim),         define("HEADS", heads),
                                             define("KEYS", keys),       define("ROTATED", of.rotated), define("GATED", of.gated)};
  launch(from, "attend", definitions, {keys, slots, splits}, 64, args);
  if (splits > 1) launch(from, "merge", definitions, {slots, heads}, std::min<int64_t>(dim, 128), args);
  else prepare(from, "merge", definitions);
  return out;
}

}  // namespace

// What they take is in gpu.rs.
extern "C" {

char* rollflow_gpu_delta_step(Tensor** out, Tensor* projected, Tensor* conv, Tensor* inputs, Tensor* states, Tensor* step_bias, Tensor* decay, Tensor* norm,
                              double eps) {
  return guarded([&] { *out = new Tensor(delta_step(*projected, *conv, *inputs, *states, {step_bias, decay, norm}, eps)); });
}

char* rollflow_gpu_attend(Tensor** out, Tensor* qkv, Tensor* cos, Tensor* sin, Tensor* cache, Tensor* positions, Tensor* table, Tensor* q_norm, Tensor* k_norm,
                          Tensor* sinks, int64_t page, int64_t heads, int64_t longest, int64_t window, int64_t rotated, bool gated, double scale, double cap,
                          double eps, double more) {
  return guarded(out, [&] {
    return attend(*qkv, *cos, *sin, *cache, *positions, *table, {page, heads, longest, window, rotated, gated, scale, cap, eps, more, q_norm, k_norm, sinks});
  });
}
}
