// A head of queries or keys, as one row of D values: RMS norm, then rotation of neighbouring pairs.
// D / 8 lanes share a head, eight values each.
#pragma once

#include "common.cuh"

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEVICE float2 unpacked(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

DEVICE u32 packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

template <int D>
struct HeadLanes {
  static constexpr int COUNT = D / 8;          // lanes of a head
  static constexpr int PER_WARP = 32 / COUNT;  // heads of a warp
};

// What a lane needs to norm and rotate its eight values, all of it constant: weights and a table.
struct HeadTables {
  uint4 weight;  // bf16, unused without a norm
  float4 turns[2];
};

//   weight: the head's norm weight [D] or null; turns: cos, sin pairs of the position, [D / 2].
//   offset: of the lane's values in the head, 8 * (lane % (D / 8)).
DEVICE HeadTables load_tables(const bf16* weight, const float2* turns, int offset) {
  const float4* turn = reinterpret_cast<const float4*>(turns + offset / 2);
  uint4 weights = make_uint4(0, 0, 0, 0);
  if (weight != nullptr) weights = *reinterpret_cast<const uint4*>(weight + offset);
  return {weights, {turn[0], turn[1]}};
}

// Norm (if there is one) and rotation of the eight bf16 this lane holds of a head. All lanes of the
// warp must call it. Rounds to bf16 where the definition does: after the norm, after the weight, after
// the rotation.
template <int D>
DEVICE uint4 rotated_head(uint4 values, const HeadTables& tables, bool has_norm, float eps) {
  float2 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = unpacked(word(values, i));
  if (has_norm) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += x[i].x * x[i].x + x[i].y * x[i].y;
#pragma unroll
    for (int lanes = HeadLanes<D>::COUNT / 2; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(~0u, sum, lanes);
    const float inverse = rsqrtf(sum * (1.0f / D) + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 normed = unpacked(packed(x[i].x * inverse, x[i].y * inverse));
      const float2 by = unpacked(word(tables.weight, i));
      x[i] = unpacked(packed(normed.x * by.x, normed.y * by.y));
    }
  }
  const float4 first = tables.turns[0], second = tables.turns[1];
  const float2 by[4] = {{first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
  u32 rotated[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    rotated[i] = packed(__fmul_rn(x[i].x, by[i].x) - __fmul_rn(x[i].y, by[i].y),
                        __fmul_rn(x[i].x, by[i].y) + __fmul_rn(x[i].y, by[i].x));
  return make_uint4(rotated[0], rotated[1], rotated[2], rotated[3]);
}
