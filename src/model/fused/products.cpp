// Products of f32 matrices on a CPU, and their gradients.
//
// Libraries rearrange both operands of a product and clear its result first, which takes a fifth of the time where matrices are small, and more where rows are
// few. Here oneDNN's kernels, which libtorch exports, read operands where they are; what must be transposed or is read often is rearranged in blocks that stay
// in a cache. Each number of x · wᵀ is one sum in the order of the depth, so that it depends neither on the number of rows nor of threads. products.rs
// chooses, and its tests compare with f64.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "guarded.hpp"
#include "vectors.hpp"

// True where libtorch has Intel's library and the processor is Intel's. There gradients by weights take a fifth less time in it.
extern "C" bool rollflow_has_fast_library() {
#if defined(__x86_64__) && defined(__GNUC__)
  return at::hasMKL() && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A kernel call computes so many rows and columns of a result and sums so many products. Shapes of calls are compiled once a thread, so that these are few:
// the last rows of an operand are copied to a block of the full height, a half or a quarter of it.
constexpr int64_t HEIGHT = 64, WIDTH = 128, DEPTH = 1024;
// The depth of a gradient by inputs, whose matrix is read across its rows.
constexpr int64_t ACROSS_DEPTH = 512;
// The same of a product whose left operand is transposed; its last rows are filled up with zeros to a multiple of STEP.
constexpr int64_t TURNED_DEPTH = 256, STEP = 64;
// With fewer rows or columns, or fewer operations, libtorch's gradients take no longer.
constexpr int64_t FEWEST = 32, OPERATIONS = 1 << 22;

// `count` rows of `len` numbers to `len` rows of `count`.
#define TURN_ROWS(V) \
  void turn_rows(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t count, int64_t len) { \
    transpose<V>(from, from_row, to, to_row, count, len); \
  }
FOR_EVERY_CPU(TURN_ROWS)

// The transpose, whose rows are padded with zeros to whole vectors.
Tensor transposed(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1), width = padded(rows);
  Tensor out = at::empty({columns, width}, matrix.options());
  const float* from = matrix.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, (columns + LANES - 1) / LANES, std::max<int64_t>(1, 65536 / (LANES * rows + 1)), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * LANES, last = std::min(end * LANES, columns);
    turn_rows(from + first, columns, to + first * width, width, rows, last - first);
    for (int64_t row = first; row < last; row++) std::fill(to + row * width + rows, to + (row + 1) * width, 0.0f);
  });
  return out;
}

void call(int64_t height, int64_t width, int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row, bool adds) {
  at::native::cpublas::brgemm(height, width, depth, a_row, b_row, c_row, adds, a, b, c);
}

// The height of a call for so many rows.
int64_t filled_height(int64_t rows) { return rows > HEIGHT / 2 ? HEIGHT : rows > HEIGHT / 4 ? HEIGHT / 2 : HEIGHT / 4; }

// Blocks of work that are worth a thread.
int64_t worth(int64_t products) { return std::max<int64_t>(1, (1 << 19) / std::max<int64_t>(1, products)); }

// The right operand of a product, [depth, columns]: as it lies, or in panels of WIDTH columns, each contiguous. Rows far apart share few places of a cache.
struct Right {
  Tensor held;
  int64_t depth, columns;
  bool panels;

  int64_t width(int64_t column) const { return std::min(WIDTH, columns - column); }
  int64_t row(int64_t column) const { return panels ? width(column) : columns; }
  const float* at(int64_t d, int64_t column) const { return held.const_data_ptr<float>() + (panels ? column * depth : column) + d * row(column); }
};

// The transpose of a matrix [columns, depth], in panels.
Right turned_panels(const Tensor& matrix) {
  const Right right{at::empty({matrix.numel()}, matrix.options()), matrix.size(1), matrix.size(0), true};
  const float* from = matrix.const_data_ptr<float>();
  float* to = right.held.mutable_data_ptr<float>();
  const int64_t depth = right.depth, columns = right.columns;
  at::parallel_for(0, (columns + WIDTH - 1) / WIDTH, std::max<int64_t>(1, 65536 / (WIDTH * depth + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * WIDTH; column < std::min(end * WIDTH, columns); column += WIDTH)
      turn_rows(from + column * depth, depth, to + column * depth, right.width(column), right.width(column), depth);
  });
  return right;
}

