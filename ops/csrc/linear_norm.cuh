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

struct alignas(8) Bf16x4 {
  __nv_bfloat162 pairs[2];
};

DEVICE float2 unpacked(const __nv_bfloat162& pair) {
  const u32 bits = *reinterpret_cast<const u32*>(&pair);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

DEVICE float4 unpacked(const Bf16x4& in) {
  const float2 low = unpacked(in.pairs[0]), high = unpacked(in.pairs[1]);
  return {low.x, low.y, high.x, high.y};
}

// x * factor rounded to bf16, then times the weight, rounded.
DEVICE Bf16x4 scaled(const float4& x, float factor, const Bf16x4& weight) {
  return {__hmul2_rn(__floats2bfloat162_rn(x.x * factor, x.y * factor), weight.pairs[0]),
          __hmul2_rn(__floats2bfloat162_rn(x.z * factor, x.w * factor), weight.pairs[1])};
}

// The largest magnitude that the warp's lanes hold. Of floats that are not negative, the bits have the
// same order.
DEVICE float largest(const Bf16x4& x) {
  const __nv_bfloat162 pair = __hmax2(__habs2(x.pairs[0]), __habs2(x.pairs[1]));
  const float2 both = unpacked(pair);
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(both.x, both.y))));
}

// Writes blocks [begin, end) of 128 bytes of K into `operand`, COLS rows x 128 bytes each and swizzled,
// and their scales [block][COLS]. All consumers call this, and meet before they read what it wrote. A
// warp takes 128 values at a time, four per lane, ITEMS times; no time waits for another, and each
// time's divisions are done by a lane of its own.
DEVICE void normalize_rows(u8* operand, float* scales, float* sums, const NormInput& in, int begin,
                           int end, int thread) {
  constexpr int kWarps = kConsumers / 32, kPerBlock = IS_FP8 ? 128 : 64;
  static_assert(ITEMS <= 32);
  const int warp = thread / 32, lane = thread % 32;
  const auto column_of = [&](int item) { return (item * kWarps + warp) * 128 + lane * 4; };
  const auto is_inside = [&](int item) { return column_of(item) < IN_FEATURES; };
  Bf16x4 weights[ITEMS] = {}, inputs[NORM][ITEMS] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (is_inside(item)) weights[item] = *reinterpret_cast<const Bf16x4*>(in.weight + column_of(item));
  wait_for_previous_kernels();
#pragma unroll
  for (int row = 0; row < NORM; ++row)
#pragma unroll
    for (int item = 0; item < ITEMS; ++item)
      if (is_inside(item))
        inputs[row][item] = *reinterpret_cast<const Bf16x4*>(in.x + row * IN_FEATURES + column_of(item));
#pragma unroll
  for (int row = 0; row < NORM; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const float4 x = unpacked(inputs[row][item]);
      sum += x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[row * kWarps + warp] = sum;
  }
  consumers_sync();
#pragma unroll
  for (int row = 0; row < NORM; ++row) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += sums[row * kWarps + i];
    const float factor = rsqrtf(total * (1.f / IN_FEATURES) + in.eps);
    Bf16x4 normed[ITEMS];
    float own = 1e-10f;  // of the item that is this lane's
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      normed[item] = scaled(unpacked(inputs[row][item]), factor, weights[item]);
      if constexpr (IS_FP8) {
        const float amax = largest(normed[item]);
        if (lane == item) own = fmaxf(amax, 1e-10f);
      }
    }
    if constexpr (IS_FP8) {
      own = 448.f / own;
      const int block = lane * kWarps + warp;
      if (lane < ITEMS && block >= begin && block < end) scales[(block - begin) * COLS + row] = 1.f / own;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int block = column_of(item) / kPerBlock;
      const int byte = IS_FP8 ? lane * 4 : lane % 16 * 8;
      u8* target = operand + (block - begin) * kActBytes + row * 128 + (byte / 16 ^ row) * 16 + byte % 16;
      const bool is_mine = block >= begin && block < end;
      if constexpr (IS_FP8) {
        const u32 four = quantized_four(unpacked(normed[item]), __shfl_sync(~0u, own, item));
        if (is_mine) *reinterpret_cast<u32*>(target) = four;
      } else if (is_mine) {
        *reinterpret_cast<Bf16x4*>(target) = normed[item];
      }
    }
  }
  fence_async_proxy();
}

#endif

}  // namespace
