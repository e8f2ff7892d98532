// The right operand of a phase: every CTA normalises, or only quantises, all rows for itself.
#pragma once

#include "persistent_shape.cuh"

namespace {

// Eight neighbouring values of a row into the operand, if they are inside. Whole warps call this, for
// whole groups of 128. Without branches, so that the latencies of several calls overlap.
template <bool kFp8>
DEVICE void put(const Shared& shared, const Bf16x8& values, int row, int column, bool is_inside) {
  const int tile = column / kPerTile<kFp8>, byte = column % kPerTile<kFp8> * (kFp8 ? 1 : 2);
  const int line = tile % kTilesPerStage * ROWS + row;
  u8* target = shared.operand + tile / kTilesPerStage * kGroupBytes + line * 128 +
               (byte / 16 ^ line % 8) * 16 + byte % 16;
  if constexpr (kFp8) {
    float exact[8];
    unpack(exact, values);
    const Quantised group = quantize_group(exact);
    if (is_inside) *reinterpret_cast<uint2*>(target) = group.values;
    if (is_inside && byte == 0) shared.row_scales[tile * ROWS + row] = group.scale;
  } else {
    if (is_inside) *reinterpret_cast<Bf16x8*>(target) = values;
  }
}

// RMSNorm of all rows: of plain `x`, or of words of an epoch; also to `out`, unless that is null.
template <bool kFp8>
DEVICE void stage_normed_rows(const Shared& shared, const Stack& s, const bf16* weight, const bf16* x,
                              const Word* words, u32 epoch, bf16* out) {
  const int thread = threadIdx.x;
  Bf16x8 weights[NORM_ITEMS] = {}, inputs[ROWS][NORM_ITEMS] = {};
#pragma unroll
  for (int item = 0; item < NORM_ITEMS; ++item) {
    const int column = (item * kConsumers + thread) * 8;
    if (column < s.dim) weights[item] = *reinterpret_cast<const Bf16x8*>(weight + column);
  }
  mark(s, 100);
  const auto index_of = [&](int i) {  // of item i % NORM_ITEMS of row i / NORM_ITEMS; -1: there is none
    const int row = i / NORM_ITEMS, column = (i % NORM_ITEMS * kConsumers + thread) * 8;
    return row < s.num_rows && column < s.dim ? row * s.dim + column : -1;
  };
  if (x != nullptr) {
#pragma unroll
    for (int i = 0; i < ROWS * NORM_ITEMS; ++i)
      if (index_of(i) >= 0)
        inputs[i / NORM_ITEMS][i % NORM_ITEMS] = *reinterpret_cast<const Bf16x8*>(x + index_of(i));
  } else {
    TwoWords loaded[2 * ROWS * NORM_ITEMS] = {};
    wait_for_words(
        loaded,
        [&](int i) { return index_of(i / 2) < 0 ? nullptr : words + index_of(i / 2) / 2 + i % 2 * 2; },
        epoch);
#pragma unroll
    for (int i = 0; i < ROWS * NORM_ITEMS; ++i)
      inputs[i / NORM_ITEMS][i % NORM_ITEMS] = values_of(loaded[2 * i], loaded[2 * i + 1]);
  }
  mark(s, 101);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int item = 0; item < NORM_ITEMS; ++item) {
      float values[8];
      unpack(values, inputs[row][item]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) shared.sums[row * kWarps + thread / 32] = sum;
  }
  consumers_sync();
  mark(s, 106);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row >= s.num_rows) break;
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared.sums[row * kWarps + warp];
    const float factor = rsqrtf(total / s.dim + s.eps);
#pragma unroll
    for (int item = 0; item < NORM_ITEMS; ++item) {
      const int column = (item * kConsumers + thread) * 8;
      const bool is_inside = column < s.dim;
      float values[8];
      unpack(values, inputs[row][item]);
      const Bf16x8 normed = scale_rounded(values, factor, weights[item]);
      put<kFp8>(shared, normed, row, column, is_inside);
      if (out != nullptr && is_inside) *reinterpret_cast<Bf16x8*>(out + row * s.dim + column) = normed;
    }
  }
  fence_async_proxy();
  consumers_sync();
}

// Rows of words [num_rows, columns / 2] of an epoch, as they are.
DEVICE void stage_rows(const Shared& shared, const Stack& s, const Word* words, int columns, u32 epoch) {
  constexpr int kAtOnce = 4;
  mark(s, 100);
  for (int row = 0; row < s.num_rows; ++row, words += columns / 2)
    for (int first = threadIdx.x * 8; first < columns; first += kAtOnce * kConsumers * 8) {
      TwoWords loaded[2 * kAtOnce] = {};
      wait_for_words(
          loaded,
          [&](int i) {
            const int column = first + i / 2 * kConsumers * 8;
            return column < columns ? words + column / 2 + i % 2 * 2 : nullptr;
          },
          epoch);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = first + i * kConsumers * 8;
        put<IS_FP8>(shared, values_of(loaded[2 * i], loaded[2 * i + 1]), row, column, column < columns);
      }
    }
  mark(s, 101);
  fence_async_proxy();
  consumers_sync();
}

}  // namespace
