// Attention of rows over paged keys and values. A cluster of CTAs of WARPS warps shares the positions
// of one row and one key/value head: its warps take tiles of 16 positions in turn and merge what they
// have through distributed shared memory, in a fixed order.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS, BLOCKS
//   resident CTAs per SM the compiler must allow, BUFFERS tiles of a warp in flight.
//   IS_FUSED: queries, keys and values come neither normed nor rotated, see `decode_attention`.
//   IS_CHAINED: tables and past keys are read before the kernel before this one has ended.
//   IS_FP8: keys and values in 8 bits.
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

#if IS_FUSED
constexpr int LANES = HeadLanes<D>::COUNT;
constexpr int AT_ONCE = WARPS * HeadLanes<D>::PER_WARP;  // heads that the warps norm and rotate
constexpr int ROUNDS = (GROUP + 2 + AT_ONCE - 1) / AT_ONCE;

// A row before norm and rotation. Its heads that belong to one key/value head are GROUP queries, then
// the key, then the value; `round` after `round`, this thread has eight values of one of them.
struct Projected {
  int num_heads, num_kv_heads, kv_head;

  DEVICE int part(int round) const { return round * AT_ONCE + threadIdx.x / LANES; }
  DEVICE int offset() const { return threadIdx.x % LANES * 8; }
  DEVICE int head(int round) const {
    const int at = part(round);
    if (at < GROUP) return kv_head * GROUP + at;
    return num_heads + kv_head + (at == GROUP ? 0 : num_kv_heads);
  }
  DEVICE HeadTables tables(int round, const bf16* qk_norm, const float2* turns) const {
    const int rotated = part(round) > GROUP ? 0 : head(round);  // values are not
    return load_tables(qk_norm == nullptr ? nullptr : qk_norm + rotated * D, turns, offset());
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
#endif

// Grid: (splits, H_kv, M), clusters of `splits` CTAs: 1, 2, 4 or 8, with at most 32 warps.
//   IS_FUSED: q is qkv [M, H + 2 H_kv, D]; else q [M, H, D], and qk_norm, rope, eps are not used.
//   pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null,
//   page_table [num_slots + 1, max_pages].
//   min_tiles: a row is shared by so many CTAs that each warp has this many tiles.
//   depth: tiles that are asked to be in the L2 ahead of the one that is being loaded.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    attention(const bf16* q, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
              bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions, bf16* out_values,
              u8* out_quantised, float* out_scales, float eps, float scale_log2, int max_pages,
              int min_tiles, int depth) {
  __shared__ __align__(16) Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int kv_head = blockIdx.y, row = blockIdx.z, num_kv_heads = gridDim.y;
  const int num_heads = num_kv_heads * GROUP;
  if (!IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const int position = static_cast<int>(positions[row]);
  const i32* table = page_table + slots[row] * max_pages;
  const int last_tile = position / TILE, num_tiles = last_tile + 1;
  const int active = active_ctas(num_tiles, min_tiles), ways = active * WARPS;
  if (rank >= active) return;
  const Meeting meeting = {&shared.storage, active, rank, warp, lane};
  meeting.arrive();
  Walk<Tile> walk = {{{pages, kv_scales}, table, num_kv_heads, kv_head, max_pages},
                     rank * WARPS + warp, ways, lane};
  walk.take_pages(0);
  if (IS_CHAINED && !IS_FUSED) wait_for_previous_kernels(), let_next_kernel_start();

  Tile tiles[BUFFERS];  // tile `step` of this warp is in tiles[step % BUFFERS]
#pragma unroll
  for (int step = 0; step < BUFFERS; step++) {
    const int at = walk.first + step * ways;
    if (at < num_tiles) {
      const i64 row_at = walk.row_at(step);
      walk.memory.load_keys(tiles[step], row_at, position - at * TILE, lane);
      walk.memory.load_values(tiles[step], row_at, position - at * TILE, lane);
    }
  }
  for (int step = 0; step < depth; step++) walk.prefetch(0, BUFFERS + step, num_tiles);
#if IS_FUSED
  i64 own_row = -1;  // the CTA that reads the last tile writes the row's own position
  if (last_tile % ways / WARPS == rank)
    own_row = walk.memory.row_at(table[position / PAGE], last_tile) + position % TILE;
  const Projected projected = {num_heads, num_kv_heads, kv_head};
  HeadTables tables[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++)
    tables[i] = projected.tables(i, qk_norm, rope + static_cast<i64>(position) * (D / 2));
  if (IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const bf16* heads = q + static_cast<i64>(row) * (num_heads + 2 * num_kv_heads) * D;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const uint4 values =
        *reinterpret_cast<const uint4*>(heads + projected.head(i) * D + projected.offset());
    const uint4 rotated = rotated_head<D>(values, tables[i], qk_norm != nullptr, eps);
    projected.store(shared, i, values, rotated, walk.memory, own_row);
  }
#else
  const bf16* heads = q + (static_cast<i64>(row) * num_heads + kv_head * GROUP) * D;
  for (int i = threadIdx.x; i < GROUP * D / 8; i += WARPS * 32)
    *reinterpret_cast<uint4*>(&shared.queries[i / (D / 8)][i % (D / 8) * 8]) =
        Tile::query(*reinterpret_cast<const uint4*>(heads + i * 8));
#endif
  __syncthreads();
  Accumulator<Tile> acc;
  acc.init(shared.queries[lane / 4 % GROUP]);
#if IS_FUSED
#pragma unroll
  for (int step = 0; step < BUFFERS; step++)
    if (walk.first + step * ways == last_tile) patch_own(tiles[step], shared, position, lane);
#endif

  for (int first = 0; walk.first + first * ways < num_tiles; first += BUFFERS) {
#pragma unroll
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
      Tile& tile = tiles[buffer];
      const int at = walk.first + (first + buffer) * ways;
      if (BUFFERS > 1 && at >= num_tiles) break;
      const int step = first + buffer + BUFFERS, next = at + BUFFERS * ways;  // what is loaded
      const int last_row = position - at * TILE, next_last_row = position - next * TILE;
      if (step % 32 == 0) walk.take_pages(step);
      const i64 next_row = walk.row_at(step);
      acc.add_keys(tile, scale_log2, {last_row, last_row}, lane);
      if (next < num_tiles) walk.memory.load_keys(tile, next_row, next_last_row, lane);
      if (depth > 0) walk.prefetch(step, step + depth, num_tiles);
      acc.add_values(tile);
      if (next < num_tiles) walk.memory.load_values(tile, next_row, next_last_row, lane);
#if IS_FUSED
      if (next == last_tile) patch_own(tile, shared, position, lane);
#endif
    }
  }

  meeting.wait();
  acc.store(
      lane, [](int query) { return query < GROUP; },
      [&](int query) { return meeting.place_of(query); });
  const Output out = {out_values, out_quantised, out_scales, static_cast<int>(gridDim.z), num_heads};
  meeting.merge(out, [&](int query) { return make_int2(row, kv_head * GROUP + query); });
}
