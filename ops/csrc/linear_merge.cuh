// The right operand of linear.cu from attention whose partial results (attention_split.cu) are still to be merged,
// which every CTA does for the heads that its part of K holds.
//   HEADS of a CTA, of 128; SPLITS partial results of each.
#pragma once

#include "linear_shape.cuh"
#include "quantize.cuh"

namespace {

struct RowInput {
  const float* sums;     // [num_rows, H, SPLITS, 128], weighted
  const float2* states;  // [num_rows, H, SPLITS]: largest score (of powers of two), sum of weights
  int num_heads;
};

constexpr int kLanes = 16, kPasses = HEADS * kLanes / kConsumers;
static_assert(HEADS * kLanes % kConsumers == 0 && SPLITS % 2 == 0);

// See linear_norm.cuh. Blocks from `begin` on are those of HEADS heads.
DEVICE void make_rows(u8* operand, float* scales, float*, const RowInput& in, int begin, int, int thread) {
  const int first_head = begin / (IS_FP8 ? 1 : 2), offset = thread % kLanes * 8;
  wait_for_previous_kernels();
#pragma unroll
  for (int row = 0; row < OWN_ROWS; ++row)
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int head = (pass * kConsumers + thread) / kLanes;
      const i64 place = (static_cast<i64>(row) * in.num_heads + first_head + head) * SPLITS;
      float4 states[SPLITS / 2], parts[SPLITS][2];
#pragma unroll
      for (int i = 0; i < SPLITS / 2; ++i) states[i] = reinterpret_cast<const float4*>(in.states + place)[i];
#pragma unroll
      for (int i = 0; i < SPLITS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          parts[i][half] = *reinterpret_cast<const float4*>(in.sums + (place + i) * 128 + offset + half * 4);
      float best = states[0].x;
#pragma unroll
      for (int i = 0; i < SPLITS / 2; ++i) best = fmaxf(best, fmaxf(states[i].x, states[i].z));
      float total = 0, values[8] = {};
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) {
        const float4 pair = states[i / 2];
        const float weight = exp2f((i % 2 == 0 ? pair.x : pair.z) - best);
        total += (i % 2 == 0 ? pair.y : pair.w) * weight;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 part = parts[i][half];
          values[half * 4] += part.x * weight, values[half * 4 + 1] += part.y * weight;
          values[half * 4 + 2] += part.z * weight, values[half * 4 + 3] += part.w * weight;
        }
      }
      const float inverse = 1.f / total;
      Bf16x8 rounded;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rounded.pairs[i] = __floats2bfloat162_rn(values[2 * i] * inverse, values[2 * i + 1] * inverse);
      const int byte = offset * (IS_FP8 ? 1 : 2), block = IS_FP8 ? head : 2 * head + byte / 128;
      u8* target = operand + block * kActBytes + row * 128 + (byte % 128 / 16 ^ row) * 16 + byte % 16;
      if constexpr (IS_FP8) {
        unpack(values, rounded);
        const Quantised group = quantize_group(values);
        *reinterpret_cast<uint2*>(target) = group.values;
        if (offset == 0) scales[head * COLS + row] = group.scale;
      } else {
        *reinterpret_cast<Bf16x8*>(target) = rounded;
      }
    }
  fence_async_proxy();
}

}  // namespace