// out = a · b + bias, of which a call sums `most` products. `a` [rows, depth].
void multiply(const Tensor& a, const Right& b, const float* bias, int64_t most, const Tensor& out) {
  const int64_t rows = a.size(0), depth = b.depth, columns = b.columns;
  const int64_t row_blocks = (rows + HEIGHT - 1) / HEIGHT, column_blocks = (columns + WIDTH - 1) / WIDTH;
  const float* pa = a.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, row_blocks * column_blocks, worth(HEIGHT * depth * std::min(WIDTH, columns)), [&](int64_t begin, int64_t end) {
    std::vector<float> last_rows, block;
    for (int64_t at = begin; at < end; at++) {
      const int64_t row = at / column_blocks * HEIGHT, column = at % column_blocks * WIDTH;
      const int64_t height = std::min(HEIGHT, rows - row), full = filled_height(height), width = b.width(column);
      const float* from = pa + row * depth;
      float* sums = to + row * columns + column;
      int64_t sums_row = columns;
      if (height < full) {
        if (last_rows.empty()) {
          last_rows.resize(full * depth);
          std::copy(from, from + height * depth, last_rows.begin());
          block.resize(full * WIDTH);
        }
        from = last_rows.data(), sums = block.data(), sums_row = width;
      }
      for (int64_t d = 0; d < depth; d += most)
        call(full, width, std::min(most, depth - d), from + d, depth, b.at(d, column), b.row(column), sums, sums_row, d > 0);
      for (int64_t r = 0; r < height && (bias || height < full); r++)
        for (int64_t i = 0; i < width; i++) to[(row + r) * columns + column + i] = sums[r * sums_row + i] + (bias ? bias[column + i] : 0.0f);
    }
    at::native::cpublas::brgemm_release();
  });
}

// x · wᵀ + bias by the transposes of x and of the result: [rows, depth] and [columns, depth], of which the matrix is read once and as it lies.
void multiply_few(const Tensor& x, const Tensor& w, const float* bias, const Tensor& out) {
  const int64_t rows = x.size(0), depth = x.size(1), columns = w.size(0), lanes = padded(rows);
  const int64_t row_blocks = (columns + HEIGHT - 1) / HEIGHT, column_blocks = (lanes + WIDTH - 1) / WIDTH;
  const Tensor turned = transposed(x);
  const float *px = turned.const_data_ptr<float>(), *pw = w.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, row_blocks * column_blocks, worth(HEIGHT * depth * std::min(WIDTH, lanes)), [&](int64_t begin, int64_t end) {
    std::vector<float> sums(HEIGHT * WIDTH), part(depth > DEPTH ? HEIGHT * WIDTH : 0);
    for (int64_t at = begin; at < end; at++) {
      const int64_t row = at / column_blocks * HEIGHT, column = at % column_blocks * WIDTH;
      const int64_t height = std::min(HEIGHT, columns - row), width = std::min(WIDTH, lanes - column);
      for (int64_t d = 0; d < depth; d += DEPTH) {
        // Kernels that add to narrow blocks take twice as long.
        float* found = d == 0 ? sums.data() : part.data();
        call(height, width, std::min(DEPTH, depth - d), pw + row * depth + d, depth, px + d * lanes + column, lanes, found, width, false);
        for (int64_t i = 0; d > 0 && i < height * width; i++) sums[i] += part[i];
      }
      for (int64_t r = 0; bias && r < height; r++)
        for (int64_t i = 0; i < width; i++) sums[r * width + i] += bias[row + r];
      turn_rows(sums.data(), width, to + column * columns + row, columns, height, std::min(width, rows - column));
    }
    at::native::cpublas::brgemm_release();
  });
}

