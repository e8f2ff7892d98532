// The right operand of linear.cu from rows that are not normalised yet: every CTA does RMSNorm (and
// the quantising) of up to OWN_ROWS rows itself, which saves a launch when rows are few.
#pragma once

#include "linear_shape.cuh"
#include "quantize.cuh"

namespace {

struct RowInput {
  const bf16* x;       // [num_rows, num_columns]
  const bf16* weight;  // [num_columns]
  float eps;
  int num_rows, num_columns;
};

#if OWN_ROWS

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
DEVICE float largest(const float4& x) {
  const float most = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
}

constexpr int kWarps = kConsumers / 32;
constexpr int kSumBits = ITEMS <= 4 ? 2 : ITEMS <= 8 ? 3 : ITEMS <= 16 ? 4 : 5;
constexpr int kSums = 1 << kSumBits;

// Every `sums[i]` added up over the lanes, in the order of `sum_of_squares`: each step halves what a lane
// holds. Returns that of i = `summed_by(lane)`.
DEVICE float warp_sums(float (&sums)[kSums], int lane) {
#pragma unroll
  for (int lanes = 1, left = kSums; lanes < 32; lanes *= 2) {
    if (left == 1) {
      sums[0] += __shfl_xor_sync(~0u, sums[0], lanes);
      continue;
    }
    left /= 2;
    const bool is_upper = lane & lanes;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = is_upper ? sums[i + left] : sums[i], sent = is_upper ? sums[i] : sums[i + left];
      sums[i] = kept + __shfl_xor_sync(~0u, sent, lanes);
    }
  }
  return sums[0];
}

DEVICE int summed_by(int lane) { return __brev(lane) >> (32 - kSumBits); }

// Writes blocks [begin, end) of 128 bytes of K into `operand`, COLS rows x 128 bytes each and swizzled,
// and their scales [block][COLS]. All consumers call this, and meet before they read what it wrote. A
// warp takes 128 values at a time, four per lane, ITEMS times; no time waits for another, and each
// time's divisions are done by a lane of its own. Norms are those of `rms_norm` in quantize.cu, bit for bit.
//   sums: [OWN_ROWS][ITEMS * kWarps].
DEVICE void make_rows(u8* operand, float* scales, float* sums, const RowInput& in, int begin,
                           int end, int thread) {
  constexpr int kPerBlock = IS_FP8 ? 128 : 64, kGroups = ITEMS * kWarps;
  static_assert(ITEMS <= 32);
  const int warp = thread / 32, lane = thread % 32;
  const auto column_of = [&](int item) { return (item * kWarps + warp) * 128 + lane * 4; };
  const auto is_inside = [&](int item) { return column_of(item) < IN_FEATURES; };
  const auto store = [&](auto values, int row, int item) {
    const int block = column_of(item) / kPerBlock, byte = IS_FP8 ? lane * 4 : lane % 16 * 8;
    u8* target = operand + (block - begin) * kActBytes + row * 128 + (byte / 16 ^ row) * 16 + byte % 16;
    if (block >= begin && block < end) *reinterpret_cast<decltype(values)*>(target) = values;
  };
  Bf16x4 weights[ITEMS] = {}, inputs[OWN_ROWS][ITEMS] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (is_inside(item)) weights[item] = *reinterpret_cast<const Bf16x4*>(in.weight + column_of(item));
  wait_for_previous_kernels();
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row)
#pragma unroll
    for (int item = 0; item < ITEMS; ++item)
      if (is_inside(item))
        inputs[row][item] = *reinterpret_cast<const Bf16x4*>(in.x + row * IN_FEATURES + column_of(item));
  float own[OWN_ROWS];  // 448 / the largest of the item that is this lane's
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row) {
    float squares[kSums] = {};
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) squares[item] = sum_of_squares(unpacked(inputs[row][item]));
    const float sum = warp_sums(squares, lane);
    const int group = summed_by(lane) * kWarps + warp;
    if (lane < kSums && group < kGroups) sums[row * kGroups + group] = sum;
    if constexpr (IS_FP8) {
      float4 products[ITEMS];
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        const float4 x = unpacked(inputs[row][item]), weight = unpacked(weights[item]);
        products[item] = {x.x * weight.x, x.y * weight.y, x.z * weight.z, x.w * weight.w};  // exact
        const float amax = largest(products[item]);
        if (item == 0 || lane == item) own[row] = fmaxf(amax, 1e-10f);
      }
      own[row] = 448.f / own[row];
#pragma unroll
      for (int item = 0; item < ITEMS; ++item)
        store(quantized_four(products[item], __shfl_sync(~0u, own[row], item)), row, item);
    }
  }
  consumers_sync();
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row) {
    const float part = sum_of_every_fourth(sums + row * kGroups, kGroups, 1, lane);
    const float factor = inverse_rms(part, IN_FEATURES, in.eps);
    if constexpr (IS_FP8) {
      const int block = lane * kWarps + warp;
      if (lane < ITEMS && block >= begin && block < end)
        scales[(block - begin) * COLS + row] = 1.f / own[row] * factor;
    } else {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item)
        store(scaled(unpacked(inputs[row][item]), factor, weights[item]), row, item);
    }
  }
  fence_async_proxy();
}

#endif

}  // namespace
