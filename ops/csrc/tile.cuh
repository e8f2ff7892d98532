// Tiles of 16 positions of keys and values, as the lanes of a warp hold them for their mma.
//
// Scores are computed transposed, K Q^T and V^T P^T, so that the 16 rows of an mma are positions (or
// dimensions) and its 8 columns are queries. The order of the summed index is free as long as both
// operands agree, so every lane loads contiguous bytes of keys and values straight into the registers
// that the mma reads: no barrier, and the next tile's loads are in flight while this one is computed. Tiles
// in 8 bits, and those that several rows share, come through ring.cuh.
#pragma once

#include "kv_rows.cuh"

constexpr int TILE = 16;  // positions

// Keys and values may be written by a kernel that overlaps this one, so they bypass the L1.
DEVICE uint4 load_memory(const void* address) {
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

// Of a lane's two key rows: score = dot product * factor + bias; the weights that come of it are those
// of the softmax over `unbias`.
struct RowScales {
  float factor[2], bias[2], unbias[2];
};

// Keys as a lane holds them: of row key_row(i) 16 bytes, 64 bytes apart from 16 (lane % 4) on.
template <int D, typename Element, int CHUNK = 16 / sizeof(Element)>
struct Keys {
  uint4 rows[2][D / (4 * CHUNK)];

  // `at`: row 0 of the tile; rows past `last_row` repeat it.
  DEVICE void load(const Element* at, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Element* row = at + min(key_row(lane, i), last_row) * D + lane % 4 * CHUNK;
#pragma unroll
      for (int j = 0; j < D / (4 * CHUNK); j++) rows[i][j] = load_memory(row + 4 * CHUNK * j);
    }
  }

  // Rows from `first` on come from shared memory instead: `source` holds rows first..last_row, rows past
  // that repeat it.
  DEVICE void patch(const Element* source, int first, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = min(key_row(lane, i), last_row) - first;
#pragma unroll
      for (int j = 0; j < D / (4 * CHUNK); j++)
        if (row >= 0)
          rows[i][j] = *reinterpret_cast<const uint4*>(source + row * D + 4 * CHUNK * j +
                                                       lane % 4 * CHUNK);
    }
  }
};

template <int HEAD>
struct Bf16Tile {
  static constexpr int D = HEAD;
  static constexpr int QUERY_STRIDE = D + 32;  // of queries in shared memory: apart by 16 banks
  using Rows = Bf16Rows<D>;
  Keys<D, bf16> keys;       // dimensions 32 j + 8 (lane % 4) and on
  uint4 values[4][D / 64];  // of row value_row(i): dimensions 64 j + 8 (lane / 4) and on

  static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  static DEVICE u32 weight_pair(float low, float high) { return packed(low, high); }

  // Eight values of a query as the mma reads them, and where those for keys 2 j and 2 j + 1 are.
  static DEVICE uint4 query(uint4 values) { return values; }
  static DEVICE int query_offset(int j, int lane) { return 32 * j + lane % 4 * 8; }

  // First of eight dimensions, chunk `j`, of the sums of a lane.
  static DEVICE int dimension(int j, int lane) { return 64 * j + lane / 4 * 8; }

  // `values_at`: as of `Keys`.
  DEVICE void load_values(const bf16* values_at, int last_row, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bf16* row = values_at + min(value_row(lane, i), last_row) * D + lane / 4 * 8;
#pragma unroll
      for (int j = 0; j < D / 64; j++) values[i][j] = load_memory(row + 64 * j);
    }
  }

  // Rows from `first` on come from shared memory instead, see `Keys`.
  DEVICE void patch(const Rows& new_keys, const Rows& new_values, int first, int last_row, int lane) {
    keys.patch(new_keys.data, first, last_row, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = min(value_row(lane, i), last_row) - first;
#pragma unroll
      for (int j = 0; j < D / 64; j++)
        if (row >= 0)
          values[i][j] =
              *reinterpret_cast<const uint4*>(new_values.data + row * D + 64 * j + lane / 4 * 8);
    }
  }

  DEVICE void key_operand(u32 (&a)[4], int step) const {
    const uint4 &low = keys.rows[0][step / 2], &high = keys.rows[1][step / 2];
    a[0] = word(low, step % 2 * 2), a[1] = word(high, step % 2 * 2);
    a[2] = word(low, step % 2 * 2 + 1), a[3] = word(high, step % 2 * 2 + 1);
  }

  DEVICE void value_operand(u32 (&a)[4], int step) const {
    u32 rows[4];
#pragma unroll
    for (int row = 0; row < 4; row++) rows[row] = word(values[row][step / 4], step % 4);
    a[0] = __byte_perm(rows[0], rows[1], 0x5410), a[1] = __byte_perm(rows[0], rows[1], 0x7632);
    a[2] = __byte_perm(rows[2], rows[3], 0x5410), a[3] = __byte_perm(rows[2], rows[3], 0x7632);
  }

  DEVICE RowScales scales_of(float scale_log2, int) const {
    return {{scale_log2, scale_log2}, {0, 0}, {1, 1}};
  }
};

