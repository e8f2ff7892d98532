// Attention of up to eight queries of one key/value head over tiles of 16 positions, by one warp.
#pragma once

#include "tile.cuh"

constexpr int COLUMNS = 8;  // queries of a warp: of an mma
constexpr float LOWEST = -3e38f;  // below every score, and finite

// Of a position that does not count: its weight is 0 whatever else there is.
DEVICE float no_score() { return __int_as_float(0xff800000); }

// 0 below the normal numbers, of which exp2f takes care.
DEVICE float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

DEVICE u32 transposed_8x8(u32 matrix) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// Where a row of attention output goes: bf16 [M, heads * D], or e4m3 with a scale per 128 values
// (D = 128: one head), scales K-major [heads, padded rows].
struct HeadOutput {
  bf16* values;
  u8* quantised;  // null: bf16
  float* scales;
  int num_rows, num_heads;

  DEVICE i64 at(int row, int head, int head_dim) const {
    return (static_cast<i64>(row) * num_heads + head) * head_dim;
  }

  // By one lane of a warp whose other lanes, from 1 on, are `lane`: the scale, and zeros behind the
  // last row.
  DEVICE void store_scale(int row, int head, float scale, int lane) const {
    const int padded = (num_rows + 3) / 4 * 4;
    if (lane == 0) scales[head * padded + row] = scale;
    if (row == num_rows - 1 && lane > 0 && row + lane < padded) scales[head * padded + row + lane] = 0;
  }
};

DEVICE float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// Factor onto the range of e4m3, of values up to `top`.
DEVICE float e4m3_factor(float top) { return 448.f / fmaxf(top, 1e-10f); }

DEVICE u32 e4m3_of(float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }

DEVICE u32 four_e4m3(float a, float b, float c, float d, float factor) {
  return e4m3_of(a * factor) | e4m3_of(b * factor) << 8 | e4m3_of(c * factor) << 16 |
         e4m3_of(d * factor) << 24;
}

// Stores one head of one row, which the lanes of a warp hold as D / 32 neighbouring values each.
template <int D>
DEVICE void store_head(const HeadOutput& out, int row, int head, const float (&values)[D / 32], int lane) {
  const i64 at = out.at(row, head, D) + lane * (D / 32);
  if (out.quantised == nullptr) {
    u32* target = reinterpret_cast<u32*>(out.values + at);
#pragma unroll
    for (int i = 0; i < D / 64; i++) target[i] = packed(values[2 * i], values[2 * i + 1]);
    return;
  }
  if constexpr (D == 128) {
    float exact[4], top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) exact[i] = rounded(values[i]), top = fmaxf(top, fabsf(exact[i]));
    const float factor = e4m3_factor(warp_max(top));
    *reinterpret_cast<u32*>(out.quantised + at) =
        four_e4m3(exact[0], exact[1], exact[2], exact[3], factor);
    out.store_scale(row, head, 1.f / factor, lane);
  }
}

// Where a warp's part of a query goes: addresses (shared::cluster) of its sums [D] and of its (best,
// total), and of the barrier that counts the bytes, 0: none does.
struct Place {
  u32 sums, state, counter;

  DEVICE void put_state(float best, float total) const {
    if (counter != 0)
      cluster_send2(state, best, total, counter);
    else
      cluster_store2(state, best, total);
  }
  DEVICE void put_sums(int at, float x, float y, float z, float w) const {
    if (counter != 0)
      cluster_send4(sums + at * 4, x, y, z, w, counter);
    else
      cluster_store4(sums + at * 4, x, y, z, w);
  }
};

// Softmax state of a warp's queries; lane columns are 2 (lane % 4) and the next.
template <typename Tile>
struct Accumulator {
  static constexpr int D = Tile::D;
  const bf16* query;        // of column lane / 4, as `Tile::query` has them; registers are scarce
  float sums[D / 16][4];    // weighted values, see `sum`
  float best[2], total[2];  // largest score; sum of weights, of this lane's rows only
  u32 weights[2];           // of the tile at hand, in pairs, as the second mma reads them

