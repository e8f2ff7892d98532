// How linear_wide.cu ends: partial sums across the cluster, bias, residual, SwiGLU, quantising.
#pragma once

#include "linear_common.cuh"

namespace {

constexpr int kRows = 64 * ROW_GROUPS;      // of x, per CTA
constexpr int kWidth = WIDTH * COL_GROUPS;  // rows of the weight, per CTA
constexpr int kPart = WIDTH / PARTS;
constexpr int kConsumers = 128 * ROW_GROUPS * COL_GROUPS;
constexpr int kThreads = kConsumers + 32;
constexpr int kWeightBytes = kWidth * 128;
constexpr int kActBytes = kRows * 128;
constexpr int kStageBytes = kWeightBytes + kActBytes;
constexpr int kUnits = kWidth / 8;      // of 8 rows of the weight
constexpr int kFeatures = kWidth / 2;   // of SwiGLU, per CTA
constexpr int kCluster = kQuantises ? 128 * GROUPS / kFeatures : SPLIT;
constexpr int kMaxima = kQuantises ? GROUPS * kRows : 0;
constexpr int kRowGroups = kRows / 8 / SPLIT;  // 8 rows of x that a CTA of the cluster finishes
constexpr int kItems = (kRowGroups * 8 * kUnits + kConsumers - 1) / kConsumers;

static_assert(kPart % 8 == 0 && (!GATE_UP || WIDTH % 16 == 0), "gate and up alternate every 8 rows");
static_assert(!GATE_UP || SPLIT == 1, "SwiGLU needs whole sums");
static_assert(!kQuantises || kFeatures <= 128, "a CTA has parts of two groups at most");
static_assert(!kQuantises || kCluster * kFeatures == 128 * GROUPS, "a cluster has whole groups");
static_assert(kRows / 8 % SPLIT == 0, "every rank finishes as many rows");
static_assert(GATE_UP || kRows * kWidth * 4 <= STAGES * kStageBytes, "the ring is too short");

// A consumer's place in the layout of wgmma.cuh: of its rows of x `row` and `row` + 8, and of every 8
// columns 2 * (lane % 4) and the next.
struct Place {
  int thread, row, col_group, lane;
};

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// Sends every 8 rows to the rank that finishes them. There they lie as [source rank][8 rows][unit of 8
// columns] tiles of 8 x 8 sums, row by row, and a warp writes 256 contiguous bytes.
DEVICE void send_partial_sums(const float (&acc)[WIDTH / 2], u32 exchange, int num_rows, int rank,
                              const Place& at) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = at.row / 8 + half;
    if (group * 8 >= num_rows) break;
    const u32 slot =
        (rank * kRowGroups + group % kRowGroups) * kUnits + at.col_group * (WIDTH / 8);
    const u32 target = cluster_address(exchange + (slot * 32 + at.lane) * 8, group / kRowGroups);
#pragma unroll
    for (int unit = 0; unit < WIDTH / 8; ++unit)
      cluster_store2(target + unit * 256, acc[unit * 4 + half * 2], acc[unit * 4 + half * 2 + 1]);
  }
}

// The part of an output that a thread finishes: 8 features of a row.
struct Item {
  int tile, row_in_tile, row, feature;
  bool is_inside;
};

DEVICE Item item_of(int i, const Output& o, int first, int rank, int thread) {
  const int index = i * kConsumers + thread;
  Item item;
  item.tile = index / 8, item.row_in_tile = index % 8;
  const int group = item.tile / kUnits;
  item.row = (rank * kRowGroups + group) * 8 + item.row_in_tile;
  item.feature = first + item.tile % kUnits * 8;
  item.is_inside = group < kRowGroups && item.row < o.num_rows && item.feature < o.num_features;
  return item;
}

union Bf16x8 {
  uint4 vector;
  bf16 values[8];
};

DEVICE bool is_whole(const Output& o) { return o.num_features % 8 == 0; }

// Residuals are on their way while the cluster meets.
DEVICE void load_residuals(uint4 (&residuals)[kItems], const Output& o, int first, int rank,
                           int thread) {
  if (o.residual == nullptr || !is_whole(o)) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item item = item_of(i, o, first, rank, thread);
    if (item.is_inside)
      residuals[i] = *reinterpret_cast<const uint4*>(
          o.residual + static_cast<i64>(item.row) * o.num_features + item.feature);
  }
}

// Rounds the sum to bf16 before the residual is added, as two ops would.
DEVICE void store_summed(const float4* exchange, const uint4 (&residuals)[kItems], const Output& o,
                         int first, int rank, int thread) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item item = item_of(i, o, first, rank, thread);
    if (!item.is_inside) continue;
    float sums[8] = {};
#pragma unroll
    for (int source = 0; source < SPLIT; ++source) {
      const float4* parts =
          exchange + (source * kRowGroups * kUnits + item.tile) * 16 + item.row_in_tile * 2;
      const float4 low = parts[0], high = parts[1];
      sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
      sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
    }
    const i64 index = static_cast<i64>(item.row) * o.num_features + item.feature;
    const int count = is_whole(o) ? 8 : min(8, o.num_features - item.feature);
    Bf16x8 residual = {residuals[i]}, result;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= count) break;
      const float bias = o.bias != nullptr ? __bfloat162float(o.bias[item.feature + j]) : 0.f;
      result.values[j] = __float2bfloat16_rn(sums[j] + bias);
      if (o.residual == nullptr) continue;
      if (!is_whole(o)) residual.values[j] = o.residual[index + j];
      result.values[j] = __float2bfloat16_rn(__bfloat162float(result.values[j]) +
                                             __bfloat162float(residual.values[j]));
    }
    bf16* out = static_cast<bf16*>(o.out) + index;
    if (is_whole(o))
      *reinterpret_cast<uint4*>(out) = result.vector;
    else
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < count) out[j] = result.values[j];
  }
}

