// Tiles of 8-bit keys and values on their way from memory, a ring of them for each warp in shared memory.
// Copies run while earlier tiles are computed: into registers they could not, because all loads in flight
// are waited for together.
#pragma once

#include "paged.cuh"

constexpr int STAGES = 2;

DEVICE void copy_async(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

template <typename Tile>
struct Ring {
  static constexpr int ROW = Tile::D;  // bytes of a row
  static constexpr int CHUNKS = ROW / 16;
  static constexpr int PLANE = TILE * ROW;
  static constexpr int STAGE = 2 * PLANE + 4 * TILE;  // keys, values, scales of keys, of values
  static constexpr int BYTES = STAGES * STAGE;        // of a warp

  u32 base;  // shared address
  int lane;

  // Where a 16-byte chunk of a row is: in another column in neighbouring rows, so that lanes that read a
  // column, or a column every other row, do not meet in a bank.
  static DEVICE int at(int row, int chunk) {
    const int turn = CHUNKS >= 8 ? (row & 6) ^ (row % 2 * 4) : row / 2 % 4;
    return row * ROW + (chunk ^ turn) * 16;
  }

  // Until the tile that was copied last is there, and the one before has been read by all lanes.
  DEVICE void wait() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

  // Starts copying a tile; its rows past `last_row` repeat it.
  DEVICE void copy(int stage, const Memory<Tile>& memory, i64 first_row, int last_row) const {
    const u32 target = base + stage * STAGE;
    const u8* keys = memory.rows.data + first_row * ROW;
    const u8* values = keys + memory.values_offset() * ROW;
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS; i += 32) {
      const int row = (i + lane) / CHUNKS, chunk = (i + lane) % CHUNKS;
      const int from = min(row, last_row) * ROW + chunk * 16;
      copy_async(target + at(row, chunk), keys + from);
      copy_async(target + PLANE + at(row, chunk), values + from);
    }
    if (lane < 4) {  // two chunks of scales each
      const bf16* scales = memory.rows.scales + first_row + (lane < 2 ? 0 : memory.values_offset());
      copy_async(target + 2 * PLANE + lane * 16, scales + lane % 2 * 8);
    }
  }

  DEVICE void read(Tile& tile, int stage, int last_row) const {
    const u32 source = base + stage * STAGE;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < CHUNKS / 4; j++)
        tile.keys.rows[i][j] = shared_load4(source + at(key_row(lane, i), 4 * j + lane % 4));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 row = source + PLANE;
      if constexpr (CHUNKS == 8) {
        const uint4 v = shared_load4(row + at(value_row(lane, i), lane / 4));
        tile.values[i][0] = v.x, tile.values[i][1] = v.y, tile.values[i][2] = v.z, tile.values[i][3] = v.w;
      } else {
        const uint2 v = shared_load2(row + at(value_row(lane, i), lane / 8) + lane / 4 % 2 * 8);
        tile.values[i][0] = v.x, tile.values[i][1] = v.y;
      }
    }
    tile.scale = shared_load_u16(source + 2 * PLANE + (lane / 16 * TILE + min(lane % 16, last_row)) * 2);
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
