// Weights through the ring, and units of 16 of their rows times all rows.
//
// A stage is the 16 rows of a unit in four neighbouring K tiles: as 64 rows of a left operand, 16 per
// K tile. The right operand holds the same four K tiles of every row as columns of their own, so of the
// 4 x 4 blocks of the product the diagonal counts: warp q of a warpgroup keeps the sums of K tile q.
// So a CTA has all of K of few rows of the weight, and no sums cross CTAs.
#pragma once

#include "persistent_shape.cuh"

namespace {

// Walks a CTA's stages through all layers and phases in the order in which they are consumed.
struct Cursor {
  const Stack& s;
  int layer = 0, phase = -1, unit = 0, end = 0, group = 0, groups = 0;
  const u8* tiles = nullptr;
  const float* scales = nullptr;

  DEVICE bool is_over() const { return layer > s.num_layers; }

  DEVICE void next_phase() {
    do {
      if (++phase >= kHead) phase = 0, ++layer;
      if (is_over()) return;
      if (layer == s.num_layers) phase = kHead;
      const i32* begin = s.begins + phase * (gridDim.x + 1) + blockIdx.x;
      unit = begin[0], end = begin[1];
    } while (unit == end);
    groups = s.groups(phase), group = 0;
    tiles = phase == kHead ? s.head : s.layers[layer].tiles[phase];
    scales = s.is_fp8(phase) ? s.layers[layer].scales[phase] : nullptr;
  }

  DEVICE void advance() {
    if (++group < groups) return;
    group = 0;
    if (++unit == end) next_phase();
  }