// e4m3 becomes f16, exactly. A weight times its value's scale might leave the range of f16, so the
// scale goes into the exponent, as a bias of the score, and the sum of weights is taken without it.
template <int HEAD>
struct Fp8Tile {
  static constexpr int D = HEAD;
  static constexpr int QUERY_STRIDE = D + 8;  // of queries in shared memory: apart by 4 banks
  using Rows = Fp8Rows<D>;
  Keys<D, u8> keys;        // dimensions 64 j + 16 (lane % 4) and on
  u32 values[4][D / 32];   // of row value_row(i): dimensions D / 8 (lane / 4) and on
  u32 scale;               // bits of bf16: of key `lane`, from lane 16 on of value lane - 16

  static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  static DEVICE u32 weight_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }

  // Beyond the range of f16 queries end at its ends; below, what is lost is less than 2^-25.
  static DEVICE uint4 query(uint4 values) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpacked(word(values, i));
      pairs[i] = weight_pair(clamped(pair.x), clamped(pair.y));
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  static DEVICE float clamped(float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; }
  static DEVICE int query_offset(int j, int lane) { return 64 * (j / 2) + lane % 4 * 16 + j % 2 * 8; }
  static DEVICE int dimension(int j, int lane) { return lane / 4 * (D / 8) + 8 * j; }

  DEVICE void patch(const Rows& new_keys, const Rows& new_values, int first, int last_row, int lane) {
    keys.patch(new_keys.data, first, last_row, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = min(value_row(lane, i), last_row) - first;
#pragma unroll
      for (int j = 0; j < D / 32; j++)
        if (row >= 0)
          values[i][j] = *reinterpret_cast<const u32*>(new_values.data + row * D +
                                                       lane / 4 * (D / 8) + 4 * j);
    }
    const int row = min(lane % 16, last_row) - first;
    if (row >= 0) scale = __bfloat16_as_ushort((lane < 16 ? new_keys : new_values).scales[row]);
  }

  // Two of the four e4m3 of a word as f16: the lower or the upper.
  static DEVICE u32 halves(u32 word, bool is_upper) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(pair)
        : "h"(static_cast<unsigned short>(is_upper ? word >> 16 : word)));
    return pair;
  }

  DEVICE void key_operand(u32 (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = halves(word(keys.rows[i % 2][step / 4], step % 4), i >= 2);
  }

  DEVICE void value_operand(u32 (&a)[4], int step) const {
    const int order = step % 2 == 0 ? 0x5140 : 0x7362;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 pairs =
          __byte_perm(values[2 * half][step / 2], values[2 * half + 1][step / 2], order);
      a[2 * half] = halves(pairs, false), a[2 * half + 1] = halves(pairs, true);
    }
  }

  DEVICE RowScales scales_of(float scale_log2, int lane) const {
    RowScales scales;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 of_key = __shfl_sync(~0u, scale, key_row(lane, i));
      const float of_value = __uint_as_float(__shfl_sync(~0u, scale, 16 + key_row(lane, i)) << 16);
      scales.factor[i] = __uint_as_float(of_key << 16) * scale_log2;
      scales.bias[i] = __log2f(of_value);
      scales.unbias[i] = __fdividef(1.f, of_value);
    }
    return scales;
  }
};

#if IS_FP8
template <int D>
using KvTile = Fp8Tile<D>;
#else
template <int D>
using KvTile = Bf16Tile<D>;
#endif