// aᵀ · b: [depth, rows] and [depth, columns].
Tensor multiply_transposed(const Tensor& a, const Tensor& b) {
  const int64_t depth = a.size(0), rows = a.size(1), columns = b.size(1), whole = depth / TURNED_DEPTH * TURNED_DEPTH;
  const int64_t rest = depth - whole, filled = (rest + STEP - 1) / STEP * STEP, all = whole + filled;
  const int64_t tall = rows < 2 * HEIGHT * at::get_num_threads() ? HEIGHT / 2 : HEIGHT;
  Tensor out = at::empty({rows, columns}, a.options());
  // The last rows of b, filled up.
  const Tensor ends = at::constant_pad_nd(b.narrow(0, whole, rest), {0, 0, 0, filled - rest});
  const float *pa = a.const_data_ptr<float>(), *pb = b.const_data_ptr<float>(), *pe = ends.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, (rows + tall - 1) / tall, worth(tall * depth * columns), [&](int64_t begin, int64_t end) {
    std::vector<float> turned(tall * TURNED_DEPTH), block(tall * columns);
    for (int64_t at = begin; at < end; at++) {
      const int64_t row = at * tall, height = std::min(tall, rows - row);
      float* sums = height < tall ? block.data() : to + row * columns;
      for (int64_t d = 0; d < all; d += TURNED_DEPTH) {
        const int64_t count = std::min(TURNED_DEPTH, depth - d), len = std::min(TURNED_DEPTH, all - d);
        if (count < len || height < tall) std::fill(turned.begin(), turned.end(), 0.0f);
        turn_rows(pa + d * rows + row, rows, turned.data(), len, count, height);
        const float* from = d < whole ? pb + d * columns : pe;
        for (int64_t column = 0; column < columns; column += WIDTH)
          call(tall, std::min(WIDTH, columns - column), len, turned.data(), len, from + column, columns, sums + column, columns, d > 0);
      }
      if (height < tall) std::copy(block.begin(), block.begin() + height * columns, to + row * columns);
    }
    at::native::cpublas::brgemm_release();
  });
  return out;
}

// a · b, where `a` may be the transpose of a matrix.
Tensor product(const Tensor& a, const Tensor& b) {
  const bool turned = !a.is_contiguous() && a.t().is_contiguous();
  if (rollflow_has_fast_library() || a.size(0) * a.size(1) * b.size(1) < OPERATIONS || a.size(0) < (turned ? FEWEST : HEIGHT)) return a.mm(b);
  if (turned) return multiply_transposed(a.t(), b.contiguous());
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  multiply(a.contiguous(), {b.contiguous(), b.size(0), b.size(1), false}, nullptr, ACROSS_DEPTH, out);
  return out;
}

// x · wᵀ + bias, without gradients.
Tensor projection(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), depth = x.size(1), columns = w.size(0);
  const Tensor added = bias.has_value() ? bias->contiguous() : Tensor();
  const float* by = added.defined() ? added.const_data_ptr<float>() : nullptr;
  Tensor out = at::empty({rows, columns}, x.options());
  // Whichever transposes fewer numbers.
  if (rows * (depth + columns) < depth * columns || rows < HEIGHT)
    multiply_few(x, w, by, out);
  else
    multiply(x, turned_panels(w), by, DEPTH, out);
  return out;
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
    // A weight that isn't trained needs no inputs.
    ctx->save_for_backward({w.requires_grad() ? x : Tensor(), w});
    ctx->saved_data["biased"] = bias.has_value();
    return projection(x, w, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor dy = grads[0].contiguous();
    Tensor dx, dw, db;
    if (ctx->needs_input_grad(0)) dx = product(dy, saved[1]);
    if (ctx->needs_input_grad(1)) dw = product(dy.t(), saved[0]);
    if (ctx->saved_data["biased"].toBool() && ctx->needs_input_grad(2)) db = dy.sum(0);
    return {dx, dw, db};
  }
};

}  // namespace

extern "C" {

// True on processors for which the kernels are compiled.
bool rollflow_products_supported() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("x86-64-v3");
#else
  return false;
#endif
}

// x · weightᵀ + bias: [rows, depth] and [columns, depth], contiguous.
char* rollflow_linear(Tensor** out, Tensor* x, Tensor* weight, Tensor* bias) {
  return guarded(out, [&] {
    const std::optional<Tensor> added = bias ? std::optional<Tensor>(*bias) : std::nullopt;
    return at::GradMode::is_enabled() ? Linear::apply(*x, *weight, added) : projection(*x, *weight, added);
  });
}

// The panels of a weight, for rollflow_linear_by_panels.
char* rollflow_panels(Tensor** out, Tensor* weight) {
  return guarded(out, [&] { return turned_panels(*weight).held; });
}

// x · weightᵀ + bias by the weight's panels, without gradients.
char* rollflow_linear_by_panels(Tensor** out, Tensor* x, Tensor* panels, int64_t columns, Tensor* bias) {
  return guarded(out, [&] {
    const Tensor added = bias ? bias->contiguous() : Tensor();
    Tensor product = at::empty({x->size(0), columns}, x->options());
    multiply(*x, {*panels, x->size(1), columns, true}, added.defined() ? added.const_data_ptr<float>() : nullptr, DEPTH, product);
    return product;
  });
}

// a · b, without gradients.
char* rollflow_product(Tensor** out, Tensor* a, Tensor* b) {
  return guarded(out, [&] { return product(*a, *b); });
}
}
