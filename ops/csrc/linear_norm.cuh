// The right operand of linear.cu from rows that are not normalised yet: every CTA does RMSNorm (and
// the quantising) of up to NORM rows itself, which saves a launch when rows are few.
#pragma once

#include "linear_shape.cuh"
#include "quantize.cuh"

namespace {

struct NormInput {
  const bf16* x;       // [num_rows, num_columns]
  const bf16* weight;  // [num_columns]
  float eps;
  int num_rows, num_columns;
};

#if NORM

DEVICE Bf16x8 load_values(const NormInput& in, int row, int column) {
  if (column >= in.num_columns || row >= in.num_rows) return {};
  return *reinterpret_cast<const Bf16x8*>(
      in.x + row * in.num_columns + column);
}

// Writes blocks [begin, end) of 128 bytes of K into `operand`, COLS rows x 128 bytes each and swizzled,
// and their scales [block][COLS]. All consumers call this; what it wrote is theirs to multiply after.
DEVICE void normalize_rows(u8* operand, float* scales, float* sums, const NormInput& in, int begin,
                           int end, int thread) {
  constexpr int kWarps = kConsumers / 32, kPerBlock = IS_FP8 ? 128 : 64;
  Bf16x8 weights[ITEMS] = {}, inputs[NORM][ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * kConsumers + thread) * 8;
    if (column < in.num_columns) weights[item] = *reinterpret_cast<const Bf16x8*>(in.weight + column);
  }
  wait_for_previous_kernels();
#pragma unroll
  for (int row = 0; row < NORM; ++row)
#pragma unroll
    for (int item = 0; item < ITEMS; ++item)
      inputs[row][item] = load_values(in, row, (item * kConsumers + thread) * 8);
#pragma unroll
  for (int row = 0; row < NORM; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      float values[8];
      unpack(values, inputs[row][item]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) sums[row * kWarps + thread / 32] = sum;
  }
  consumers_sync();
#pragma unroll
  for (int row = 0; row < NORM; ++row) {
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += sums[row * kWarps + warp];
    const float factor = rsqrtf(total / in.num_columns + in.eps);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int column = (item * kConsumers + thread) * 8;
      const int block = column / kPerBlock;
      const int byte = column % kPerBlock * (IS_FP8 ? 1 : 2);
      const int offset = (block - begin) * kActBytes + row * 128 + (byte / 16 ^ row) * 16 + byte % 16;
      const bool is_mine = block >= begin && block < end;
      if (!__any_sync(~0u, is_mine)) continue;
      float values[8];
      unpack(values, inputs[row][item]);
      const Bf16x8 normed = scale_rounded(values, factor, weights[item]);
      if constexpr (IS_FP8) {
        unpack(values, normed);
        const Quantised group = quantize_group(values);
        if (is_mine) *reinterpret_cast<uint2*>(operand + offset) = group.values;
        if (is_mine && byte == 0) scales[(block - begin) * COLS + row] = group.scale;
      } else if (is_mine) {
        *reinterpret_cast<Bf16x8*>(operand + offset) = normed;
      }
    }
  }
  fence_async_proxy();
  consumers_sync();
}

#endif

}  // namespace
