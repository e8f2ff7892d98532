// How linear_wide.cu ends: partial sums across the cluster, bias, residual, SwiGLU, quantising.
#pragma once

#include "linear_common.cuh"

namespace {

constexpr int kRows = 64 * ROW_GROUPS;      // of x, per CTA
constexpr int kWidth = WIDTH * COL_GROUPS;  // rows of the weight, per CTA
constexpr int kConsumers = 128 * ROW_GROUPS * COL_GROUPS;
constexpr bool kMovesRegisters = PRODUCERS == 128;  // those of a warpgroup that loads, to those that sum
constexpr int kThreads = kConsumers + PRODUCERS;
constexpr int kWeightBytes = kWidth * 128;
constexpr int kActBytes = kRows * 128;
constexpr int kRingBytes = STAGES * kWeightBytes + ROW_STAGES * kActBytes;
constexpr int kUnits = kWidth / 8;  // of 8 rows of the weight
constexpr bool kHasWholeTiles = WIDTH % 64 == 0;
constexpr int kScales = kHasWholeTiles ? kWidth / 32 : kUnits;  // of a block of K
constexpr int kFeatures = kWidth / 2;   // of SwiGLU, per CTA
constexpr int kTiles = NORMS ? 128 / kWidth : 1;  // of columns, which a cluster finishes together
constexpr int kCluster = kQuantises ? 128 * GROUPS / kFeatures : SPLIT * kTiles;
constexpr int kPlaces = 128 % kFeatures == 0 ? 1 : 2;  // groups of 128 that a CTA may have parts of
constexpr int kReleased = STAGES > ROW_STAGES ? STAGES : ROW_STAGES;
constexpr int kLeast = STAGES < ROW_STAGES ? STAGES : ROW_STAGES;
constexpr int kBarriers = STAGES + ROW_STAGES + kReleased + 1;
constexpr int kRowGroups = kRows / 8 / (SPLIT * kTiles);  // 8 rows of x that a CTA of the cluster finishes
constexpr int kOutUnits = kUnits * kTiles;                // 8 columns of those rows
constexpr int kItems = (kRowGroups * 8 * kOutUnits + kConsumers - 1) / kConsumers;
constexpr int kExchangeBytes = kQuantises              ? kPlaces * (1 + kCluster) * kRows * 4
                               : !GATE_UP && SPLIT > 1 ? kRows * kWidth * 4
                                                       : 0;

static_assert(WIDTH % (GATE_UP ? 16 : 8) == 0, "gate and up alternate every 8 rows");
static_assert(!GATE_UP || SPLIT == 1, "SwiGLU needs whole sums");
static_assert(!kQuantises || kFeatures <= 128, "a CTA has parts of two groups at most");
static_assert(!kQuantises || kCluster * kFeatures == 128 * GROUPS, "a cluster has whole groups");
static_assert(kRows / 8 % (SPLIT * kTiles) == 0, "every rank finishes as many rows");
static_assert(!NORMS || (IS_FP8 && SPLIT > 1 && 128 % kWidth == 0 && kRowGroups * 128 == kConsumers),
              "a cluster has 128 columns, and each of its threads eight values of them");
static_assert(GATE_UP || kRows * kWidth * 4 <= kRingBytes, "sums leave through the ring");
static_assert(!kMovesRegisters || kConsumers == 256, "registers are counted for two warpgroups");
static_assert(kLeast > 1, "a block is started before the one before it is released");

// A consumer's place in the layout of wgmma.cuh: of its rows of x `row` and `row` + 8, and of every 8
// columns 2 * (lane % 4) and the next.
struct Place {
  int thread, row, col_group, lane;
};

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// From shared memory into that of a CTA of the cluster, whose `barrier` counts the bytes.
DEVICE void cluster_copy(u32 target, u32 source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          target),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

DEVICE void cluster_send4(u32 address, float4 v, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

// Of 8 rows of the weight: a tile of 64 has one for every other 8 (`PackedWeight.tile_scale`).
DEVICE constexpr int scale_of_unit(int unit) { return kHasWholeTiles ? unit / 8 * 2 + unit % 2 : unit; }
DEVICE constexpr int unit_of_scale(int scale) {
  return kHasWholeTiles ? scale / 2 * 8 + scale % 2 : scale;
}

// CTAs of a cluster send each other's exchange bytes that its barrier counts; before, all of them run.
// Every thread of every CTA calls the four, from `announce` to `leave_exchange`, once and in this order.
DEVICE void announce() {
  if (kCluster > 1) cluster_arrive_relaxed();
}

DEVICE void open_exchange() {
  if (kCluster > 1) cluster_wait();
}

// No CTA ends before all have what the copy engine takes from its ring.
DEVICE void close_exchange() {
  if (kCluster == 1 || GATE_UP) return;
  __syncwarp();
  cluster_arrive_relaxed();
}

DEVICE void leave_exchange() {
  if (kCluster == 1 || GATE_UP) return;
  __syncwarp();
  cluster_wait();
}

// Groups of 8 rows that a rank finishes.
DEVICE int groups_of(int rank, int num_rows) {
  return min(max((num_rows + 7) / 8 - rank * kRowGroups, 0), kRowGroups);
}

// Where the sums of such a group lie, bytes: in a CTA that makes them, and in the one that finishes them.
DEVICE int source_of(int group, const Place& at) {
  return (group * kUnits + at.col_group * (WIDTH / 8)) * 256;
}
DEVICE int target_of(int group, int rank, const Place& at) {
  const int part = rank % SPLIT * kRowGroups + group % kRowGroups;
  return ((part * kTiles + rank / SPLIT) * kUnits + at.col_group * (WIDTH / 8)) * 256;
}

// A warp's sums, of 16 rows of x, go into the ring: [2 groups of 8 rows][unit of 8 columns] tiles of
// 8 x 8, row by row. From there each group goes to the rank that finishes it, where they lie by source
// rank; its own go there at once (memcheck refuses a bulk copy to the CTA it comes from).
DEVICE void put_partial_sums(const float (&acc)[WIDTH / 2], u8* ring, u8* exchange, u32 arrived,
                             int num_rows, int rank, const Place& at) {
  consumers_sync();  // all warps are past the last stage
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = at.row / 8 + half;
    if (group * 8 >= num_rows) break;
    if (kCluster > 1 && group / kRowGroups == rank) {
      const u32 target = shared_address(exchange) + target_of(group, rank, at) + at.lane * 8;
#pragma unroll
      for (int unit = 0; unit < WIDTH / 8; ++unit)
        cluster_send2(cluster_address(target, rank) + unit * 256, acc[unit * 4 + half * 2],
                      acc[unit * 4 + half * 2 + 1], cluster_address(arrived, rank));
      continue;
    }
    float2* target = reinterpret_cast<float2*>(ring + source_of(group, at)) + at.lane;
#pragma unroll
    for (int unit = 0; unit < WIDTH / 8; ++unit)
      target[unit * 32] = {acc[unit * 4 + half * 2], acc[unit * 4 + half * 2 + 1]};
  }
  if (kCluster == 1)
    consumers_sync();
  else
    fence_async_proxy(), __syncwarp();
}

DEVICE void send_partial_sums(const u8* ring, u8* exchange, u32 arrived, int num_rows, int rank,
                              const Place& at) {
  if (kCluster == 1) return;
  const int group = at.row / 8 + at.lane, target = group / kRowGroups;  // of lanes 0 and 1
  if (at.lane < 2 && group * 8 < num_rows && target != rank)
    cluster_copy(cluster_address(shared_address(exchange) + target_of(group, rank, at), target),
                 shared_address(ring) + source_of(group, at), WIDTH / 8 * 256,
                 cluster_address(arrived, target));
  __syncwarp();
}

// The part of an output that a thread finishes: 8 features of a row.
struct Item {
  int tile, row_in_tile, row, feature;
  bool is_inside;
};

// `first`: feature of the cluster's.
DEVICE Item item_of(int i, const Output& o, int first, int rank, int thread) {
  const int index = i * kConsumers + thread;
  Item item;
  item.tile = index / 8, item.row_in_tile = index % 8;
  const int group = item.tile / kOutUnits;
  item.row = (rank * kRowGroups + group) * 8 + item.row_in_tile;
  item.feature = first + item.tile % kOutUnits * 8;
  item.is_inside = group < kRowGroups && item.row < o.num_rows && item.feature < o.num_features;
  return item;
}

union Vector8 {
  uint4 vector;
  bf16 values[8];
  __nv_bfloat162 pairs[4];
};

DEVICE bool is_whole(const Output& o) { return NORMS || o.num_features % 8 == 0; }

// Residuals are on their way while the cluster meets.
DEVICE void load_residuals(uint4 (&residuals)[kItems], const Output& o, int first, int rank,
                           int thread) {
  if (o.residual == nullptr || !is_whole(o)) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item item = item_of(i, o, first, rank, thread);
    if (item.is_inside)
      residuals[i] = *reinterpret_cast<const uint4*>(
          o.residual + static_cast<i64>(item.row) * o.residual_stride + item.feature);
  }
}

