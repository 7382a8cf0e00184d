// Products on a CPU with weights in 16 bits. Activations, sums and results are f32.
//
// With AVX512-BF16 or AMX, operands are rounded to bf16 and oneDNN's kernels multiply them, which libtorch exports. Its own products of bf16 round their
// results, too. On other CPUs, and for f16, weights are widened. fused/half.rs chooses, and its tests hold both against f64.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "guarded.hpp"

namespace {

using at::BFloat16;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A kernel call computes so many rows and columns of a result, and sums so many products. Each width is compiled once a thread.
constexpr int64_t BLOCK = 64, DEPTH = 1024;
// Widths of a result that is transposed are multiples of this, so that few are compiled.
constexpr int64_t LANES = 16;
// With fewer rows than this, packing them and transposing the result costs less than packing the weight.
constexpr int64_t FEW_ROWS = 256;

// The right operand as kernels take it: numbers 2i and 2i + 1 of a column side by side, [depth / 2, columns]. Rows are filled up to a multiple of LANES, for a
// kernel with AMX must not read more columns than a row has; what it computes of them is left out.
struct Pairs {
  Tensor held;
  int64_t columns;

  Pairs(int64_t depth, int64_t columns) : held(at::empty({depth / 2, (columns + LANES - 1) / LANES * LANES}, at::kInt)), columns(columns) {}
  int64_t row() const { return held.size(1); }
  const BFloat16* at(int64_t depth, int64_t column) const {
    return reinterpret_cast<const BFloat16*>(held.const_data_ptr<int32_t>() + depth / 2 * row() + column);
  }
};

// Of the transpose of rows [columns, depth]: pairs are adjacent already.
Pairs pairs_of_rows(const Tensor& rows) {
  const Pairs pairs(rows.size(1), rows.size(0));
  pairs.held.narrow(1, 0, pairs.columns).copy_(rows.view(at::kInt).t());
  return pairs;
}

// Of a matrix [depth, columns].
Pairs pairs_of_columns(const Tensor& matrix) {
  const int64_t depth = matrix.size(0), columns = matrix.size(1);
  const Pairs pairs(depth, columns);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(matrix.const_data_ptr<BFloat16>());
  uint32_t* to = reinterpret_cast<uint32_t*>(pairs.held.mutable_data_ptr<int32_t>());
  const int64_t row = pairs.row();
  at::parallel_for(0, depth / 2, std::max<int64_t>(1, 32768 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const uint16_t *even = from + 2 * i * columns, *odd = even + columns;
      for (int64_t j = 0; j < columns; j++) to[i * row + j] = static_cast<uint32_t>(odd[j]) << 16 | even[j];
    }
  });
  return pairs;
}

// a · b, or its transpose, in f32: `a` [rows, depth] contiguous.
void multiply(const Tensor& a, const Pairs& b, bool transposed, const Tensor& out) {
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.columns;
  const int64_t row_blocks = (rows + BLOCK - 1) / BLOCK, column_blocks = (columns + BLOCK - 1) / BLOCK;
  const BFloat16* from = a.const_data_ptr<BFloat16>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t worth_a_thread = std::max<int64_t>(1, (1 << 20) / (BLOCK * BLOCK * std::min(depth, DEPTH)));
  at::parallel_for(0, row_blocks * column_blocks, worth_a_thread, [&](int64_t begin, int64_t end) {
    std::vector<float> block(transposed ? BLOCK * BLOCK : 0);
    for (int64_t at = begin; at < end; at++) {
      const int64_t row = at / column_blocks * BLOCK, column = at % column_blocks * BLOCK;
      const int64_t height = std::min(BLOCK, rows - row), width = std::min(BLOCK, columns - column);
      const int64_t computed = transposed ? (width + LANES - 1) / LANES * LANES : width, stride = transposed ? BLOCK : columns;
      float* sums = transposed ? block.data() : to + row * columns + column;
      for (int64_t d = 0; d < depth; d += DEPTH)
        at::native::cpublas::brgemm(height, computed, std::min(DEPTH, depth - d), depth, b.row(), stride, d > 0, from + row * depth + d, b.at(d, column), sums);
      if (transposed)
        for (int64_t j = 0; j < width; j++)
          for (int64_t i = 0; i < height; i++) to[(column + j) * rows + row + i] = sums[i * BLOCK + j];
    }
    at::native::cpublas::brgemm_release();
  });
}

// Kernels take an even depth.
Tensor even(const Tensor& matrix, int64_t dim) {
  const Tensor whole = matrix.size(dim) % 2 == 0 ? matrix : at::constant_pad_nd(matrix, dim == 0 ? std::vector<int64_t>{0, 0, 0, 1} : std::vector<int64_t>{0, 1});
  return whole.contiguous();
}

Tensor bf16(const Tensor& x) { return x.to(at::kBFloat16); }

// [n, k] · [k, m], of bf16, in f32.
Tensor product(const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(at::kFloat));
  if (out.numel() == 0 || a.size(1) == 0) return out.zero_();
  multiply(even(a, 1), pairs_of_columns(even(b, 0)), false, out);
  return out;
}

// x · wᵀ of bf16, in f32.
Tensor projection(const Tensor& x, const Tensor& w) {
  Tensor out = at::empty({x.size(0), w.size(0)}, x.options().dtype(at::kFloat));
  if (out.numel() == 0) return out;
  // A weight that is multiplied from the right.
  if (!w.is_contiguous() && w.t().is_contiguous()) return product(x, w.t());
  const Tensor rows = even(x, 1), weight = even(w, 1);
  if (x.size(0) < FEW_ROWS)
    multiply(weight, pairs_of_rows(rows), true, out);
  else
    multiply(rows, pairs_of_rows(weight), false, out);
  return out;
}

// x · wᵀ for activations in f32 and a weight in 16 bits. `narrow`: x is rounded to bf16.
struct HalfLinear : Function<HalfLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, bool narrow) {
    const Tensor input = narrow ? bf16(x) : x;
    ctx->save_for_backward({input, w});
    ctx->saved_data["narrow"] = narrow;
    return narrow ? projection(input, w) : at::linear(input, w.to(at::kFloat));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &w = saved[1];
    const bool narrow = ctx->saved_data["narrow"].toBool();
    const Tensor dy = narrow ? bf16(grads[0]) : grads[0];
    Tensor dx, dw;
    if (ctx->needs_input_grad(0)) dx = narrow ? product(dy, w) : dy.mm(w.to(at::kFloat));
    if (ctx->needs_input_grad(1)) dw = dy.t().mm(input).to(w.scalar_type());
    return {dx, dw, Tensor()};
  }
};

}  // namespace

extern "C" {

char* rollflow_half_linear(Tensor** out, Tensor* x, Tensor* w, bool narrow) {
  return guarded(out, [&] { return HalfLinear::apply(*x, *w, narrow); });
}

char* rollflow_half_product(Tensor** out, Tensor* a, Tensor* b) {
  return guarded(out, [&] { return product(*a, *b); });
}
}
