// One row and one key/value head of decoding, by warps of a CTA that take tiles of 16 positions in turn.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS, BUFFERS tiles
//   of a warp in flight, IS_FP8: keys and values in 8 bits.
//   IS_FUSED: queries, keys and values come neither normed nor rotated.
//   IS_CHAINED: tables and past keys are read before the kernel before this one has ended.
#pragma once

#include "paged.cuh"

constexpr int D = HEAD_DIM;
static_assert(GROUP <= COLUMNS);

using Tile = KvTile<D>;
using Meeting = Exchange<D, GROUP>;

struct Shared {
  Meeting::Storage storage;
  __align__(16) bf16 queries[GROUP][Tile::QUERY_STRIDE];
  __align__(16) Tile::Rows::Element own[2][D];  // key and value of the row's own position
  bf16 own_scales[2];
};

// What a launch reads: q is qkv [M, H + 2 H_kv, D] if IS_FUSED; else q [M, H, D], and qk_norm, rope,
// eps are not used.
struct Input {
  const bf16 *q, *qk_norm;  // qk_norm [H + H_kv, D] or null
  const float2* rope;       // [max_len, D / 2] cos and sin
  float eps, scale_log2;
  int num_heads, num_kv_heads;
};

#if IS_FUSED
constexpr int LANES = HeadLanes<D>::COUNT;
constexpr int AT_ONCE = WARPS * HeadLanes<D>::PER_WARP;  // heads that the warps norm and rotate
constexpr int ROUNDS = (GROUP + 2 + AT_ONCE - 1) / AT_ONCE;

// A row before norm and rotation. Its heads that belong to one key/value head are GROUP queries, then
// the key, then the value; `round` after `round`, this thread has eight values of one of them.
struct Projected {
  const Input& input;
  int kv_head;

  DEVICE int part(int round) const { return round * AT_ONCE + threadIdx.x / LANES; }
  DEVICE int offset() const { return threadIdx.x % LANES * 8; }
  DEVICE int head(int round) const {
    const int at = part(round);
    if (at < GROUP) return kv_head * GROUP + at;
    return input.num_heads + kv_head + (at == GROUP ? 0 : input.num_kv_heads);
  }
  DEVICE HeadTables tables(int round, int position) const {
    const int rotated = part(round) > GROUP ? 0 : head(round);  // values are not
    const bf16* weights = input.qk_norm == nullptr ? nullptr : input.qk_norm + rotated * D;
    return load_tables(weights, input.rope + static_cast<i64>(position) * (D / 2), offset());
  }

  // Queries into shared memory; key and value too, and into `own_row` of `memory`, if that is not
  // negative. All lanes of the warp must call it.
  DEVICE void store(Shared& shared, int round, uint4 values, uint4 rotated, const Memory<Tile>& memory,
                    i64 own_row) const {
    const int at = part(round), plane = at - GROUP;
    if (at < GROUP) *reinterpret_cast<uint4*>(&shared.queries[at][offset()]) = Tile::query(rotated);
    if (own_row < 0) return;
    const auto eight = Tile::Rows::eight(plane == 0 ? rotated : values);
    if (plane != 0 && plane != 1) return;
    const Tile::Rows own = {shared.own[0], shared.own_scales};
    own.store(plane, offset(), eight);
    memory.rows.store(own_row + plane * memory.values_offset(), offset(), eight);
  }
};

// The row's own position was not in memory when its tile was loaded.
DEVICE void patch_own(Tile& tile, Shared& shared, int position, int lane) {
  const Tile::Rows key = {shared.own[0], &shared.own_scales[0]};
  const Tile::Rows value = {shared.own[1], &shared.own_scales[1]};
  tile.patch(key, value, position % TILE, position % TILE, lane);
}

