// RMSNorm between two linears without a kernel of its own. The first, NORMS, ends with its rows times the
// norm's weight, quantised per 128 columns, which a cluster has, and with the sums of the rows' squares;
// only all columns of a row tell its factor. The second, SCALES_ROWS, multiplies its sums by it.
#pragma once

#include "linear_wide_epilogue.cuh"
#include "quantize.cuh"

namespace {

// What SCALES_ROWS reads and NORMS writes: squares summed per 128 columns, [columns / 128, stride] floats.
struct Norms {
  const float* squares;
  float eps;
  const bf16* weight;  // [N]
  u8* values;          // e4m3 [M, N]
  float *scales, *new_squares;
  int stride;  // rows up to a multiple of four

  // Leaves the rows of one CTA.
  DEVICE void skip_rows(int first, int num_features) {
    squares += first;
    values += static_cast<i64>(first) * num_features;
    scales += first, new_squares += first;
  }
};

#if SCALES_ROWS

// 1 / rms of a thread's two rows; those behind the last are that row's.
DEVICE float2 factors_of(const Norms& norms, int num_rows, const Place& at) {
  constexpr int kGroups = (IN_FEATURES + 127) / 128;
  const float* upper = norms.squares + min(at.row, num_rows - 1);
  const float* lower = norms.squares + min(at.row + 8, num_rows - 1);
  const float2 parts = {sum_of_every_fourth(upper, kGroups, norms.stride, at.lane),
                        sum_of_every_fourth(lower, kGroups, norms.stride, at.lane)};
  return {inverse_rms(parts.x, IN_FEATURES, norms.eps), inverse_rms(parts.y, IN_FEATURES, norms.eps)};
}

#endif

#if NORMS

DEVICE uint4 load_norm_weight(const Norms& norms, const Output& o, int first, int rank, int thread) {
  return *reinterpret_cast<const uint4*>(norms.weight + item_of(0, o, first, rank, thread).feature);
}

// Scales and squares behind the last row, up to a multiple of four, are zeros. `scratch`: a float2 for
// each row that this CTA finishes and each of the four warps that have parts of it.
DEVICE void store_normed(const float4* exchange, const uint4& residual, const uint4& weight,
                         float2* scratch, const Output& o, const Norms& norms, int first, int rank,
                         int thread) {
  const Item item = item_of(0, o, first, rank, thread);
  float values[8] = {}, most = 0, squares = 0;
  if (item.is_inside) {
    const Vector8 x = {summed(exchange, residual, o, item)}, factors = {weight};
    store_item(x.vector, o, item);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = __bfloat162float(x.values[j]);
    squares = sum_of_squares({values[0], values[1], values[2], values[3]}) +
              sum_of_squares({values[4], values[5], values[6], values[7]});
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[j] *= __bfloat162float(factors.values[j]);  // exact
      most = fmaxf(most, fabsf(values[j]));
    }
  }
  // A warp has 8 rows of 4 items each.
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    squares += __shfl_xor_sync(~0u, squares, lanes);
  }
  const int row = thread / 128 * 8 + item.row_in_tile;  // of those that this CTA finishes
  if (thread % 32 < 8) scratch[row * 4 + thread / 32 % 4] = {most, squares};
  consumers_sync();
  float2 parts[4];
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) parts[warp] = scratch[row * 4 + warp];
  most = fmaxf(fmaxf(parts[0].x, parts[1].x), fmaxf(parts[2].x, parts[3].x));
  const float factor = 448.f / fmaxf(most, 1e-10f);
  if (item.is_inside) {
    const i64 index = static_cast<i64>(item.row) * o.num_features + item.feature;
    *reinterpret_cast<uint2*>(norms.values + index) =
        make_uint2(quantized_four({values[0], values[1], values[2], values[3]}, factor),
                   quantized_four({values[4], values[5], values[6], values[7]}, factor));
  }
  if (thread % 128 < 8 && item.row < (o.num_rows + 3) / 4 * 4) {
    const i64 index = static_cast<i64>(first / 128) * norms.stride + item.row;
    norms.scales[index] = item.row < o.num_rows ? 1.f / factor : 0.f;
    norms.new_squares[index] = (parts[0].y + parts[1].y) + (parts[2].y + parts[3].y);
  }
}

#endif

}  // namespace