// h[pair * 4 + i]: feature (8 * pair + 2 * (lane % 4) + i % 2) of the warpgroup, row + i / 2 * 8.
DEVICE void swiglu_all(float (&h)[WIDTH / 4], const float (&acc)[WIDTH / 2]) {
#pragma unroll
  for (int i = 0; i < WIDTH / 4; ++i) h[i] = swiglu(acc[i / 4 * 8 + i % 4], acc[i / 4 * 8 + 4 + i % 4]);
}

DEVICE void cluster_max(u32 address, u32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(address), "r"(value)
               : "memory");
}

// Maxima of |h|, [GROUPS][kRows] of the cluster as the bits of floats, to the CTAs that hold a part of
// the group. A CTA has features `first` to `end` of one group or two.
DEVICE void send_maxima(const float (&h)[WIDTH / 4], u32 maxima, int first, int end, int rank,
                        const Place& at) {
  const int boundary = (first / 128 + 1) * 128;
  float most[2][2] = {};  // [group][upper, lower row]
#pragma unroll
  for (int pair = 0; pair < WIDTH / 16; ++pair) {
    const int feature = first + at.col_group * (WIDTH / 2) + pair * 8;
    if (feature >= end) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float value = fmaxf(fabsf(h[pair * 4 + half * 2]), fabsf(h[pair * 4 + half * 2 + 1]));
      if (feature < boundary)
        most[0][half] = fmaxf(most[0][half], value);
      else
        most[1][half] = fmaxf(most[1][half], value);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = most[i / 2][i % 2];
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 2));
  }
  const int mine = at.lane % 4;  // which of the four this lane sends
  const float value = mine == 0   ? most[0][0]
                      : mine == 1 ? most[0][1]
                      : mine == 2 ? most[1][0]
                                  : most[1][1];
  const int group = rank * kFeatures / 128 + mine / 2;  // of the cluster
  if (group >= GROUPS) return;
  const u32 slot = maxima + (group * kRows + at.row + mine % 2 * 8) * 4;
  const int last = (group * 128 + 127) / kFeatures;
  for (int target = group * 128 / kFeatures; target <= last; ++target)
    cluster_max(cluster_address(slot, target), __float_as_uint(value));
}

// Copies the tile [kRows][kFeatures] of `Element` in shared memory to out [M, F].
template <typename Element>
DEVICE void store_tile(const u8* tile, const Output& o, int first, int thread) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kFeatures / kPerChunk;
  consumers_sync();
  for (int i = thread; i < o.num_rows * kChunks; i += kConsumers) {
    const int row = i / kChunks, feature = i % kChunks * kPerChunk;
    Element* out = static_cast<Element*>(o.out) + static_cast<i64>(row) * o.num_features + first;
    if (first + feature < o.num_features)
      *reinterpret_cast<uint4*>(out + feature) = reinterpret_cast<const uint4*>(tile)[i];
  }
}

DEVICE void store_bf16_tile(const float (&h)[WIDTH / 4], u8* ring, const Output& o, int first,
                            const Place& at) {
  consumers_sync();  // all warps are past the last stage
#pragma unroll
  for (int i = 0; i < WIDTH / 8; ++i) {
    const int column = at.col_group * (WIDTH / 2) + i / 2 * 8 + at.lane % 4 * 2;
    const int offset = (at.row + i % 2 * 8) * kFeatures + column;
    *reinterpret_cast<__nv_bfloat162*>(ring + offset * 2) =
        __floats2bfloat162_rn(h[i * 2], h[i * 2 + 1]);
  }
  store_tile<bf16>(ring, o, first, at.thread);
}

// Scales amax / 448; the CTA with a group's first feature writes them, zeros behind the last row.
DEVICE void store_fp8_tile(const float (&h)[WIDTH / 4], const u32* maxima, u8* ring, const Output& o,
                           int first, int rank, const Place& at) {
  const auto factor_of = [&](int group, int row) {
    return 448.f / fmaxf(__uint_as_float(maxima[group * kRows + row]), 1e-10f);
  };
  const int group = rank * kFeatures / 128;
  const int boundary = (group + 1) * 128 - rank * kFeatures;  // of this CTA's features
  float factors[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    factors[i / 2][i % 2] = factor_of(min(group + i / 2, GROUPS - 1), at.row + i % 2 * 8);
#pragma unroll
  for (int i = 0; i < WIDTH / 8; ++i) {
    const int column = at.col_group * (WIDTH / 2) + i / 2 * 8;
    const float factor = column < boundary ? factors[0][i % 2] : factors[1][i % 2];
    const int offset = (at.row + i % 2 * 8) * kFeatures + column + at.lane % 4 * 2;
    *reinterpret_cast<__nv_fp8x2_storage_t*>(ring + offset) = __nv_cvt_float2_to_fp8x2(
        {h[i * 2] * factor, h[i * 2 + 1] * factor}, __NV_SATFINITE, __NV_E4M3);
  }
  const int begun = (rank * kFeatures + 127) / 128;  // the group whose first feature may be here
  const int scale_row = first / 128 + begun - group;
  if (begun * 128 < (rank + 1) * kFeatures && scale_row * 128 < o.num_features)
    for (int row = at.thread; row < (o.num_rows + 3) / 4 * 4; row += kConsumers)
      o.scales[static_cast<i64>(scale_row) * o.scale_stride + row] =
          row < o.num_rows ? 1.f / factor_of(begun, row) : 0.f;
  store_tile<u8>(ring, o, first, at.thread);
}

}  // namespace