// The sum over K of an item, rounded to bf16 before the residual is added, as two ops would.
DEVICE uint4 summed(const float4* exchange, const uint4& residuals, const Output& o, const Item& item) {
  float sums[8] = {};
#pragma unroll
  for (int source = 0; source < SPLIT; ++source) {
    const float4* parts =
        exchange + (source * kRowGroups * kOutUnits + item.tile) * 16 + item.row_in_tile * 2;
    const float4 low = parts[0], high = parts[1];
    sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
    sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
  }
  const int count = is_whole(o) ? 8 : min(8, o.num_features - item.feature);
  Vector8 residual = {residuals}, result;
  if (o.bias != nullptr)
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < count) sums[j] += __bfloat162float(o.bias[item.feature + j]);
  if (o.residual != nullptr && !is_whole(o)) {
    const bf16* of_row = o.residual + static_cast<i64>(item.row) * o.residual_stride + item.feature;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < count) residual.values[j] = of_row[j];
  }
  if (o.residual != nullptr)
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = bf16_round(sums[j]) + __bfloat162float(residual.values[j]);
#pragma unroll
  for (int j = 0; j < 4; ++j) result.pairs[j] = __floats2bfloat162_rn(sums[2 * j], sums[2 * j + 1]);
  return result.vector;
}

