// How linear.cu ends: partial sums across the cluster, bias, residual, SwiGLU, quantising.
#pragma once

#include "linear_shape.cuh"

namespace {

// Rounds the sum to bf16 before the residual is added, as two ops would.
DEVICE bf16 rounded(float sum, float bias, float residual, bool has_residual) {
  const bf16 value = __float2bfloat16_rn(sum + bias);
  return has_residual ? __float2bfloat16_rn(__bfloat162float(value) + residual) : value;
}

DEVICE void store_whole(const float (&acc)[COLS / 2], const Output& o, int first, int warp, int lane) {
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit * 8 >= o.num_rows) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = first + warp * 16 + lane / 4 + i / 2 * 8, row = unit * 8 + lane % 4 * 2 + i % 2;
      if (row >= o.num_rows || feature >= o.num_features) continue;
      const float bias = o.bias != nullptr ? __bfloat162float(o.bias[feature]) : 0.f;
      const bf16* of_row = o.residual + static_cast<i64>(row) * o.residual_stride;
      const float residual = o.residual != nullptr ? __bfloat162float(of_row[feature]) : 0.f;
      static_cast<bf16*>(o.out)[static_cast<i64>(row) * o.num_features + feature] =
          rounded(acc[unit * 4 + i], bias, residual, o.residual != nullptr);
    }
  }
}

// What `send_maxima` or `send_partial_sums` of the whole cluster send to one CTA.
DEVICE int sent_bytes(int num_rows) {
  return kQuantises ? 16 * COLS * 4 : SPLIT * kGroups * ((num_rows + 7) / 8) * 256;
}

// Sends every 8-row group to the rank that finishes it. There it lies as [source rank][group][unit]
// [lane] pairs, so that a warp writes 256 contiguous bytes.
DEVICE void send_partial_sums(const float (&acc)[COLS / 2], u32 exchange, u32 met, int num_rows, int rank,
                              int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = warp * 2 + half;
    const u32 slot = (rank * kGroups + group % kGroups) * kUnits;
    const u32 target = cluster_address(exchange + (slot * 32 + lane) * 8, group / kGroups);
    const u32 counter = cluster_address(met, group / kGroups);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit * 8 >= num_rows) break;
      cluster_send2(target + unit * 256, acc[unit * 4 + half * 2], acc[unit * 4 + half * 2 + 1], counter);
    }
  }
}

// The part of an output that a thread finishes: pairs of rows of one feature.
constexpr int kPairs = (kGroups * kUnits + kConsumers / 32 - 1) / (kConsumers / 32);

// The first feature that a CTA finishes.
DEVICE int first_feature(int tile, int rank) { return tile * kRows + rank * kGroups * 8; }

struct Pair {
  int group, unit, feature, row;
  bool has_first, has_second;
};

DEVICE Pair pair_of(int i, const Output& o, int first, int warp, int lane) {
  const int index = i * (kConsumers / 32) + warp;
  Pair p;
  p.group = index / kUnits, p.unit = index % kUnits;
  p.feature = first + p.group * 8 + lane / 4, p.row = p.unit * 8 + lane % 4 * 2;
  p.has_first = p.group < kGroups && p.feature < o.num_features && p.row < o.num_rows;
  p.has_second = p.has_first && p.row + 1 < o.num_rows;
  return p;
}

// Residuals are on their way while the sums are made.
DEVICE void load_residuals(bf16 (&residuals)[kPairs][2], const Output& o, int first, int warp,
                           int lane) {
  if (o.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const Pair p = pair_of(i, o, first, warp, lane);
    const bf16* source = o.residual + static_cast<i64>(p.row) * o.residual_stride + p.feature;
    if (p.has_first) residuals[i][0] = source[0];
    if (p.has_second) residuals[i][1] = source[o.residual_stride];
  }
}

DEVICE void store_summed(const float2* exchange, const bf16 (&residuals)[kPairs][2], const Output& o,
                         int first, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const Pair p = pair_of(i, o, first, warp, lane);
    if (!p.has_first) continue;
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int source = 0; source < SPLIT; ++source) {
      const float2 part = exchange[((source * kGroups + p.group) * kUnits + p.unit) * 32 + lane];
      sum.x += part.x, sum.y += part.y;
    }
    const bool has_residual = o.residual != nullptr;
    const float bias = o.bias != nullptr ? __bfloat162float(o.bias[p.feature]) : 0.f;
    bf16* out = static_cast<bf16*>(o.out) + static_cast<i64>(p.row) * o.num_features + p.feature;
    out[0] = rounded(sum.x, bias, __bfloat162float(residuals[i][0]), has_residual);
    if (p.has_second)
      out[o.num_features] = rounded(sum.y, bias, __bfloat162float(residuals[i][1]), has_residual);
  }
}

