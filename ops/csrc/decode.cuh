// One row and one key/value head of decoding, by warps of a CTA that take tiles of 16 positions in turn.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS,
//   DEPTH tiles asked into the L2 ahead of the one in flight, IS_FP8: keys and values in 8 bits.
//   IS_CHAINED: tables and past keys are read, and the next kernel starts, before the kernel before this
//   one has ended.
#pragma once

#include "ring.cuh"

constexpr int D = HEAD_DIM;
static_assert(GROUP <= COLUMNS);

using Tile = KvTile<D>;
using Meeting = Exchange<D, GROUP, MOST_CTAS>;

struct Shared {
  Meeting::Storage storage;
  __align__(16) bf16 queries[GROUP][Tile::QUERY_STRIDE];
  __align__(16) Tile::Rows::Element own[2][D];  // key and value of the row's own position
  bf16 own_scales[2];
  u64 met;  // barrier of what the cluster sends here
};

// What a launch reads.
struct Input {
  const bf16 *qkv, *qk_norm;  // [M, H + 2 H_kv, D], neither normed nor rotated; [H + H_kv, D] or null
  const float2* rope;         // [max_len, D / 2] cos and sin
  float eps, scale_log2;
  int num_heads, num_kv_heads;
};

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
  if (IS_CHAINED) wait_for_previous_kernels();
  const bf16* heads = input.qkv + static_cast<i64>(row) * (input.num_heads + 2 * input.num_kv_heads) * D;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const uint4 values =
        *reinterpret_cast<const uint4*>(heads + projected.head(i) * D + projected.offset());
    const uint4 rotated = rotated_head<D>(values, tables[i], input.qk_norm != nullptr, input.eps);
    projected.store(shared, i, values, rotated, memory, own_row);
  }
}

// How the tiles of a warp come from memory, the next one while one is computed: `start`, then `step` for
// every tile but the last, then `last`, after which that is in `tile`.
struct Feed {
  Tile tile;
#if IS_FP8
  Ring<Tile> ring;

  DEVICE void start(const Walk<Tile>& walk, int last_row) {
    ring.copy(0, walk.memory, walk.row_at(0), last_row);
  }
  DEVICE void step(Accumulator<Tile>& acc, const Walk<Tile>& walk, int step, int next_last_row,
                   float scale_log2) {
    const i64 next = walk.row_at(step + 1);
    ring.wait();
    ring.copy((step + 1) % STAGES, walk.memory, next, next_last_row);
    ring.read_keys(tile, step % STAGES, TILE), ring.read_values(tile, step % STAGES);
    acc.add_keys(tile, scale_log2, {TILE, TILE}, walk.lane);
    acc.add_values(tile);
  }
  DEVICE void last(int step, int last_row) {
    ring.wait();
    ring.read_keys(tile, step % STAGES, last_row), ring.read_values(tile, step % STAGES);
  }
#else
  DEVICE void start(const Walk<Tile>& walk, int last_row) {
    const i64 row = walk.row_at(0);
    walk.memory.load_keys(tile, row, last_row, walk.lane);
    walk.memory.load_values(tile, row, last_row, walk.lane);
  }
  DEVICE void step(Accumulator<Tile>& acc, const Walk<Tile>& walk, int step, int next_last_row,
                   float scale_log2) {
    const i64 next = walk.row_at(step + 1);
    acc.add_keys(tile, scale_log2, {TILE, TILE}, walk.lane);
    walk.memory.load_keys(tile, next, next_last_row, walk.lane);
    acc.add_values(tile);
    walk.memory.load_values(tile, next, next_last_row, walk.lane);
  }
  DEVICE void last(int, int) {}
#endif
};

// Attention of a row over the tiles of `walk` before `num_tiles`.
//   feed: with its ring, if it has one.
DEVICE void attend(Accumulator<Tile>& acc, Feed& feed, Shared& shared, const Input& input, Walk<Tile>& walk,
                   int row, int position, int num_tiles, bool is_last) {
  const int lane = walk.lane, stride = walk.stride;
  const int last_step = num_tiles > walk.first ? (num_tiles - 1 - walk.first) / stride : -1;
  walk.take_pages(0);
  if (last_step >= 0) feed.start(walk, position - walk.first * TILE);
  for (int step = 1; step <= DEPTH; step++) walk.prefetch(0, step, num_tiles);
  take_queries(shared, input, walk, row, position, is_last);
  __syncthreads();
  acc.init(shared.queries[lane / 4 % GROUP]);
  if (last_step < 0) return;

  // The loop has no branch inside: at one, all loads in flight would be waited for.
  for (int step = 0; step < last_step;) {
    const int stop = min(last_step, (step + 1) / 32 * 32 + 31);  // until there its pages are taken
#pragma unroll 1
    for (; step < stop; step++) {
      const int last_row = position - (walk.first + (step + 1) * stride) * TILE;
      feed.step(acc, walk, step, last_row, input.scale_log2);
      if (DEPTH > 0) walk.prefetch(step + 1, step + 1 + DEPTH, num_tiles);
    }
    if (step < last_step) walk.take_pages(step + 1);
  }
  const int last_row = position - (walk.first + last_step * stride) * TILE;
  feed.last(last_step, last_row);
  if (last_row < TILE) patch_own(feed.tile, shared, position, lane);
  acc.add_keys(feed.tile, input.scale_log2, {last_row, last_row}, lane);
  acc.add_values(feed.tile);
}

// Of this warp; `dynamic` is the shared memory that the launch asks for.
DEVICE Feed feed_of(u8* dynamic, int warp, int lane) {
  Feed feed;
#if IS_FP8
  feed.ring = {shared_address(dynamic) + warp * Ring<Tile>::BYTES, lane};
#endif
  return feed;
}
