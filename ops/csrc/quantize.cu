// Rows of bf16 -> e4m3 with a scale per 1x128, and RMSNorm with or without that. One CTA per row (or
// part of one, without the norm); a thread holds 8 values, 16 threads a group of 128.
//
// Defines: ITEMS (groups of 8 values a thread holds; only for the norms).

#include "common.cuh"

#ifndef ITEMS
#define ITEMS 1
#endif

namespace {

struct alignas(16) Bf16x8 {
  __nv_bfloat162 pairs[4];
};

DEVICE void unpack(float (&out)[8], const Bf16x8& in) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(in.pairs[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

// Quantises the 128 values of 16 neighbouring threads, all of which call this; the values of threads
// past the row's end are zeros. Same operations as the definition, one rounding each.
DEVICE void quantize_group(const float (&x)[8], u8* out, float* scale, bool is_inside) {
  float amax = 1e-10f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  const float factor = 448.f / amax;
  u32 packed[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto low = __nv_cvt_float2_to_fp8x2({x[4 * i] * factor, x[4 * i + 1] * factor},
                                              __NV_SATFINITE, __NV_E4M3);
    const auto high = __nv_cvt_float2_to_fp8x2({x[4 * i + 2] * factor, x[4 * i + 3] * factor},
                                               __NV_SATFINITE, __NV_E4M3);
    packed[i] = static_cast<u32>(low) | static_cast<u32>(high) << 16;
  }
  if (!is_inside) return;
  *reinterpret_cast<uint2*>(out) = {packed[0], packed[1]};
  if (threadIdx.x % 16 == 0) *scale = 1.f / factor;
}

// The scales behind the last row, up to a multiple of four, are zeros: the last row's CTA writes them.
DEVICE void pad_scales(float* scales, int num_blocks, int num_rows, int stride) {
  if (static_cast<int>(blockIdx.x) != num_rows - 1) return;
  const int padding = stride - num_rows;
  for (int i = threadIdx.x; i < num_blocks * padding; i += blockDim.x)
    scales[static_cast<i64>(i / padding) * stride + num_rows + i % padding] = 0.f;
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
template <bool kQuantises>
DEVICE void rms_norm(const bf16* x, const bf16* weight, void* out, float* scales, float eps,
                     int num_rows, int num_columns, int scale_stride) {
  const int row = blockIdx.x;
  Bf16x8 weights[ITEMS], inputs[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * 8;
    if (column < num_columns) weights[item] = *reinterpret_cast<const Bf16x8*>(weight + column);
  }
  let_next_kernel_start();
  wait_for_previous_kernels();
  float values[ITEMS][8], sum = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * 8;
    inputs[item] = {};
    if (column < num_columns)
      inputs[item] = *reinterpret_cast<const Bf16x8*>(x + static_cast<i64>(row) * num_columns + column);
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
    const i64 index = static_cast<i64>(row) * num_columns + column;
    Bf16x8 result = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 normed =
          __floats2bfloat162_rn(values[item][2 * i] * factor, values[item][2 * i + 1] * factor);
      if (is_inside) result.pairs[i] = __hmul2_rn(normed, weights[item].pairs[i]);
    }
    if constexpr (kQuantises) {
      float rounded[8];
      unpack(rounded, result);
      quantize_group(rounded, static_cast<u8*>(out) + index,
                     scales + static_cast<i64>(column / 128) * scale_stride + row, is_inside);
    } else if (is_inside) {
      *reinterpret_cast<Bf16x8*>(static_cast<bf16*>(out) + index) = result;
    }
  }
  if (kQuantises) pad_scales(scales, (num_columns + 127) / 128, num_rows, scale_stride);
}

}  // namespace

extern "C" __global__ void rms_norm_bf16(const bf16* x, const bf16* weight, void* out, float* scales,
                                         float eps, int num_rows, int num_columns, int scale_stride) {
  rms_norm<false>(x, weight, out, scales, eps, num_rows, num_columns, scale_stride);
}

extern "C" __global__ void rms_norm_bsfp8(const bf16* x, const bf16* weight, void* out, float* scales,
                                          float eps, int num_rows, int num_columns, int scale_stride) {
  rms_norm<true>(x, weight, out, scales, eps, num_rows, num_columns, scale_stride);
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
  quantize_group(values, out + index, scales + static_cast<i64>(column / 128) * scale_stride + row,
                 is_inside);
  if (blockIdx.y == 0) pad_scales(scales, (num_columns + 127) / 128, num_rows, scale_stride);
}
