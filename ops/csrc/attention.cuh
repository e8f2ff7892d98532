// Attention of up to eight queries of one key/value head over tiles of 16 positions, by one warp.
//
// Scores are computed transposed, K Q^T and V^T P^T, so that the 16 rows of an mma are positions (or
// dimensions) and its 8 columns are queries. The order of the summed index is free as long as both
// operands agree, so every lane loads 16 contiguous bytes of keys and values straight into the
// registers that the mma reads: no shared memory, no barrier, and the next tile's loads are in
// flight while this one is computed.
#pragma once

#include "heads.cuh"

constexpr int TILE = 16;    // positions
constexpr int COLUMNS = 8;  // queries of a warp
constexpr float LOWEST = -3e38f;  // below every score, and finite

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 transposed_8x8(u32 matrix) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// Keys and values may be written by a kernel that overlaps this one, so they bypass the L1.
DEVICE uint4 load_memory(const bf16* address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Position in the tile of lane-held row `i` of the keys (i < 2) and of the values (i < 4).
DEVICE int key_row(int lane, int i) { return lane / 4 + 8 * i; }
DEVICE int value_row(int lane, int i) { return lane % 4 * 2 + i % 2 + 8 * (i / 2); }

template <int D>
struct Tile {
  uint4 keys[2][D / 32];    // of row key_row(i): dimensions 32 j + 8 (lane % 4) and on
  uint4 values[4][D / 64];  // of row value_row(i): dimensions 64 j + 8 (lane / 4) and on

  // `keys_at`, `values_at`: row 0 of the tile; rows past `last_row` repeat it.
  DEVICE void load_keys(const bf16* keys_at, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bf16* row = keys_at + min(key_row(lane, i), last_row) * D + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < D / 32; j++) keys[i][j] = load_memory(row + 32 * j);
    }
  }

  DEVICE void load_values(const bf16* values_at, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bf16* row = values_at + min(value_row(lane, i), last_row) * D + lane / 4 * 8;
#pragma unroll
      for (int j = 0; j < D / 64; j++) values[i][j] = load_memory(row + 64 * j);
    }
  }

  // Rows from `first` on come from shared memory instead: `new_keys`, `new_values` [n, D] hold rows
  // first..last_row, rows past that repeat it.
  DEVICE void patch(const bf16* new_keys, const bf16* new_values, int first, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = min(key_row(lane, i), last_row) - first;
#pragma unroll
      for (int j = 0; j < D / 32; j++)
        if (row >= 0)
          keys[i][j] = *reinterpret_cast<const uint4*>(new_keys + row * D + 32 * j + lane % 4 * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = min(value_row(lane, i), last_row) - first;
#pragma unroll
      for (int j = 0; j < D / 64; j++)
        if (row >= 0)
          values[i][j] = *reinterpret_cast<const uint4*>(new_values + row * D + 64 * j + lane / 4 * 8);
    }
  }
};