// Queries into shared memory, and the row's own key and value if this CTA `is_last`, the one that
// reads the last tile.
DEVICE void take_queries(Shared& shared, const Input& input, const Walk<Tile>& walk, int row,
                         int position, bool is_last) {
  const Memory<Tile>& memory = walk.memory;
  i64 own_row = -1;
  if (is_last)
    own_row = memory.row_at(memory.table[position / PAGE], position / TILE) + position % TILE;
  const Projected projected = {input, memory.head};
  HeadTables tables[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) tables[i] = projected.tables(i, position);
  if (IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const bf16* heads = input.q + static_cast<i64>(row) * (input.num_heads + 2 * input.num_kv_heads) * D;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const uint4 values =
        *reinterpret_cast<const uint4*>(heads + projected.head(i) * D + projected.offset());
    const uint4 rotated = rotated_head<D>(values, tables[i], input.qk_norm != nullptr, input.eps);
    projected.store(shared, i, values, rotated, memory, own_row);
  }
}
#else
DEVICE void take_queries(Shared& shared, const Input& input, const Walk<Tile>& walk, int row, int, bool) {
  const bf16* heads = input.q + (static_cast<i64>(row) * input.num_heads + walk.memory.head * GROUP) * D;
  for (int i = threadIdx.x; i < GROUP * D / 8; i += WARPS * 32)
    *reinterpret_cast<uint4*>(&shared.queries[i / (D / 8)][i % (D / 8) * 8]) =
        Tile::query(*reinterpret_cast<const uint4*>(heads + i * 8));
}
#endif

// Attention of a row over the tiles of `walk` before `num_tiles`.
//   depth: tiles that are asked to be in the L2 ahead of the one that is being loaded.
DEVICE void attend(Accumulator<Tile>& acc, Shared& shared, const Input& input, Walk<Tile>& walk, int row,
                   int position, int num_tiles, bool is_last, int depth) {
  const int lane = walk.lane, last_tile = position / TILE;
  walk.take_pages(0);
  if (IS_CHAINED && !IS_FUSED) wait_for_previous_kernels(), let_next_kernel_start();
  Tile tiles[BUFFERS];  // tile `step` of this warp is in tiles[step % BUFFERS]
#pragma unroll
  for (int step = 0; step < BUFFERS; step++) {
    const int at = walk.first + step * walk.stride;
    if (at < num_tiles) {
      const i64 row_at = walk.row_at(step);
      walk.memory.load_keys(tiles[step], row_at, position - at * TILE, lane);
      walk.memory.load_values(tiles[step], row_at, position - at * TILE, lane);
    }
  }
  for (int step = 0; step < depth; step++) walk.prefetch(0, BUFFERS + step, num_tiles);
  take_queries(shared, input, walk, row, position, is_last);
  __syncthreads();
  acc.init(shared.queries[lane / 4 % GROUP]);
#if IS_FUSED
#pragma unroll
  for (int step = 0; step < BUFFERS; step++)
    if (walk.first + step * walk.stride == last_tile) patch_own(tiles[step], shared, position, lane);
#endif

  for (int first = 0; walk.first + first * walk.stride < num_tiles; first += BUFFERS) {
#pragma unroll
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
      Tile& tile = tiles[buffer];
      const int at = walk.first + (first + buffer) * walk.stride;
      if (BUFFERS > 1 && at >= num_tiles) break;
      const int step = first + buffer + BUFFERS, next = at + BUFFERS * walk.stride;  // what is loaded
      const int last_row = position - at * TILE, next_last_row = position - next * TILE;
      if (step % 32 == 0) walk.take_pages(step);
      const i64 next_row = walk.row_at(step);
      acc.add_keys(tile, input.scale_log2, {last_row, last_row}, lane);
      if (next < num_tiles) walk.memory.load_keys(tile, next_row, next_last_row, lane);
      if (depth > 0) walk.prefetch(step, step + depth, num_tiles);
      acc.add_values(tile);
      if (next < num_tiles) walk.memory.load_values(tile, next_row, next_last_row, lane);
#if IS_FUSED
      if (next == last_tile && next < num_tiles) patch_own(tile, shared, position, lane);
#endif
    }
  }
}
