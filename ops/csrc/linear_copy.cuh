// The right operand of linear.cu from a few rows that are what the products take: every CTA loads its
// part itself, which is sooner there than through the copy engine.
#pragma once

#include "linear_shape.cuh"

namespace {

struct RowInput {
  const u8* x;          // [num_rows, row_bytes]
  const float* scales;  // [K / 128, scale_stride] or null
  int row_bytes, scale_stride;
};

// See linear_norm.cuh.
DEVICE void make_rows(u8* operand, float* scales, float*, const RowInput& in, int begin, int end,
                           int thread) {
  const int chunks = (end - begin) * 8;  // of 16 bytes
  uint4 values[OWN_ROWS][ITEMS] = {};
  float scale[OWN_ROWS] = {};
  wait_for_previous_kernels();
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int chunk = item * kConsumers + thread, byte = begin * 128 + chunk * 16;
      if (chunk < chunks && byte < in.row_bytes)
        values[row][item] =
            *reinterpret_cast<const uint4*>(in.x + static_cast<i64>(row) * in.row_bytes + byte);
    }
    if (IS_FP8 && thread < end - begin) scale[row] = in.scales[(begin + thread) * in.scale_stride + row];
  }
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int chunk = item * kConsumers + thread;
      if (chunk < chunks)
        *reinterpret_cast<uint4*>(operand + chunk / 8 * kActBytes + row * 128 + (chunk % 8 ^ row) * 16) =
            values[row][item];
    }
    if (IS_FP8 && thread < end - begin) scales[thread * COLS + row] = scale[row];
  }
  fence_async_proxy();
}

}  // namespace
