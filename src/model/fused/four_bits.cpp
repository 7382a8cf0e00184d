// Numbers in 4 bits on a CPU: two a byte, a scale for each block of them, and one for `outer_block` scales.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;

template <typename T>
void write_blocks(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t block, int64_t outer_block, float offset, const Tensor& out) {
  const uint8_t *from = codes.const_data_ptr<uint8_t>(), *scale = scales.const_data_ptr<uint8_t>();
  const float *above = outer.const_data_ptr<float>(), *levels = tables.const_data_ptr<float>();
  T* to = static_cast<T*>(out.data_ptr());
  const int64_t len = out.numel();
  at::parallel_for(0, (len + block - 1) / block, grain(256), [&](int64_t b, int64_t e) {
    for (int64_t at = b; at < e; at++) {
      const float of_block = levels[16 + scale[at]] * above[at / outer_block] + offset;
      for (int64_t i = block * at; i < std::min(block * at + block, len); i++)
        to[i] = static_cast<T>(levels[i % 2 ? from[i / 2] & 15 : from[i / 2] >> 4] * of_block);
    }
  });
}

void four_bits(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t block, int64_t outer_block, float offset, const Tensor& out) {
  TORCH_CHECK(block > 0 && outer_block > 0, "numbers in 4 bits: blocks of ", block, " and ", outer_block);
  const int64_t len = out.numel(), blocks = (len + block - 1) / block;
  TORCH_CHECK(out.is_contiguous() && codes.numel() == (len + 1) / 2 && scales.numel() == blocks && outer.numel() == (blocks + outer_block - 1) / outer_block &&
                  tables.numel() == 272, "numbers in 4 bits: codes, scales and levels of ", len, " numbers");
  if (out.scalar_type() == at::kBFloat16) return write_blocks<at::BFloat16>(codes, scales, outer, tables, block, outer_block, offset, out);
  if (out.scalar_type() == at::kHalf) return write_blocks<at::Half>(codes, scales, outer, tables, block, outer_block, offset, out);
  write_blocks<float>(codes, scales, outer, tables, block, outer_block, offset, out);
}

// Codes of blocks of `block` numbers: how many of the 15 `middles` between levels are less than a number's share of its block's largest magnitude.
void codes_of(const Tensor& numbers, const Tensor& middles, int64_t block, const Tensor& codes, const Tensor& scales) {
  const int64_t len = numbers.numel(), blocks = scales.numel();
  TORCH_CHECK(block > 0 && block % 2 == 0 && block <= 64 && blocks == (len + block - 1) / block && codes.numel() == (len + 1) / 2 && middles.numel() == 15 && numbers.is_contiguous(),
              "codes of ", len, " numbers in blocks of ", block);
  const float *from = numbers.const_data_ptr<float>(), *edges = middles.const_data_ptr<float>();
  uint8_t* to = codes.data_ptr<uint8_t>();
  float* largest = scales.data_ptr<float>();
  at::parallel_for(0, blocks, grain(1024), [&](int64_t b, int64_t e) {
    for (int64_t at = b; at < e; at++) {
      const int64_t first = block * at, count = std::min(block, len - first);
      float most = 0.0f, share[64] = {};
      for (int64_t i = 0; i < count; i++) most = std::max(most, std::abs(from[first + i]));
      largest[at] = most;
      const float by = std::max(most, std::numeric_limits<float>::min());
      for (int64_t i = 0; i < count; i++) share[i] = from[first + i] / by;
      int32_t code[64] = {};
      for (int edge = 0; edge < 15; edge++)
        for (int64_t i = 0; i < 64; i++) code[i] += share[i] > edges[edge];
      for (int64_t i = 0; i < count; i += 2) to[(first + i) / 2] = static_cast<uint8_t>(code[i] << 4 | code[i + 1]);
    }
  });
}

}  // namespace

extern "C" {

char* rollflow_codes(Tensor* numbers, Tensor* middles, int64_t block, Tensor* codes, Tensor* scales) {
  return guarded([&] { codes_of(*numbers, *middles, block, *codes, *scales); });
}

char* rollflow_four_bits(Tensor* codes, Tensor* scales, Tensor* outer, Tensor* tables, int64_t block, int64_t outer_block, double offset, Tensor* out) {
  return guarded([&] { four_bits(*codes, *scales, *outer, *tables, block, outer_block, static_cast<float>(offset), *out); });
}
}
