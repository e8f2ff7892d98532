// The right operand of linear.cu when rows are few: all blocks of K at once, written by the consumers
// themselves. Either the rows as they are (DIRECT), which takes less time than the copy engine, or, with
// NORM, from rows that are not normalised yet: every CTA does RMSNorm (and the quantising) of up to
// NORM rows, which saves a launch.
#pragma once

#include "linear_shape.cuh"
#include "quantize.cuh"

namespace {

// Byte of `row` in the right operand, `byte` counted from the first block of K of this CTA.
DEVICE int operand_offset(int byte, int row, int num_rows) {
  if (kIsInterleaved) return (byte / 16 * num_rows + row) * 16 + byte % 16;
  return byte / 128 * kActBytes + row * 128 + (byte % 128 / 16 ^ row % 8) * 16 + byte % 16;
}

struct Rows {
  const void* x;       // [num_rows, num_columns]: bf16 with NORM, else as the weights
  const bf16* weight;  // [num_columns] of the norm
  float eps;
  int num_rows, num_columns;
};

DEVICE int padded_shift(int num_rows) { return 32 - __clz(num_rows - 1); }  // log2, rounded up

#if NORM

DEVICE Bf16x8 load_values(const Rows& in, int row, int column) {
  if (column >= in.num_columns || row >= in.num_rows) return {};
  return *reinterpret_cast<const Bf16x8*>(
      static_cast<const bf16*>(in.x) + row * in.num_columns + column);
}

// Writes blocks [begin, end) of 128 bytes of K into `operand`, NORM rows, and their scales
// [block][COLS]. All consumers call this; what it wrote is theirs to multiply after.
DEVICE void normalize_rows(u8* operand, float* scales, float* sums, const Rows& in, int begin,
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
      const int byte = (column - begin * kPerBlock) * (IS_FP8 ? 1 : 2);
      const int offset = operand_offset(byte, row, NORM);
      const bool is_mine = block >= begin && block < end;
      if (!__any_sync(~0u, is_mine)) continue;
      float values[8];
      unpack(values, inputs[row][item]);
      const Bf16x8 normed = scale_rounded(values, factor, weights[item]);
      if constexpr (IS_FP8) {
        unpack(values, normed);
        const Quantised group = quantize_group(values);
        if (is_mine) *reinterpret_cast<uint2*>(operand + offset) = group.values;
        if (is_mine && byte % 128 == 0) scales[(block - begin) * COLS + row] = group.scale;
      } else if (is_mine) {
        *reinterpret_cast<Bf16x8*>(operand + offset) = normed;
      }
    }
  }
  fence_async_proxy();
  consumers_sync();
}

#elif DIRECT

// Writes blocks [begin, end) of 128 bytes of K into `operand`, the rows padded to a power of two, and
// their scales [block][COLS]; zeros behind K. All consumers call this.
DEVICE void load_rows(u8* operand, float* scales, const float* act_scales, int scale_stride,
                      const Rows& in, int begin, int end, int thread) {
  constexpr int kInFlight = 4;
  const int shift = padded_shift(in.num_rows), padded_rows = 1 << shift;
  const int row_bytes = in.num_columns * (IS_FP8 ? 1 : 2);
  const int num_chunks = (end - begin) * padded_rows * 8;
  wait_for_previous_kernels();
  for (int first = thread; first < num_chunks; first += kInFlight * kConsumers) {
    uint4 chunks[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = first + i * kConsumers, row = index / 8 & padded_rows - 1;
      const int byte = (begin + (index / 8 >> shift)) * 128 + index % 8 * 16;
      if (index < num_chunks && row < in.num_rows && byte < row_bytes)
        chunks[i] = *reinterpret_cast<const uint4*>(static_cast<const u8*>(in.x) + row * row_bytes + byte);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = first + i * kConsumers, row = index / 8 & padded_rows - 1;
      const int offset = operand_offset((index / 8 >> shift) * 128 + index % 8 * 16, row, padded_rows);
      if (index < num_chunks) *reinterpret_cast<uint4*>(operand + offset) = chunks[i];
    }
  }
  if (IS_FP8)
    for (int i = thread; i < (end - begin) << shift; i += kConsumers) {
      const int row = i & padded_rows - 1, block = i >> shift;
      if (row < in.num_rows)
        scales[block * COLS + row] = act_scales[static_cast<i64>(begin + block) * scale_stride + row];
    }
  fence_async_proxy();
  consumers_sync();
}

#endif

}  // namespace
