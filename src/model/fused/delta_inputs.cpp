// From projections to a gated delta net's queries, keys and values by chunk, in one pass forward and one backward: the convolution over time, its SiLU, and the unit
// lengths of queries and keys. On a CPU in f32, and by our kernels on a GPU (gpu/delta.cu); gated_delta.rs has the same in libtorch's operations.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "gpu/launch.hpp"
#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Shape {
  int64_t key_heads, shared, key_dim, value_dim, kernel, chunk;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t heads() const { return key_heads * shared; }
  int64_t mixed() const { return 2 * keys() + heads() * value_dim; }
  int64_t sources() const { return kernel - 1 + chunk; }
};

// Columns of one head: of queries, of keys or of values.
struct Columns {
  int64_t which, head, first, width, copies;

  // All queries, all keys, then all values.
  Columns(const Shape& of, int64_t at) {
    which = std::min<int64_t>(at / of.key_heads, 2), head = at - which * of.key_heads;
    width = which == 2 ? of.value_dim : of.key_dim, copies = which == 2 ? 1 : of.shared;
    first = which * of.keys() + head * width;
  }
};

// A row of inputs: a packed one, or one of the others after them.
struct Rows {
  const float *packed, *others;
  int64_t stride, count, mixed;

  const float* at(int64_t row) const { return row < count ? packed + row * stride : others + (row - count) * mixed; }
};

constexpr float LENGTH = 1e-6f;

// The convolution of a token, and its SiLU.
EVERY_CPU void mix(const Rows& rows, const int64_t* sources, const float* weights, int64_t kernel, int64_t first, int64_t width, float* sum, float* silu) {
  std::fill(sum, sum + width, 0.0f);
  for (int64_t tap = 0; tap < kernel; tap++) {
    const float *from = rows.at(sources[tap]) + first, *by = weights + tap * width;
    for (int64_t i = 0; i < width; i++) sum[i] += by[i] * from[i];
  }
  for (int64_t i = 0; i < width; i++) silu[i] = sum[i] / (1.0f + exp_approx(std::min(-sum[i], 87.0f)));
}

EVERY_CPU float squares(const float* x, int64_t width) {
  float sum = 0.0f;
  for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
  return sum;
}

EVERY_CPU void scaled(const float* x, float by, float* out, int64_t width) {
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * by;
}

// By the SiLU's inputs, which `by_out` becomes: first by its outputs, where these were scaled by `scale` · `length`.
EVERY_CPU void unmix(const float* sum, const float* silu, float scale, float length, float* by_out, int64_t width) {
  if (length != 0.0f) {
    float along = 0.0f;
    for (int64_t i = 0; i < width; i++) along += by_out[i] * silu[i];
    along *= length * length;
    for (int64_t i = 0; i < width; i++) by_out[i] = scale * length * (by_out[i] - silu[i] * along);
  }
  for (int64_t i = 0; i < width; i++) {
    const float sigmoid = 1.0f / (1.0f + exp_approx(std::min(-sum[i], 87.0f)));
    by_out[i] *= sigmoid * (1.0f + sum[i] * (1.0f - sigmoid));
  }
}

EVERY_CPU void add_products(const float* x, const float* y, float* sum, int64_t width) {
  for (int64_t i = 0; i < width; i++) sum[i] += x[i] * y[i];
}

// Weights of a head's columns, [kernel, width].
std::vector<float> taps(const Tensor& conv, const Columns& of) {
  const int64_t kernel = conv.size(1);
  const float* from = conv.const_data_ptr<float>() + of.first * kernel;
  std::vector<float> weights(kernel * of.width);
  for (int64_t i = 0; i < of.width; i++)
    for (int64_t tap = 0; tap < kernel; tap++) weights[tap * of.width + i] = from[i * kernel + tap];
  return weights;
}

float scale_of(const Shape& of, int64_t which) { return which == 0 ? 1.0f / std::sqrt(static_cast<float>(of.key_dim)) : 1.0f; }

// Every head's columns are one thread's.
void forward_on_cpu(const Shape& of, const Rows& rows, const Tensor& conv, const Tensor& sources, const std::array<Tensor, 3>& results) {
  const int64_t* from = sources.const_data_ptr<int64_t>();
  const int64_t chunks = sources.numel() / of.sources();
  at::parallel_for(0, 2 * of.key_heads + of.heads(), 1, [&](int64_t b, int64_t e) {
    for (int64_t item = b; item < e; item++) {
      const Columns columns(of, item);
      const auto weights = taps(conv, columns);
      std::vector<float> sum(columns.width), silu(columns.width);
      float* const out = results[columns.which].mutable_data_ptr<float>();
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t token = 0; token < of.chunk; token++) {
          mix(rows, from + chunk * of.sources() + token, weights.data(), of.kernel, columns.first, columns.width, sum.data(), silu.data());
          const float by = columns.which == 2 ? 1.0f : scale_of(of, columns.which) / std::sqrt(squares(silu.data(), columns.width) + LENGTH);
          for (int64_t copy = 0; copy < columns.copies; copy++)
            scaled(silu.data(), by, out + ((chunk * of.heads() + columns.head * columns.copies + copy) * of.chunk + token) * columns.width, columns.width);
        }
    }
  });
}

