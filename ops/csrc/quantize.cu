// Rows of bf16 -> e4m3 with a scale per 1x128, and RMSNorm with or without that. One CTA per row (or
// part of one, without the norm); a thread holds 8 values, 16 threads a group of 128.
//
// Defines: ITEMS (groups of 8 values a thread holds; only for the norms).

#include "quantize.cuh"

#ifndef ITEMS
#define ITEMS 1
#endif

namespace {

constexpr int kMostThreads = 512;

// The scales behind the last row, up to a multiple of four, are zeros: the last row's CTA writes them.
DEVICE void pad_scales(float* scales, int num_blocks, int num_rows, int stride) {
  if (static_cast<int>(blockIdx.x) != num_rows - 1) return;
  const int padding = stride - num_rows;
  for (int i = threadIdx.x; i < num_blocks * padding; i += blockDim.x)
    scales[static_cast<i64>(i / padding) * stride + num_rows + i % padding] = 0.f;
}

// The values of threads past the row's end are zeros. Returns the scale.
DEVICE float quantize_and_store(const float (&x)[8], u8* out, bool is_inside) {
  const Quantised group = quantize_group(x);
  if (is_inside) *reinterpret_cast<uint2*>(out) = group.values;
  return group.scale;
}

// bf16: normalised in fp32, rounded, then scaled by the weight and rounded again. Else the row times the
// weight is quantised as it is, and its norm is in the scales, so that few rows get the bits that many get
// from a linear (linear_wide_norm.cuh).
//   row_stride: from a row of x to the next.
template <bool kQuantises>
DEVICE void rms_norm(const bf16* x, const bf16* weight, void* out, float* scales, float eps,
                     int num_rows, int num_columns, int row_stride, int scale_stride) {
  __shared__ float sums[ITEMS * kMostThreads / 16];  // of squares, by groups of 128
  let_next_kernel_start();
  x += static_cast<i64>(blockIdx.x) * row_stride;
  const i64 start = static_cast<i64>(blockIdx.x) * num_columns;
  const auto column_of = [](int item) { return (item * blockDim.x + threadIdx.x) * 8; };
  Bf16x8 weights[ITEMS] = {}, inputs[ITEMS] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (column_of(item) < num_columns)
      weights[item] = *reinterpret_cast<const Bf16x8*>(weight + column_of(item));
  wait_for_previous_kernels();
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (column_of(item) < num_columns)
      inputs[item] = *reinterpret_cast<const Bf16x8*>(x + column_of(item));
  float values[ITEMS][8], group_scales[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    float(&v)[8] = values[item];
    unpack(v, inputs[item]);
    float squares = sum_of_squares({v[0], v[1], v[2], v[3]}) + sum_of_squares({v[4], v[5], v[6], v[7]});
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    if (threadIdx.x % 16 == 0) sums[column_of(item) / 128] = squares;
    if constexpr (kQuantises) {
      float factors[8];
      unpack(factors, weights[item]);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] *= factors[i];  // exact
      group_scales[item] = quantize_and_store(v, static_cast<u8*>(out) + start + column_of(item),
                                              column_of(item) < num_columns);
    }
  }
  __syncthreads();
  const float part = sum_of_every_fourth(sums, ITEMS * blockDim.x / 16, 1, threadIdx.x % 32);
  const float factor = inverse_rms(part, num_columns, eps);
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    if (column_of(item) >= num_columns) break;
    if constexpr (!kQuantises)
      *reinterpret_cast<Bf16x8*>(static_cast<bf16*>(out) + start + column_of(item)) =
          scale_rounded(values[item], factor, weights[item]);
    else if (threadIdx.x % 16 == 0)
      scales[static_cast<i64>(column_of(item) / 128) * scale_stride + blockIdx.x] = group_scales[item] * factor;
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
  const float scale = quantize_and_store(values, out + index, is_inside);
  if (is_inside && threadIdx.x % 16 == 0) scales[static_cast<i64>(column / 128) * scale_stride + row] = scale;
  if (blockIdx.y == 0) pad_scales(scales, (num_columns + 127) / 128, num_rows, scale_stride);
}
