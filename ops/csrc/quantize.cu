// Rows of bf16 -> e4m3 with a scale per 1x128, and RMSNorm with or without that. One CTA per row (or
// part of one, without the norm); a thread holds 8 values, 16 threads a group of 128.
//
// Defines: ITEMS (groups of 8 values a thread holds; only for the norms).

#include "quantize.cuh"

#ifndef ITEMS
#define ITEMS 1
#endif

namespace {

// The scales behind the last row, up to a multiple of four, are zeros: the last row's CTA writes them.
DEVICE void pad_scales(float* scales, int num_blocks, int num_rows, int stride) {
  if (static_cast<int>(blockIdx.x) != num_rows - 1) return;
  const int padding = stride - num_rows;
  for (int i = threadIdx.x; i < num_blocks * padding; i += blockDim.x)
    scales[static_cast<i64>(i / padding) * stride + num_rows + i % padding] = 0.f;
}

// The values of threads past the row's end are zeros.
DEVICE void quantize_and_store(const float (&x)[8], u8* out, float* scale, bool is_inside) {
  const Quantised group = quantize_group(x);
  if (!is_inside) return;
  *reinterpret_cast<uint2*>(out) = group.values;
  if (threadIdx.x % 16 == 0) *scale = group.scale;
}

DEVICE float block_sum(float value) {
  __shared__ float sums[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < blockDim.x / 32; ++i) total += sums[i];
  return total;
}

// Normalised in fp32, rounded, then scaled by the weight and rounded again.
//   row_stride: from a row of x to the next.
template <bool kQuantises>
DEVICE void rms_norm(const bf16* x, const bf16* weight, void* out, float* scales, float eps,
                     int num_rows, int num_columns, int row_stride, int scale_stride) {
  let_next_kernel_start();
  x += static_cast<i64>(blockIdx.x) * row_stride;
  const i64 start = static_cast<i64>(blockIdx.x) * num_columns;
  Bf16x8 weights[ITEMS] = {}, inputs[ITEMS] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * 8;
    if (column < num_columns) weights[item] = *reinterpret_cast<const Bf16x8*>(weight + column);
  }
  wait_for_previous_kernels();
  float values[ITEMS][8], sum = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * 8;
    if (column < num_columns) inputs[item] = *reinterpret_cast<const Bf16x8*>(x + column);
  }
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    unpack(values[item], inputs[item]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[item][i] * values[item][i];
  }
  const float factor = rsqrtf(block_sum(sum) / num_columns + eps);
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * 8;
    const bool is_inside = column < num_columns;
    const Bf16x8 result = scale_rounded(values[item], factor, weights[item]);
    if constexpr (kQuantises) {
      float rounded[8];
      unpack(rounded, result);
      float* scale = scales + static_cast<i64>(column / 128) * scale_stride + blockIdx.x;
      quantize_and_store(rounded, static_cast<u8*>(out) + start + column, scale, is_inside);
    } else if (is_inside) {
      *reinterpret_cast<Bf16x8*>(static_cast<bf16*>(out) + start + column) = result;
    }
  }
  if (kQuantises) pad_scales(scales, (num_columns + 127) / 128, num_rows, scale_stride);
}

}  // namespace

extern "C" __global__ void rms_norm_bf16(const bf16* x, const bf16* weight, void* out, float* scales,
                                         float eps, int num_rows, int num_columns, int row_stride,
                                         int scale_stride) {
  rms_norm<false>(x, weight, out, scales, eps, num_rows, num_columns, row_stride, scale_stride);
}

extern "C" __global__ void rms_norm_bsfp8(const bf16* x, const bf16* weight, void* out, float* scales,
                                          float eps, int num_rows, int num_columns, int row_stride,
                                          int scale_stride) {
  rms_norm<true>(x, weight, out, scales, eps, num_rows, num_columns, row_stride, scale_stride);
}

// Grid (rows, parts of a row).
extern "C" __global__ void quantize_rows(const bf16* x, u8* out, float* scales, int num_rows,
                                         int num_columns, int scale_stride) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int row = blockIdx.x;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  const bool is_inside = column < num_columns;
  const i64 index = static_cast<i64>(row) * num_columns + column;
  Bf16x8 input = {};
  if (is_inside) input = *reinterpret_cast<const Bf16x8*>(x + index);
  float values[8];
  unpack(values, input);
  quantize_and_store(values, out + index,
                     scales + static_cast<i64>(column / 128) * scale_stride + row, is_inside);
  if (blockIdx.y == 0) pad_scales(scales, (num_columns + 127) / 128, num_rows, scale_stride);
}