// Where a row of attention output goes: bf16 [M, heads * D], or e4m3 with a scale per 128 values
// (D = 128: one head), scales K-major [heads, padded rows].
struct Output {
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
DEVICE void store_head(const Output& out, int row, int head, const float (&values)[D / 32], int lane) {
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

// Softmax state of a warp's queries; lane columns are 2 (lane % 4) and the next.
template <int D>
struct Accumulator {
  const bf16* query;        // of column lane / 4, read again for every tile: registers are scarce
  float sums[D / 16][4];  // weighted values, see `sum`
  float best[2], total[2];  // largest score times scale; sum of weights, of this lane's rows only
  u32 weights[2];           // of the tile at hand, bf16 pairs, as the second mma reads them

  // `queries`: [GROUP, D] rows `stride` apart. Columns past the last repeat others; nobody reads them.
  DEVICE void init(const bf16* queries, int num_queries, int stride, int lane) {
    query = queries + lane / 4 % num_queries * stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < D / 16; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
    best[0] = best[1] = LOWEST;
    total[0] = total[1] = 0;
  }

  // Scores of a tile. Its rows past `last_rows` of this lane's columns do not count; a column for which
  // none does must have had one before, or be merged with a warp that has.
  DEVICE void add_keys(const Tile<D>& tile, float scale_log2, const int (&last_rows)[2], int lane) {
    float scores[4] = {}, other[4] = {};  // (row, column), (row, next), (row + 8, ..), (row + 8, ..)
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const uint4 q = *reinterpret_cast<const uint4*>(query + 32 * j);
      const u32 a[4] = {tile.keys[0][j].x, tile.keys[1][j].x, tile.keys[0][j].y, tile.keys[1][j].y};
      mma_bf16(scores, a, q.x, q.y);
      const u32 b[4] = {tile.keys[0][j].z, tile.keys[1][j].z, tile.keys[0][j].w, tile.keys[1][j].w};
      mma_bf16(other, b, q.z, q.w);  // two chains, half as long
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] += other[i];
#pragma unroll
    for (int i = 0; i < 4; i++)
      scores[i] = key_row(lane, i / 2) <= last_rows[i % 2] ? scores[i] * scale_log2 : LOWEST;
    float factor[2];
#pragma unroll
    for (int column = 0; column < 2; column++) {
      float top = fmaxf(scores[column], scores[2 + column]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      top = fmaxf(top, best[column]);
      factor[column] = exp2f(best[column] - top);
      best[column] = top;
      scores[column] = exp2f(scores[column] - top);
      scores[2 + column] = exp2f(scores[2 + column] - top);
      total[column] = total[column] * factor[column] + scores[column] + scores[2 + column];
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      sums[i][0] *= factor[0], sums[i][1] *= factor[1];
      sums[i][2] *= factor[0], sums[i][3] *= factor[1];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      weights[half] = transposed_8x8(packed(scores[2 * half], scores[2 * half + 1]));
  }

  DEVICE void add_values(const Tile<D>& tile) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      u32 rows[4];
#pragma unroll
      for (int row = 0; row < 4; row++) rows[row] = word(tile.values[row][i / 4], i % 4);
      const u32 a[4] = {
          __byte_perm(rows[0], rows[1], 0x5410), __byte_perm(rows[0], rows[1], 0x7632),
          __byte_perm(rows[2], rows[3], 0x5410), __byte_perm(rows[2], rows[3], 0x7632)};
      mma_bf16(sums[i], a, weights[0], weights[1]);
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

  // Value `i` of chunk `j` of a column: dimension 64 j + 8 (lane / 4) + i.
  DEVICE float sum(int column, int j, int i) const { return sums[4 * j + i / 2][2 * (i % 2) + column]; }

  // Hands the partial results of some columns to `merge`.
  //   wants: whether a column; place_of: addresses (shared::cluster) of its sums [D] and of its
  //   (best, total).
  template <typename Wants, typename PlaceOf>
  DEVICE void store(int lane, Wants wants, PlaceOf place_of) {
    reduce_totals();
#pragma unroll
    for (int column = 0; column < 2; column++) {
      const int query = lane % 4 * 2 + column;
      if (!wants(query)) continue;
      const uint2 place = place_of(query);
      if (lane / 4 == 0) cluster_store2(place.y, best[column], total[column]);
#pragma unroll
      for (int j = 0; j < D / 64; j++)
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          cluster_store4(place.x + (64 * j + lane / 4 * 8 + i) * 4, sum(column, j, i),
                         sum(column, j, i + 1), sum(column, j, i + 2), sum(column, j, i + 3));
    }
  }

  // Where no other warp has a part: stores `num_queries` columns as heads of a row.
  DEVICE void finish(const Output& out, int row, int first_head, int num_queries, int lane) {
    reduce_totals();
#pragma unroll
    for (int column = 0; column < 2; column++) {
      const int query = lane % 4 * 2 + column;
      const i64 at = out.at(row, first_head + query, D) + lane / 4 * 8;
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
          *reinterpret_cast<uint4*>(out.values + at + 64 * j) = make_uint4(
              packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7]));
        } else {
#pragma unroll
          for (int i = 0; i < 8; i++) v[i] = rounded(v[i]);
          *reinterpret_cast<uint2*>(out.quantised + at + 64 * j) = make_uint2(
              four_e4m3(v[0], v[1], v[2], v[3], factor), four_e4m3(v[4], v[5], v[6], v[7], factor));
        }
      }
      if (out.quantised != nullptr)
        out.store_scale(row, first_head + query, 1.f / factor, lane / 4);
    }
  }
};
