// Tiles of keys and values on their way from memory, a ring of them for each warp in shared memory. Copies
// run while earlier tiles are computed: into registers they could not, because all loads in flight are waited
// for together.
#pragma once

#include "paged.cuh"

DEVICE void copy_async(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

constexpr int STAGES = 2;

template <typename Tile>
struct Ring {
  using Element = typename Tile::Rows::Element;
  static constexpr bool HAS_SCALES = sizeof(Element) == 1;
  static constexpr int ROW = Tile::D * static_cast<int>(sizeof(Element));  // bytes
  static constexpr int CHUNKS = ROW / 16;
  static constexpr int PLANE = TILE * ROW;
  static constexpr int STAGE = 2 * PLANE + (HAS_SCALES ? 128 : 0);  // keys, values, their scales
  static constexpr int BYTES = STAGES * STAGE;                      // of a warp

  u32 base;  // shared address, a multiple of 256
  int lane;

  // Chunk c of a row is in column c ^ turn: another one in neighbouring rows, so that lanes that read a column,
  // or a column every other row, do not meet in a bank. Of a sum without carries it is the ^ of the parts.
  static constexpr DEVICE int turn(int row) { return CHUNKS >= 8 ? (row & 6) ^ (row & 1) * 4 : row / 2 % 4; }

  // Until the tile that was copied last is there, and what was read before this has been by all lanes.
  DEVICE void wait() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

  // Starts copying a tile; its rows past `last_row` repeat it.
  DEVICE void copy(int stage, const Memory<Tile>& memory, i64 first_row, int last_row) const {
    constexpr int AT_ONCE = 32 / CHUNKS;  // rows
    const int row = lane / CHUNKS, chunk = lane % CHUNKS;
    const u32 target = base + stage * STAGE + row * ROW + (chunk ^ turn(row)) * 16;
    const u8* keys = reinterpret_cast<const u8*>(memory.rows.data + first_row * Tile::D) + chunk * 16;
    const i64 values = memory.values_offset() * ROW;
    if (last_row >= TILE - 1) {  // neighbours in memory
      const u8* from = keys + row * ROW;
#pragma unroll
      for (int i = 0; i < TILE; i += AT_ONCE) {
        copy_async((target ^ turn(i) * 16) + i * ROW, from + i * ROW);
        copy_async((target ^ turn(i) * 16) + i * ROW + PLANE, from + values + i * ROW);
      }
    } else {
#pragma unroll
      for (int i = 0; i < TILE; i += AT_ONCE) {
        const u8* from = keys + min(row + i, last_row) * ROW;
        copy_async((target ^ turn(i) * 16) + i * ROW, from);
        copy_async((target ^ turn(i) * 16) + i * ROW + PLANE, from + values);
      }
    }
    if (HAS_SCALES && lane < 4) {  // two chunks of scales each
      const bf16* scales = memory.rows.scales + first_row + (lane < 2 ? 0 : memory.values_offset());
      copy_async(base + stage * STAGE + 2 * PLANE + lane * 16, scales + lane % 2 * 8);
    }
  }

  // Keys, and scales of both.
  DEVICE void read_keys(Tile& tile, int stage, int last_row) const {
    const u32 source = base + stage * STAGE;
    const u32 first = source + lane / 4 * ROW + (lane % 4 ^ turn(lane / 4)) * 16;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < CHUNKS / 4; j++) tile.keys.rows[i][j] = shared_load4((first ^ j * 64) + 8 * i * ROW);
    if constexpr (HAS_SCALES)
      tile.scale = shared_load_u16(source + 2 * PLANE + (lane / 16 * TILE + min(lane % 16, last_row)) * 2);
  }

  DEVICE void read_values(Tile& tile, int stage) const {
    const u32 plane = base + stage * STAGE + PLANE;
    const int even = lane % 4 * 2, column = CHUNKS >= 8 ? lane / 4 : lane / 8;
    const u32 first = plane + even * ROW + (column ^ turn(even)) * 16 + (CHUNKS >= 8 ? 0 : lane / 4 % 2 * 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 row = (first ^ turn(i % 2) * 16) + value_row(0, i) * ROW;
      if constexpr (!HAS_SCALES) {
#pragma unroll
        for (int j = 0; j < CHUNKS / 8; j++) tile.values[i][j] = shared_load4(row + 128 * j);
      } else if constexpr (CHUNKS == 8) {
        const uint4 v = shared_load4(row);
        tile.values[i][0] = v.x, tile.values[i][1] = v.y, tile.values[i][2] = v.z, tile.values[i][3] = v.w;
      } else {
        const uint2 v = shared_load2(row);
        tile.values[i][0] = v.x, tile.values[i][1] = v.y;
      }
    }
  }

  static DEVICE uint4 shared_load4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
  }
  static DEVICE uint2 shared_load2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
  }
  static DEVICE u32 shared_load_u16(u32 address) {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
  }
};