void backward_on_cpu(const Shape& of, const Rows& rows, const Tensor& conv, const Tensor& sources, const std::array<Tensor, 3>& by_results, const Tensor& by_packed,
                     const Tensor& by_conv) {
  const int64_t* from = sources.const_data_ptr<int64_t>();
  const int64_t chunks = sources.numel() / of.sources();
  float *const by_rows = by_packed.mutable_data_ptr<float>(), *const by_weights = by_conv.mutable_data_ptr<float>();
  at::parallel_for(0, 2 * of.key_heads + of.heads(), 1, [&](int64_t b, int64_t e) {
    for (int64_t item = b; item < e; item++) {
      const Columns columns(of, item);
      const int64_t width = columns.width;
      const auto weights = taps(conv, columns);
      std::vector<float> sum(width), silu(width), by(width), sums(of.kernel * width);
      const float* const by_out = by_results[columns.which].const_data_ptr<float>();
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t token = 0; token < of.chunk; token++) {
          const int64_t* const own = from + chunk * of.sources() + token;
          mix(rows, own, weights.data(), of.kernel, columns.first, width, sum.data(), silu.data());
          std::fill(by.begin(), by.end(), 0.0f);
          for (int64_t copy = 0; copy < columns.copies; copy++) {
            const float* of_copy = by_out + ((chunk * of.heads() + columns.head * columns.copies + copy) * of.chunk + token) * width;
            for (int64_t i = 0; i < width; i++) by[i] += of_copy[i];
          }
          const float length = columns.which == 2 ? 0.0f : 1.0f / std::sqrt(squares(silu.data(), width) + LENGTH);
          unmix(sum.data(), silu.data(), scale_of(of, columns.which), length, by.data(), width);
          for (int64_t tap = 0; tap < of.kernel; tap++) {
            add_products(by.data(), rows.at(own[tap]) + columns.first, sums.data() + tap * width, width);
            if (own[tap] < rows.count) add_products(by.data(), weights.data() + tap * width, by_rows + own[tap] * of.mixed() + columns.first, width);
          }
        }
      for (int64_t i = 0; i < width; i++)
        for (int64_t tap = 0; tap < of.kernel; tap++) by_weights[(columns.first + i) * of.kernel + tap] = sums[tap * width + i];
    }
  });
}

NetInputsArgs args_of(const Shape& of, const Tensor& packed, const Tensor& others, const Tensor& conv, const Tensor& sources) {
  NetInputsArgs args{};
  args.packed = gpu::halves(packed), args.others = gpu::halves(others), args.conv = gpu::halves(conv), args.sources = gpu::whole(sources);
  args.stride = packed.stride(0), args.count = packed.size(0);
  args.key_heads = of.key_heads, args.shared = of.shared, args.chunk = of.chunk;
  return args;
}

void launch(const Shape& of, const Tensor& packed, const Tensor& sources, const char* name, const NetInputsArgs& args) {
  const std::vector<std::string> definitions{gpu::format(packed.scalar_type()), gpu::define("KEY_DIM", of.key_dim), gpu::define("VALUE_DIM", of.value_dim),
                                             gpu::define("CONV", of.kernel)};
  gpu::launch(packed, name, definitions, {sources.numel() / of.sources(), 2 * of.key_heads + of.heads()}, 32, args);
}

