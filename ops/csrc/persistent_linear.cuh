// Weights through the ring, and units of 16 of their rows times all rows.
//
// A stage is the 16 rows of a unit in four neighbouring K tiles: as 64 rows of a left operand, 16 per
// K tile. The right operand holds the same four K tiles of every row as columns of their own, so of the
// 4 x 4 blocks of the product the diagonal counts: warp q of a warpgroup keeps the sums of K tile q.
// So a CTA has all of K of few rows of the weight, and no sums cross CTAs.
#pragma once

#include "persistent_shape.cuh"

namespace {

// How a warpgroup's share of a phase is cut. Deep matrices have few units, so all warpgroups share each
// and take groups of K tiles in turn; of the others each takes units in turn, and needs nobody else.
struct Share {
  int unit_step, first_group, group_step, unit_offset;

  DEVICE Share(int phase, int warpgroup) {
    const bool is_split = phase == kWo || phase == kDown;
    unit_offset = is_split ? 0 : warpgroup, unit_step = is_split ? 1 : WARPGROUPS;
    first_group = is_split ? warpgroup : 0, group_step = is_split ? WARPGROUPS : 1;
  }
  DEVICE bool is_split() const { return group_step > 1 || WARPGROUPS == 1; }
};

// Walks a warpgroup's stages through all layers and phases in the order in which they are consumed.
struct Cursor {
  const Stack& s;
  const int warpgroup;
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
      unit = begin[0] + Share(phase, warpgroup).unit_offset, end = begin[1];
    } while (unit >= end);
    groups = s.groups(phase), group = Share(phase, warpgroup).first_group;
    tiles = phase == kHead ? s.head : s.layers[layer].tiles[phase];
    scales = s.is_fp8(phase) ? s.layers[layer].scales[phase] : nullptr;
  }

  DEVICE void advance() {
    const Share share(phase, warpgroup);
    group += share.group_step;
    if (group < groups) return;
    group = share.first_group, unit += share.unit_step;
    if (unit >= end) next_phase();
  }

  DEVICE i64 first_tile() const {
    return (static_cast<i64>(unit / 4) * groups + group) * kTilesPerStage;
  }
  DEVICE const u8* slice(int i) const {
    return tiles + (first_tile() + i) * kTileBytes + unit % 4 * kSliceBytes;
  }
};

// A place in a warpgroup's ring, and how often it was passed, by its parity.
struct Stage {
  int index, parity = 0;
  const int first;