  DEVICE i64 first_tile() const {
    return (static_cast<i64>(unit / 4) * groups + group) * kTilesPerStage;
  }
  DEVICE const u8* slice(int i) const {
    return tiles + (first_tile() + i) * kTileBytes + unit % 4 * kSliceBytes;
  }
};

DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As `bulk_copy_streamed`, with its policy made once.
DEVICE void copy_slice(u32 destination, const void* source, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(destination),
      "l"(source), "n"(kSliceBytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Keeps the ring full, whatever the consumers wait for. One thread of each of PRODUCERS warps, for every
// so many stages: one alone is slower than the memory.
DEVICE void produce(const Shared& shared, const Stack& s, int producer) {
  const u64 policy = evict_first();
  Cursor at = {s};
  at.next_phase();
  for (int i = 0; i < producer; ++i) at.advance();
  for (u32 count = producer; !at.is_over(); count += PRODUCERS) {
    const u32 stage = count % STAGES, barrier = shared.full + stage * 8;
    if (count >= STAGES) barrier_wait(shared.empty + stage * 8, (count / STAGES - 1) & 1);
    const bool is_scaled = s.is_fp8(at.phase);
    barrier_expect(barrier, kStageBytes + (is_scaled ? kTilesPerStage * 8 : 0));
#pragma unroll
    for (int i = 0; i < kTilesPerStage; ++i)
      copy_slice(shared.ring + stage * kStageBytes + i * kSliceBytes, at.slice(i), barrier, policy);
    if (is_scaled)
      bulk_copy(shared_address(shared.tile_scales + stage * kTilesPerStage),
                at.scales + at.first_tile() * 2, kTilesPerStage * 8, barrier);
#pragma unroll 1
    for (int i = 0; i < PRODUCERS && !at.is_over(); ++i) at.advance();
  }
}

template <bool kFp8>
DEVICE void multiply(float (&d)[kColumns / 2], u32 weights, u32 rows, bool accumulate) {
  const u64 a = tile_descriptor(weights), b = tile_descriptor(rows);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    Wgmma<kFp8, kColumns>::run(d, a + 2 * k, b + 2 * k, accumulate || k > 0);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Where a lane's values of the diagonal are: in `unit` (8 columns) of the product, of rows `row` and
// `row + 1` of x, of rows lane / 4 and lane / 4 + 8 of the weight. Not `is_mine`: off the diagonal.
struct Diagonal {
  int unit, row;
  bool is_mine;

  DEVICE Diagonal(int warp, int lane) {
    const int first = warp % 4 * ROWS;
    unit = first / 8;
    const int column = unit * 8 + lane % 4 * 2 - first;
    is_mine = column >= 0 && column < ROWS;
    row = is_mine ? column : 0;
  }
  DEVICE void take(float (&out)[4], const float (&d)[kColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = d[i];
#pragma unroll
      for (int u = 1; u < kColumns / 8; ++u) out[i] = unit == u ? d[u * 4 + i] : out[i];
    }
  }
};

// A lane's sums of one unit over the stages of its warpgroup: rows (0, 1) of x of weight row lane / 4,
// then of lane / 4 + 8. `first_stage`: of the unit, counted from the launch's start.
template <bool kFp8>
DEVICE void multiply_unit(float (&sum)[4], const Shared& shared, u32 first_stage, int groups,
                          const Diagonal& diagonal, int warp, int lane) {
  constexpr int kBatch = 4;
  float whole[kColumns / 2] = {};
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
  for (int first = warp / 4; first < groups; first += WARPGROUPS * kBatch) {
    float parts[kFp8 ? kBatch : 1][kColumns / 2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = first + i * WARPGROUPS;
      if (group >= groups) break;
      const u32 at = first_stage + group, stage = at % STAGES;
      barrier_wait(shared.full + stage * 8, at / STAGES & 1);
      const u32 weights = shared.ring + stage * kStageBytes;
      const u32 rows = shared_address(shared.operand) + group * kGroupBytes;
      if constexpr (kFp8)
        multiply<true>(parts[i], weights, rows, false);
      else
        multiply<false>(whole, weights, rows, true);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = first + i * WARPGROUPS;
      if (group >= groups) break;
      const u32 stage = (first_stage + group) % STAGES;
      if constexpr (kFp8) {
        const float2 weight = shared.tile_scales[stage * kTilesPerStage + warp % 4];
        const float2 row = *reinterpret_cast<const float2*>(
            shared.row_scales + (group * kTilesPerStage + warp % 4) * ROWS + diagonal.row);
        float part[4];
        diagonal.take(part, parts[i]);
        sum[0] += part[0] * (weight.x * row.x), sum[1] += part[1] * (weight.x * row.y);
        sum[2] += part[2] * (weight.y * row.x), sum[3] += part[3] * (weight.y * row.y);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty + stage * 8);
    }
  }
  if constexpr (!kFp8) diagonal.take(sum, whole);
}

DEVICE float bf16_round(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// silu(gate) * up with the roundings of the two ops on bf16 tensors.
DEVICE float swiglu(float gate, float up) {
  gate = bf16_round(gate);
  return bf16_round(bf16_round(__fdividef(gate, 1.f + __expf(-gate))) * bf16_round(up));
}

DEVICE u32 packed_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// What a phase adds its product to: plain rows [num_rows, dim], or words of an epoch; or neither.
struct Residual {
  const bf16* x;
  const Word* words;
  u32 epoch;

  // Of the column and its neighbour (which only differ in the lowest bit).
  DEVICE float load(const Stack& s, int row, int column) const {
    if (x != nullptr) return __bfloat162float(x[row * s.dim + column]);
    if (words == nullptr) return 0.f;
    const Word* at = words + (row * s.dim + column) / 4 * 2;
    TwoWords pair[1];
    wait_for_words(pair, [&](int) { return at; }, epoch);
    const u32 values = static_cast<u32>(column % 4 < 2 ? pair[0].first : pair[0].second);
    return __uint_as_float(column % 2 == 0 ? values << 16 : values & 0xffff0000u);
  }
};

// All units of this CTA in a phase, over rows that are staged; into words of an epoch, or logits.
template <bool kFp8>
DEVICE void run_units(const Shared& shared, const Stack& s, int phase, int begin, int end,
                      const Residual& residual, Word* out, u32 epoch, u32& stages, int warp, int lane) {
  const int groups = s.groups(phase), finisher = threadIdx.x % 128;
  const int feature = finisher % kUnitRows, row = finisher / kUnitRows;
  const Diagonal diagonal(warp, lane);
  for (int unit = begin; unit < end; ++unit, stages += groups) {
    const bool finishes = unit % WARPGROUPS == warp / 4 && finisher < kUnitRows * ROWS;
    const bool is_mine = finishes && row < s.num_rows;
    const float addend = is_mine ? residual.load(s, row, unit * kUnitRows + feature) : 0.f;
    float sum[4];
    multiply_unit<kFp8>(sum, shared, stages, groups, diagonal, warp, lane);
    float* buffer = shared.partial + unit % 2 * (kWarps * ROWS * kUnitRows);
    if (diagonal.is_mine) {
      float* mine = buffer + (warp * ROWS + diagonal.row) * kUnitRows + lane / 4;
      mine[0] = sum[0], mine[kUnitRows] = sum[1], mine[8] = sum[2], mine[kUnitRows + 8] = sum[3];
    }
    consumers_sync();
    if (!finishes) continue;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += buffer[i * (ROWS * kUnitRows) + finisher];
    if (phase == kHead) {
      const int logit = unit * kUnitRows + feature, stream = row / s.num_positions;
      if (is_mine && logit < s.num_logits && row % s.num_positions == s.num_positions - 1)
        s.logits[stream * s.num_logits + logit] = __float2bfloat16_rn(total);
      continue;
    }
    const int per_unit = phase == kGateUp ? kUnitRows / 2 : kUnitRows;  // columns of `out`
    const int columns = phase == kGateUp ? s.ffn : s.features(phase);
    if (phase == kGateUp) total = swiglu(total, __shfl_down_sync(~0u, total, 8));
    if (phase == kWo || phase == kDown) total = bf16_round(total) + addend;
    const float next = __shfl_down_sync(~0u, total, 1);
    if (is_mine && feature < per_unit && feature % 2 == 0)
      store_word(out + (row * columns + unit * per_unit + feature) / 2,
                 word_of(packed_bf16(total, next), epoch));
  }
}

}  // namespace