// h[unit * 2 + i]: feature warp * 8 + lane / 4 of the CTA, row unit * 8 + lane % 4 * 2 + i.
DEVICE void swiglu_all(float (&h)[COLS / 4], const float (&acc)[COLS / 2]) {
#pragma unroll
  for (int i = 0; i < COLS / 4; ++i)
    h[i] = swiglu(acc[i / 2 * 4 + i % 2], acc[i / 2 * 4 + 2 + i % 2]);
}

DEVICE int row_of(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

// Every warp's maxima of 8 features go to all CTAs of the 128-feature group: [16 warps][COLS].
DEVICE void send_maxima(const float (&h)[COLS / 4], u32 exchange, u32 met, int rank, int warp, int lane) {
  const u32 slot = exchange + ((rank * WARPGROUPS * 4 + warp) * COLS + lane % 4 * 2) * 4;
  const int to = min(lane / 4, kCluster - 1);
  const u32 target = cluster_address(slot, to), counter = cluster_address(met, to);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    float x = fabsf(h[unit * 2]), y = fabsf(h[unit * 2 + 1]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
      y = fmaxf(y, __shfl_xor_sync(~0u, y, offset));
    }
    if (lane / 4 < kCluster) cluster_send2(target + unit * 32, x, y, counter);
  }
}

// factors[row] = 448 / amax over the 128 features; rank 0 writes the scales, zeros behind the last row.
DEVICE void reduce_maxima(float* factors, const float* maxima, const Output& o, int group, int rank,
                          int thread) {
  for (int row = thread; row < (o.num_rows + 3) / 4 * 4; row += kConsumers) {
    float amax = 1e-10f;
#pragma unroll
    for (int i = 0; i < 16; ++i) amax = fmaxf(amax, maxima[i * COLS + row]);
    factors[row] = 448.f / amax;
    if (rank == 0)
      o.scales[static_cast<i64>(group) * o.scale_stride + row] =
          row < o.num_rows ? 1.f / factors[row] : 0.f;
  }
}

// Of few rows: every thread quantises and stores its own. `maxima` are there; rank 0 writes the scales,
// zeros behind the last row.
DEVICE void store_fp8_rows(const float (&h)[COLS / 4], const float* maxima, const Output& o, int tile,
                           int rank, int warp, int lane) {
  const int feature = tile * kFeatures + warp * 8 + lane / 4;
#pragma unroll
  for (int i = 0; i < COLS / 4; ++i) {
    const int row = row_of(i, lane);
    float amax = 1e-10f;
#pragma unroll
    for (int part = 0; part < 16; ++part) amax = fmaxf(amax, maxima[part * COLS + row]);
    const float factor = 448.f / amax;
    if (row < o.num_rows && feature < o.num_features)
      static_cast<u8*>(o.out)[static_cast<i64>(row) * o.num_features + feature] =
          __nv_cvt_float_to_fp8(h[i] * factor, __NV_SATFINITE, __NV_E4M3);
    if (rank == 0 && warp == 0 && lane < 4 && row < (o.num_rows + 3) / 4 * 4)
      o.scales[static_cast<i64>(tile / kCluster) * o.scale_stride + row] =
          row < o.num_rows ? 1.f / factor : 0.f;
  }
}

// Copies the transposed tile [COLS][kFeatures] of `Element` in shared memory to out [M, F].
template <typename Element>
DEVICE void store_tile(const Element* tile, const Output& o, int first, int thread) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kFeatures / kPerChunk;
  for (int i = thread; i < o.num_rows * kChunks; i += kConsumers) {
    const int row = i / kChunks, feature = i % kChunks * kPerChunk;
    Element* out = static_cast<Element*>(o.out) + static_cast<i64>(row) * o.num_features + first;
    if (first + feature < o.num_features)
      *reinterpret_cast<uint4*>(out + feature) =
          *reinterpret_cast<const uint4*>(tile + row * kFeatures + feature);
  }
}

DEVICE void store_bf16_tile(const float (&h)[COLS / 4], u8* ring, const Output& o, int first, int warp,
                            int lane) {
  bf16* tile = reinterpret_cast<bf16*>(ring);
  consumers_sync();  // all warps are past the last stage
#pragma unroll
  for (int i = 0; i < COLS / 4; ++i)
    tile[row_of(i, lane) * kFeatures + warp * 8 + lane / 4] = __float2bfloat16_rn(h[i]);
  consumers_sync();
  store_tile(tile, o, first, warp * 32 + lane);
}

DEVICE void store_fp8_tile(const float (&h)[COLS / 4], const float* factors, u8* ring, const Output& o,
                           int first, int warp, int lane) {
  consumers_sync();  // all warps are past the last stage; the factors are there
#pragma unroll
  for (int i = 0; i < COLS / 4; ++i) {
    const int row = row_of(i, lane);
    ring[row * kFeatures + warp * 8 + lane / 4] =
        __nv_cvt_float_to_fp8(h[i] * factors[row], __NV_SATFINITE, __NV_E4M3);
  }
  consumers_sync();
  store_tile(ring, o, first, warp * 32 + lane);
}

}  // namespace
