// e4m3 with a scale per 128 values, in the definition's operations, one rounding each.
#pragma once

#include "common.cuh"

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

struct Quantised {
  uint2 values;  // 8 of e4m3
  float scale;
};

DEVICE u32 quantized_four(const float4& x, float factor) {
  const auto low = __nv_cvt_float2_to_fp8x2({x.x * factor, x.y * factor}, __NV_SATFINITE, __NV_E4M3);
  const auto high = __nv_cvt_float2_to_fp8x2({x.z * factor, x.w * factor}, __NV_SATFINITE, __NV_E4M3);
  return static_cast<u32>(low) | static_cast<u32>(high) << 16;
}

// Of the 128 values that 16 neighbouring threads hold; whole warps call this.
DEVICE Quantised quantize_group(const float (&x)[8]) {
  float amax = 1e-10f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  const float factor = 448.f / amax;
  return {{quantized_four({x[0], x[1], x[2], x[3]}, factor), quantized_four({x[4], x[5], x[6], x[7]}, factor)},
          1.f / factor};
}

// The sums of squares of RMSNorm are those of a tree over neighbours within 128 columns, then of every
// fourth of these groups, then of the four: the same bits wherever they are made. fp32 holds the square of
// a bf16 exactly.
DEVICE float sum_of_squares(const float4& x) { return (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w); }

// A lane's part of the sum over all columns, from those of `count` groups, `stride` apart.
DEVICE float sum_of_every_fourth(const float* groups, int count, int stride, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    if (i + lane % 4 >= count) break;
    sum += groups[(i + lane % 4) * stride];
  }
  return sum;
}

// 1 / rms; whole warps call this with their lanes' parts.
DEVICE float inverse_rms(float part, int num_columns, float eps) {
  part += __shfl_xor_sync(~0u, part, 1);
  part += __shfl_xor_sync(~0u, part, 2);
  return rsqrtf(__fadd_rn(__fmul_rn(part, 1.f / num_columns), eps));
}

// x * factor rounded to bf16, then times the weight, rounded.
DEVICE Bf16x8 scale_rounded(const float (&x)[8], float factor, const Bf16x8& weight) {
  Bf16x8 result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 normed = __floats2bfloat162_rn(x[2 * i] * factor, x[2 * i + 1] * factor);
    result.pairs[i] = __hmul2_rn(normed, weight.pairs[i]);
  }
  return result;
}

}  // namespace