DEVICE void store_item(const uint4& values, const Output& o, const Item& item) {
  const Vector8 result = {values};
  bf16* out = static_cast<bf16*>(o.out) + static_cast<i64>(item.row) * o.num_features + item.feature;
  if (is_whole(o))
    *reinterpret_cast<uint4*>(out) = result.vector;
  else
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < o.num_features - item.feature) out[j] = result.values[j];
}

DEVICE void store_summed(const float4* exchange, const uint4 (&residuals)[kItems], const Output& o,
                         int first, int rank, int thread) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item item = item_of(i, o, first, rank, thread);
    if (item.is_inside) store_item(summed(exchange, residuals[i], o, item), o, item);
  }
}

// h[pair * 4 + i]: feature (8 * pair + 2 * (lane % 4) + i % 2) of the warpgroup, row + i / 2 * 8.
DEVICE void swiglu_all(float (&h)[WIDTH / 4], const float (&acc)[WIDTH / 2]) {
#pragma unroll
  for (int i = 0; i < WIDTH / 4; ++i) h[i] = swiglu(acc[i / 4 * 8 + i % 4], acc[i / 4 * 8 + 4 + i % 4]);
}

constexpr DEVICE int first_rank(int group) { return group * 128 / kFeatures; }
constexpr DEVICE int last_rank(int group) { return (group * 128 + 127) / kFeatures; }
DEVICE bool has_part(int rank, int group) {
  return group < GROUPS && first_rank(group) <= rank && rank <= last_rank(group);
}

// What other CTAs, and this one, send to a rank: maxima of the groups it has a part of, or sums of the
// rows it finishes.
DEVICE int bytes_to_arrive(int num_rows, int rank) {
  if (!kQuantises) return GATE_UP ? 0 : SPLIT * groups_of(rank, num_rows) * kOutUnits * 256;
  int senders = 0;
  for (int i = 0; i < kPlaces; ++i) {
    const int group = rank * kFeatures / 128 + i;
    if (has_part(rank, group)) senders += last_rank(group) - first_rank(group) + 1;
  }
  return senders * kRows * 4;
}

// Maxima of |h| of this CTA's features, `first` to `end` of one group or two: [kPlaces][kRows].
DEVICE void note_maxima(const float (&h)[WIDTH / 4], u32* maxima, int first, int end, const Place& at) {
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
  const int mine = at.lane % 4;  // which of the four this lane notes
  const float value = mine == 0   ? most[0][0]
                      : mine == 1 ? most[0][1]
                      : mine == 2 ? most[1][0]
                                  : most[1][1];
  u32* noted = maxima + mine / 2 * kRows + at.row + mine % 2 * 8;
  if (mine / 2 < kPlaces) {
    if (COL_GROUPS == 1)
      *noted = __float_as_uint(value);
    else
      atomicMax(noted, __float_as_uint(value));
  }
  consumers_sync();
}

// To all CTAs of a group: there they lie behind its own, [place][rank][kRows].
DEVICE void send_maxima(const u32* maxima, u32 arrived, int rank, int thread) {
  if (kCluster == 1) return;
  constexpr int kChunks = kRows / 4;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int group = rank * kFeatures / 128 + i;
    if (!has_part(rank, group)) break;
    const int count = (last_rank(group) - first_rank(group) + 1) * kChunks;
    for (int j = thread; j < count; j += kConsumers) {
      const int target = first_rank(group) + j / kChunks, chunk = j % kChunks;
      const int place = group - target * kFeatures / 128;
      const u32* slot = maxima + (kPlaces + place * kCluster + rank) * kRows + chunk * 4;
      cluster_send4(cluster_address(shared_address(slot), target),
                    reinterpret_cast<const float4*>(maxima + i * kRows)[chunk],
                    cluster_address(arrived, target));
    }
  }
  barrier_wait_cluster(arrived, 0);
}

// 448 / the maximum of a row over all features of a group, this CTA's first or second.
DEVICE float factor_of(const u32* maxima, int place, int row, int rank) {
  u32 most = __float_as_uint(1e-10f);
  if (kCluster == 1) return 448.f / __uint_as_float(max(most, maxima[place * kRows + row]));
  const int group = rank * kFeatures / 128 + place;
  for (int source = first_rank(group); source <= last_rank(group); ++source)
    most = max(most, maxima[(kPlaces + place * kCluster + source) * kRows + row]);
  return 448.f / __uint_as_float(most);
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
  const int group = rank * kFeatures / 128;
  const int boundary = (group + 1) * 128 - rank * kFeatures;  // of this CTA's features
  float factors[2][2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i / 2 < kPlaces && has_part(rank, group + i / 2))
      factors[i / 2][i % 2] = factor_of(maxima, i / 2, at.row + i % 2 * 8, rank);
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
          row < o.num_rows ? 1.f / factor_of(maxima, begun - group, row, rank) : 0.f;
  store_tile<u8>(ring, o, first, at.thread);
}

}  // namespace