struct DeltaInputs : Function<DeltaInputs> {
  static variable_list forward(AutogradContext* ctx, const Tensor& packed, const Tensor& others, const Tensor& conv, const Tensor& sources, const Shape& of) {
    const int64_t chunks = sources.numel() / of.sources();
    const auto options = packed.options().dtype(at::kFloat);
    const std::array<Tensor, 3> results{at::empty({chunks, of.heads(), of.chunk, of.key_dim}, options), at::empty({chunks, of.heads(), of.chunk, of.key_dim}, options),
                                        at::empty({chunks, of.heads(), of.chunk, of.value_dim}, options)};
    if (packed.is_cpu()) {
      forward_on_cpu(of, rows_of(packed, others), conv, sources, results);
    } else {
      NetInputsArgs args = args_of(of, packed, others, conv, sources);
      args.query = gpu::to_floats(results[0]), args.key = gpu::to_floats(results[1]), args.value = gpu::to_floats(results[2]);
      launch(of, packed, sources, "delta_inputs", args);
    }
    ctx->save_for_backward({packed, others, conv, sources});
    ctx->saved_data["shape"] = std::vector<int64_t>{of.key_heads, of.shared, of.key_dim, of.value_dim, of.kernel, of.chunk};
    return {results[0], results[1], results[2]};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &packed = saved[0], &others = saved[1], &conv = saved[2], &sources = saved[3];
    const auto numbers = ctx->saved_data["shape"].toIntVector();
    const Shape of{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
    const int64_t chunks = sources.numel() / of.sources(), seen = of.kernel - 1;
    std::array<Tensor, 3> by_results;
    for (int64_t which = 0; which < 3; which++) {
      const int64_t dim = which == 2 ? of.value_dim : of.key_dim;
      by_results[which] = grads[which].defined() ? grads[which].contiguous() : at::zeros({chunks, of.heads(), of.chunk, dim}, packed.options().dtype(at::kFloat));
    }
    if (packed.is_cpu()) {
      const Tensor by_packed = at::zeros({packed.size(0), of.mixed()}, packed.options()), by_conv = at::empty_like(conv);
      backward_on_cpu(of, rows_of(packed, others), conv, sources, by_results, by_packed, by_conv);
      return {by_packed, Tensor(), by_conv, Tensor(), Tensor()};
    }
    // Of rows that a chunk sees before its own, several chunks may add to one. The others are a last row, which is dropped.
    Tensor by_packed = at::empty({packed.size(0) + 1, of.mixed()}, packed.options());
    const Tensor by_seen = at::empty({chunks * seen, of.mixed()}, packed.options().dtype(at::kFloat));
    const Tensor by_taps = at::empty({chunks, of.mixed(), of.kernel}, by_seen.options());
    NetInputsArgs args = args_of(of, packed, others, conv, sources);
    args.by_query = gpu::floats(by_results[0]), args.by_key = gpu::floats(by_results[1]), args.by_value = gpu::floats(by_results[2]);
    args.by_packed = gpu::halves(by_packed), args.by_seen = gpu::to_floats(by_seen), args.by_taps = gpu::to_floats(by_taps);
    launch(of, packed, sources, "delta_inputs_backward", args);
    const Tensor before = sources.view({chunks, of.sources()}).narrow(1, 0, seen).reshape({-1}).clamp_max(packed.size(0));
    // Summed in f32 (law N5): the last rows of a prompt are seen by all of its answers. Rows that are the same have the place of the first.
    const Tensor first = at::searchsorted(std::get<0>(before.sort()), before);
    const Tensor sums = at::zeros_like(by_seen).index_add_(0, first, by_seen).index_select(0, first);
    by_packed.index_copy_(0, before, (sums + by_packed.index_select(0, before)).to(packed.scalar_type()));
    return {by_packed.narrow(0, 0, packed.size(0)), Tensor(), by_taps.sum(0).to(conv.scalar_type()), Tensor(), Tensor()};
  }

  static Rows rows_of(const Tensor& packed, const Tensor& others) {
    return {packed.const_data_ptr<float>(), others.const_data_ptr<float>(), packed.stride(0), packed.size(0), others.size(1)};
  }
};

}  // namespace

// Inputs [tokens, mixed], whose columns are neighbours, and others [rows, mixed]; the convolution's weights [mixed, kernel]; rows of the inputs and then of the others
// [chunks · (kernel − 1 + chunk)]. Results: queries, keys and values in f32 [chunks, heads, chunk, …].
extern "C" char* rollflow_delta_inputs(Tensor** results, Tensor* packed, Tensor* others, Tensor* conv, Tensor* sources, int64_t key_heads, int64_t shared,
                                       int64_t key_dim, int64_t value_dim, int64_t chunk) {
  return guarded([&] {
    const Shape of{key_heads, shared, key_dim, value_dim, conv->size(1), chunk};
    TORCH_CHECK(packed->stride(1) == 1 && packed->size(1) == of.mixed() && others->size(1) == of.mixed() && conv->size(0) == of.mixed(), "delta_inputs: shapes");
    for (const Tensor* other : {others, conv}) gpu::check("delta_inputs", *other, *packed, packed->scalar_type());
    for (const Tensor& result : DeltaInputs::apply(*packed, *others, *conv, *sources, of)) *results++ = new Tensor(result);
  });
}