  DEVICE explicit Stage(int warpgroup) : index(warpgroup * STAGES), first(warpgroup * STAGES) {}
  DEVICE void advance() {
    if (++index == first + STAGES) index = first, parity ^= 1;
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

// One thread's work: keeps a warpgroup's ring full, whatever that waits for.
DEVICE void produce(const Shared& shared, const Stack& s, int warpgroup) {
  const u64 policy = evict_first();
  Cursor at = {s, warpgroup};
  Stage stage(warpgroup);
  at.next_phase();
  for (int count = 0; !at.is_over(); ++count, stage.advance(), at.advance()) {
    const u32 barrier = shared.full + stage.index * 8;
    if (count >= STAGES) barrier_wait(shared.empty + stage.index * 8, stage.parity ^ 1);
    const bool is_scaled = s.is_fp8(at.phase);
    barrier_expect(barrier, kStageBytes + (is_scaled ? kTilesPerStage * 8 : 0));
#pragma unroll
    for (int i = 0; i < kTilesPerStage; ++i)
      copy_slice(shared.ring + stage.index * kStageBytes + i * kSliceBytes, at.slice(i), barrier, policy);
    if (is_scaled)
      bulk_copy(shared_address(shared.tile_scales + stage.index * kTilesPerStage),
                at.scales + at.first_tile() * 2, kTilesPerStage * 8, barrier);
  }
}

// `tile_descriptor` in two halves, of which the higher is the same for all tiles.
DEVICE u32 low_descriptor(u32 address) { return static_cast<u32>(tile_descriptor(address)); }
DEVICE u64 descriptor_of(u32 low) { return tile_descriptor(0) >> 32 << 32 | low; }

// `weights`, `rows`: low halves of descriptors.
template <bool kFp8>
DEVICE void multiply(float (&d)[kColumns / 2], u32 weights, u32 rows, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    Wgmma<kFp8, kColumns>::run(d, descriptor_of(weights + 2 * k), descriptor_of(rows + 2 * k),
                               accumulate || k > 0);
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

// A lane's sums of one unit over its warpgroup's groups of K tiles: rows (0, 1) of x of weight row
// lane / 4, then of lane / 4 + 8.
template <bool kFp8>
DEVICE void multiply_unit(float (&sum)[4], const Shared& shared, Stage& stage, const Share& share,
                          int groups, const Diagonal& diagonal, int warp, int lane) {
#ifdef BATCH
  constexpr int kBatch = BATCH;
#else
  constexpr int kBatch = 5;
#endif
  float whole[kColumns / 2] = {};
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
  const u32 operand = low_descriptor(shared_address(shared.operand)), ring = low_descriptor(shared.ring);
  const float2* tile_scales = shared.tile_scales + warp % 4;
  const float* row_scales = shared.row_scales + warp % 4 * ROWS + diagonal.row;
#pragma unroll 1
  for (int first = share.first_group; first < groups; first += share.group_step * kBatch) {
    float parts[kFp8 ? kBatch : 1][kColumns / 2];
    Stage done = stage;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = first + i * share.group_step;
      if (group >= groups) break;
      barrier_wait(shared.full + stage.index * 8, stage.parity);
      const u32 weights = ring + stage.index * (kStageBytes / 16), rows = operand + group * (kGroupBytes / 16);
      if constexpr (kFp8)
        multiply<true>(parts[i], weights, rows, false);
      else
        multiply<false>(whole, weights, rows, true);
      stage.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = first + i * share.group_step;
      if (group >= groups) break;
      if constexpr (kFp8) {
        const float2 weight = tile_scales[done.index * kTilesPerStage];
        const float2 row =
            *reinterpret_cast<const float2*>(row_scales + group * (kTilesPerStage * ROWS));
        float part[4];
        diagonal.take(part, parts[i]);
        sum[0] += part[0] * (weight.x * row.x), sum[1] += part[1] * (weight.x * row.y);
        sum[2] += part[2] * (weight.y * row.x), sum[3] += part[3] * (weight.y * row.y);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty + done.index * 8);
      done.advance();
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

  DEVICE const Word* at(const Stack& s, int row, int column) const {
    return words + (row * s.dim + column) / 4 * 2;
  }
  // Asked for early, taken when the product is there.
  DEVICE TwoWords ask(const Stack& s, int row, int column) const {
    return words != nullptr ? load_two_words(at(s, row, column)) : TwoWords{};
  }
  DEVICE float take(TwoWords asked, const Stack& s, int row, int column) const {
    if (x != nullptr) return __bfloat162float(x[row * s.dim + column]);
    if (words == nullptr) return 0.f;
    TwoWords pair[1] = {asked};
    if (!asked.is_of(epoch)) wait_for_words(pair, [&](int) { return at(s, row, column); }, epoch);
    const u32 values = static_cast<u32>(column % 4 < 2 ? pair[0].first : pair[0].second);
    return __uint_as_float(column % 2 == 0 ? values << 16 : values & 0xffff0000u);
  }
};

DEVICE void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
}

// All units of this CTA in a phase, over rows that are staged; into words of an epoch, or logits.
template <bool kFp8>
DEVICE void run_units(const Shared& shared, const Stack& s, int phase, int begin, int end,
                      const Residual& residual, Word* out, u32 epoch, Stage& stage, int warp, int lane) {
  constexpr int kPartial = ROWS * kUnitRows;  // sums of a warp
  const int groups = s.groups(phase), finisher = threadIdx.x % 128, warpgroup = warp / 4;
  const int feature = finisher % kUnitRows, row = finisher / kUnitRows;
  const int per_unit = phase == kGateUp ? kUnitRows / 2 : kUnitRows;  // columns of `out`
  const int columns = phase == kGateUp ? s.ffn : s.features(phase);
  const Diagonal diagonal(warp, lane);
  const Share share(phase, warpgroup);
  int buffer = 0;
  for (int unit = begin + share.unit_offset; unit < end; unit += share.unit_step, buffer ^= 1) {
    const bool finishes =
        finisher < kPartial && (!share.is_split() || unit % WARPGROUPS == warpgroup);
    const bool is_mine = finishes && row < s.num_rows;
    const int column = unit * kUnitRows + feature;
    const TwoWords addend = is_mine ? residual.ask(s, row, column) : TwoWords{};
    float sum[4];
    multiply_unit<kFp8>(sum, shared, stage, share, groups, diagonal, warp, lane);
    float* partial = shared.partial + buffer * (kWarps * kPartial);
    if (diagonal.is_mine) {
      float* mine = partial + (warp * ROWS + diagonal.row) * kUnitRows + lane / 4;
      mine[0] = sum[0], mine[kUnitRows] = sum[1], mine[8] = sum[2], mine[kUnitRows + 8] = sum[3];
    }
    if (share.is_split())
      consumers_sync();
    else
      warpgroup_sync(warpgroup);
    if (!finishes) continue;
    float total = 0.f;
    if (share.is_split()) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += partial[i * kPartial + finisher];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) total += partial[(warpgroup * 4 + i) * kPartial + finisher];
    }
    if (phase == kHead) {
      const int stream = row / s.num_positions;
      if (is_mine && column < s.num_logits && row % s.num_positions == s.num_positions - 1)
        s.logits[stream * s.num_logits + column] = __float2bfloat16_rn(total);
      continue;
    }
    if (phase == kGateUp) total = swiglu(total, __shfl_down_sync(~0u, total, 8));
    if ((phase == kWo || phase == kDown) && is_mine)
      total = bf16_round(total) + residual.take(addend, s, row, column);
    const float next = __shfl_down_sync(~0u, total, 1);
    if (is_mine && feature < per_unit && feature % 2 == 0)
      store_word(out + (row * columns + unit * per_unit + feature) / 2,
                 word_of(packed_bf16(total, next), epoch));
  }
}

}  // namespace
