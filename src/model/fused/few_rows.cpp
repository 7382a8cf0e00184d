// Products of few rows with a matrix on a CPU: a step of decoding multiplies each matrix with one row for each sequence.
//
// Libraries rearrange the matrix for each product, which takes half as long as the product itself for 32 rows. Here the rows are rearranged, and the matrix is
// read once and as it is: lanes of a vector are rows. Each number of a result is one sum in the order of the depth, so that it does not depend on the
// number of rows or threads. f32, contiguous, without gradients; half.rs checks that, and its tests compare with f64.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "guarded.hpp"

namespace {

using at::Tensor;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR(cpu) __attribute__((target("arch=" cpu)))
#define WITH_VECTORS
#else
#define FOR(cpu)
#endif

// Floats of a cache line: those of the next rows are fetched while these are computed.
constexpr int64_t LINE = 16;
// Depth of which rows are rearranged at a time.
constexpr int64_t STRIP = 64;

// `V` vectors of `L` lanes, one lane a row of x, times `R` rows of the matrix: out[r * stride + lane]. x: [depth, V * L].
#define KERNEL(name, cpu, L, V, R)                                                                                       \
  FOR(cpu) void name(const float* x, const float* const* rows, int64_t depth, float* out) {                             \
    typedef float Vector __attribute__((vector_size(4 * L), aligned(4)));                                                \
    Vector sums[R][V] = {};                                                                                              \
    for (int64_t k = 0; k < depth; k++) {                                                                                \
      Vector of_x[V];                                                                                                    \
      _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) of_x[v] = reinterpret_cast<const Vector*>(x + k * V * L)[v];   \
      if (k % LINE == 0) {                                                                                               \
        _Pragma("GCC unroll 24") for (int r = 0; r < R; r++) __builtin_prefetch(rows[r] + R * depth + k);                \
      }                                                                                                                  \
      _Pragma("GCC unroll 24") for (int r = 0; r < R; r++) {                                                             \
        const float w = rows[r][k];                                                                                      \
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sums[r][v] += of_x[v] * w;                                   \
      }                                                                                                                  \
    }                                                                                                                    \
    _Pragma("GCC unroll 24") for (int r = 0; r < R; r++) {                                                               \
      _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) reinterpret_cast<Vector*>(out + r * V * L)[v] = sums[r][v];    \
    }                                                                                                                    \
  }

using Kernel = void (*)(const float*, const float* const*, int64_t, float*);

// Registers hold all sums: 32 of AVX-512, 16 of AVX2.
KERNEL(wide_v4, "x86-64-v4", 16, 2, 12)
KERNEL(narrow_v4, "x86-64-v4", 16, 1, 12)
KERNEL(wide_v3, "x86-64-v3", 8, 2, 6)
KERNEL(narrow_v3, "x86-64-v3", 8, 1, 6)

struct Kernels {
  Kernel wide, narrow;
  // Rows of x of `wide`, and of the matrix.
  int64_t lanes, rows;
};

// For so many rows. Null functions where there are no such vectors.
Kernels kernels(int64_t count) {
#ifdef WITH_VECTORS
  if (count > 8 && __builtin_cpu_supports("x86-64-v4")) return {wide_v4, narrow_v4, 32, 12};
  if (__builtin_cpu_supports("x86-64-v3")) return {wide_v3, narrow_v3, 16, 6};
#endif
  return {nullptr, nullptr, 0, 0};
}

// Rows of x in blocks of [depth, lanes], the last of which may be half as wide; missing rows are 0.
struct Panels {
  std::vector<float> numbers;
  std::vector<int64_t> starts, lanes, firsts;
};

Panels panels(const float* x, int64_t count, int64_t depth, int64_t lanes) {
  Panels of;
  for (int64_t first = 0; first < count; first += lanes) {
    const int64_t width = count - first <= lanes / 2 ? lanes / 2 : lanes;
    of.starts.push_back(static_cast<int64_t>(of.numbers.size()));
    of.lanes.push_back(width);
    of.firsts.push_back(first);
    of.numbers.resize(of.numbers.size() + depth * width);
  }
  at::parallel_for(0, (depth + STRIP - 1) / STRIP, std::max<int64_t>(1, 32768 / (count * STRIP)), [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; strip++) {
      for (size_t at = 0; at < of.starts.size(); at++) {
        const int64_t first = of.firsts[at], width = of.lanes[at];
        float* to = of.numbers.data() + of.starts[at];
        for (int64_t row = 0; row < std::min(width, count - first); row++) {
          const float* from = x + (first + row) * depth;
          for (int64_t k = strip * STRIP; k < std::min(depth, (strip + 1) * STRIP); k++) to[k * width + row] = from[k];
        }
      }
    }
  });
  return of;
}

Tensor product(const Tensor& x, const Tensor& weight) {
  const int64_t count = x.size(0), depth = x.size(1), columns = weight.size(0);
  const Kernels by = kernels(count);
  Tensor out = at::empty({count, columns}, x.options());
  const Panels of = panels(x.const_data_ptr<float>(), count, depth, by.lanes);
  const float* matrix = weight.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t blocks = (columns + by.rows - 1) / by.rows;
  at::parallel_for(0, blocks, std::max<int64_t>(1, (1 << 18) / (count * depth * by.rows + 1)), [&](int64_t begin, int64_t end) {
    std::vector<const float*> rows(by.rows);
    std::vector<float> tile(by.rows * by.lanes);
    for (int64_t block = begin; block < end; block++) {
      const int64_t first = block * by.rows, valid = std::min(by.rows, columns - first);
      for (int64_t r = 0; r < by.rows; r++) rows[r] = matrix + std::min(first + r, columns - 1) * depth;
      for (size_t at = 0; at < of.starts.size(); at++) {
        const int64_t width = of.lanes[at], last = std::min(width, count - of.firsts[at]);
        (width == by.lanes ? by.wide : by.narrow)(of.numbers.data() + of.starts[at], rows.data(), depth, tile.data());
        for (int64_t row = 0; row < last; row++) {
          float* line = to + (of.firsts[at] + row) * columns + first;
          for (int64_t r = 0; r < valid; r++) line[r] = tile[r * width + row];
        }
      }
    }
  });
  return out;
}

}  // namespace

extern "C" {

bool rollflow_few_rows_supported() { return kernels(1).wide != nullptr; }

// x · weightᵀ: [rows, depth] and [columns, depth].
char* rollflow_few_rows(Tensor** out, Tensor* x, Tensor* weight) {
  return guarded(out, [&] { return product(*x, *weight); });
}
}
