// Numbers in 4 bits on a CPU: two a byte, blocks of 64 with a scale each, and of `outer_block` scales.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "guarded.hpp"
#include "vectors.hpp"

namespace {

using at::Tensor;

template <typename T>
void nf4_blocks(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t outer_block, float offset, const Tensor& out) {
  const uint8_t *from = codes.const_data_ptr<uint8_t>(), *scale = scales.const_data_ptr<uint8_t>();
  const float *above = outer.const_data_ptr<float>(), *levels = tables.const_data_ptr<float>();
  T* to = static_cast<T*>(out.data_ptr());
  const int64_t len = out.numel();
  at::parallel_for(0, (len + 63) / 64, grain(256), [&](int64_t b, int64_t e) {
    for (int64_t block = b; block < e; block++) {
      const float of_block = levels[16 + scale[block]] * above[block / outer_block] + offset;
      for (int64_t i = 64 * block; i < std::min(64 * block + 64, len); i++)
        to[i] = static_cast<T>(levels[i % 2 ? from[i / 2] & 15 : from[i / 2] >> 4] * of_block);
    }
  });
}

void nf4(const Tensor& codes, const Tensor& scales, const Tensor& outer, const Tensor& tables, int64_t outer_block, float offset, const Tensor& out) {
  const int64_t len = out.numel(), blocks = (len + 63) / 64;
  TORCH_CHECK(out.is_contiguous() && codes.numel() == (len + 1) / 2 && scales.numel() == blocks && outer_block > 0 && outer.numel() == (blocks + outer_block - 1) / outer_block &&
                  tables.numel() == 272, "numbers in 4 bits: codes, scales and levels of ", len, " numbers");
  if (out.scalar_type() == at::kBFloat16) return nf4_blocks<at::BFloat16>(codes, scales, outer, tables, outer_block, offset, out);
  if (out.scalar_type() == at::kHalf) return nf4_blocks<at::Half>(codes, scales, outer, tables, outer_block, offset, out);
  nf4_blocks<float>(codes, scales, outer, tables, outer_block, offset, out);
}

}  // namespace

extern "C" {

char* rollflow_nf4(Tensor* codes, Tensor* scales, Tensor* outer, Tensor* tables, int64_t outer_block, double offset, Tensor* out) {
  return guarded([&] { nf4(*codes, *scales, *outer, *tables, outer_block, static_cast<float>(offset), *out); });
}
}