  // `queries`: rows in shared memory; columns past the last repeat others, nobody reads them.
  DEVICE void init(const bf16* queries) {
    query = queries;
#pragma unroll
    for (int i = 0; i < D / 16; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
    best[0] = best[1] = LOWEST;
    total[0] = total[1] = 0;
  }

  // Scores of a tile. Its rows past `last_rows` of this lane's columns do not count.
  DEVICE void add_keys(const Tile& tile, float scale_log2, const int (&last_rows)[2], int lane) {
    float scores[4] = {}, other[4] = {};  // (row, column), (row, next), (row + 8, ..), (row + 8, ..)
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const uint4 q = *reinterpret_cast<const uint4*>(query + Tile::query_offset(j, lane));
      u32 a[4];
      tile.key_operand(a, 2 * j);
      Tile::mma(scores, a, q.x, q.y);
      tile.key_operand(a, 2 * j + 1);
      Tile::mma(other, a, q.z, q.w);  // two chains, half as long
    }
    const RowScales scales = tile.scales_of(scale_log2, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] += other[i];
#pragma unroll
    for (int i = 0; i < 4; i++)
      scores[i] = key_row(lane, i / 2) <= last_rows[i % 2]
                      ? scores[i] * scales.factor[i / 2] + scales.bias[i / 2]
                      : no_score();
    float factor[2];
#pragma unroll
    for (int column = 0; column < 2; column++) {
      float top = fmaxf(scores[column], scores[2 + column]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      top = fmaxf(top, best[column]);
      factor[column] = power_of_2(best[column] - top);
      best[column] = top;
      scores[column] = power_of_2(scores[column] - top);
      scores[2 + column] = power_of_2(scores[2 + column] - top);
      total[column] = total[column] * factor[column] + scores[column] * scales.unbias[0] +
                      scores[2 + column] * scales.unbias[1];
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      sums[i][0] *= factor[0], sums[i][1] *= factor[1];
      sums[i][2] *= factor[0], sums[i][3] *= factor[1];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      weights[half] = transposed_8x8(Tile::weight_pair(scores[2 * half], scores[2 * half + 1]));
  }

  DEVICE void add_values(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      u32 a[4];
      tile.value_operand(a, i);
      Tile::mma(sums[i], a, weights[0], weights[1]);
    }
  }

  // Sums of the weights over all rows, into every lane of the column.
  DEVICE void reduce_totals() {
#pragma unroll
    for (int column = 0; column < 2; column++)
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        total[column] += __shfl_xor_sync(~0u, total[column], lanes);
  }

  // Value `i` of chunk `j` of a column: dimension `Tile::dimension(j, lane)` + i.
  DEVICE float sum(int column, int j, int i) const { return sums[4 * j + i / 2][2 * (i % 2) + column]; }

  // Hands the partial results of some columns to `merge`.
  //   wants: whether a column; place_of: its `Place`.
  template <typename Wants, typename PlaceOf>
  DEVICE void store(int lane, Wants wants, PlaceOf place_of) {
    reduce_totals();
#pragma unroll
    for (int column = 0; column < 2; column++) {
      const int query = lane % 4 * 2 + column;
      if (!wants(query)) continue;
      const Place place = place_of(query);
      if (lane / 4 == 0) place.put_state(best[column], total[column]);
#pragma unroll
      for (int j = 0; j < D / 64; j++)
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          place.put_sums(Tile::dimension(j, lane) + i, sum(column, j, i), sum(column, j, i + 1),
                         sum(column, j, i + 2), sum(column, j, i + 3));
    }
  }

  // Where no other warp has a part: stores `num_queries` columns as heads of a row.
  DEVICE void finish(const HeadOutput& out, int row, int first_head, int num_queries, int lane) {
    reduce_totals();
#pragma unroll
    for (int column = 0; column < 2; column++) {
      const int query = lane % 4 * 2 + column;
      const i64 at = out.at(row, first_head + query, D);
      const float inverse = 1.f / total[column];
      float top = 0;
#pragma unroll
      for (int j = 0; j < D / 64; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(rounded(sum(column, j, i) * inverse)));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      if (query >= num_queries) continue;
      const float factor = e4m3_factor(top);
#pragma unroll
      for (int j = 0; j < D / 64; j++) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = sum(column, j, i) * inverse;
        if (out.quantised == nullptr) {
          *reinterpret_cast<uint4*>(out.values + at + Tile::dimension(j, lane)) = make_uint4(
              packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7]));
        } else {
#pragma unroll
          for (int i = 0; i < 8; i++) v[i] = rounded(v[i]);
          *reinterpret_cast<uint2*>(out.quantised + at + Tile::dimension(j, lane)) = make_uint2(
              four_e4m3(v[0], v[1], v[2], v[3], factor), four_e4m3(v[4], v[5], v[6], v[7], factor));
        }
      }
      if (out.quantised != nullptr)
        out.store_scale(row, first_head + query, 1.f / factor, lane / 4);
    }
  }
};
