// Attention of decode's rows, neighbours of which may begin with the same pages, as those of one voice do:
// what SPAN rows share is read once for all of them. Their tiles of 16 positions are one list: those that
// all share, then each row's own; the warps of a CTA take them in turn and merge in a fixed order.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS,
//   BATCHES of eight columns (an mma's) per warp, IS_FP8: keys and values in 8 bits.
//   IS_CHAINED: past keys are read before the kernel before this one has ended, as slots, positions and
//   tables always are.
#include "span.cuh"

constexpr int ALL = SPAN;  // the row of a tile that all read
using Shared = SpanShared<1>;
using Meeting = Shared::Meeting;

DEVICE int warp_min(int value) { return __reduce_min_sync(~0u, value); }

// The rows of a CTA, one per lane, and the tiles that they read. Lanes past the last row, and rows of
// slots without a page, have none.
struct Rows {
  const i32* page_table;
  int slot, position, num_tiles;
  // Of all rows that are there: the tiles that they share, the last position that any of them reads, and
  // the first one's lane.
  int num_shared, last_position, first;

  DEVICE bool is_there() const { return num_tiles > 0; }

  DEVICE void take(const i32* table, const i64* slots, const i64* positions, int first_row, int num_rows,
                   int max_pages, int lane) {
    page_table = table;
    const int row = min(first_row + min(lane, SPAN - 1), num_rows - 1);
    slot = static_cast<int>(slots[row]) * max_pages, position = static_cast<int>(positions[row]);
    const bool is_row = lane < SPAN && first_row + lane < num_rows && page_table[slot] > 0;
    num_tiles = is_row ? position / TILE + 1 : 0;
    const u32 there = __ballot_sync(~0u, is_there());
    const int least = warp_min(is_there() ? num_tiles : 1 << 30);
    last_position = __reduce_max_sync(~0u, is_there() ? position : 0);
    num_shared = 0, first = max(__ffs(there) - 1, 0);
    if (there == 0) return;
    const int head = __shfl_sync(~0u, slot, first);
    for (int begin = 0; begin < max_pages; begin += 32) {
      const int page = begin + lane;
      bool is_shared = page < max_pages;
      const int wanted = is_shared ? page_table[head + page] : 0;
#pragma unroll
      for (int i = 0; i < SPAN; i++) {
        const int other = __shfl_sync(~0u, slot, i);
        if (is_shared && (there >> i & 1)) is_shared = page_table[other + page] == wanted;
      }
      const u32 differ = ~__ballot_sync(~0u, is_shared && wanted > 0);
      num_shared = (begin + (differ == 0 ? 32 : __ffs(differ) - 1)) * (PAGE / TILE);
      if (differ != 0) break;
    }
    num_shared = min(num_shared, least);
  }

  DEVICE int own_tiles(int row) const {
    return max(0, __shfl_sync(~0u, num_tiles, row) - num_shared);
  }
  DEVICE int num_items() const {
    int count = num_shared;
#pragma unroll
    for (int i = 0; i < SPAN; i++) count += own_tiles(i);
    return count;
  }
};

// The tiles that one warp takes of the list: every WARPS-th.
struct Items {
  const Rows& rows;
  Memory<Tile> memory;
  int lane;
  int page, tile, row, last;  // of the next 32 items, one per lane; `last` position of the tile to read

  DEVICE void take(int step) {
    const int left = (step + lane) * WARPS + static_cast<int>(threadIdx.x) / 32 - rows.num_shared;
    tile = left + rows.num_shared, row = ALL;
    int end = 0;
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
      const int own = rows.own_tiles(i), begin = end;
      end += own;
      if (begin <= left && left < end) row = i, tile = rows.num_shared + left - begin;
    }
    const int reader = row < ALL ? row : rows.first;
    const int slot = __shfl_sync(~0u, rows.slot, reader);
    const int of_row = __shfl_sync(~0u, rows.position, reader);
    const int position = row < ALL ? of_row : rows.last_position;
    const bool is_item = tile * TILE <= position;  // not past the list's end
    page = is_item ? max(rows.page_table[slot + tile / (PAGE / TILE)], 0) : 0;
    last = is_item ? min(position - tile * TILE, TILE - 1) : 0;
  }
  DEVICE i64 row_at(int step) const {
    return memory.row_at(__shfl_sync(~0u, page, step % 32), __shfl_sync(~0u, tile, step % 32));
  }
  DEVICE int last_row(int step) const { return __shfl_sync(~0u, last, step % 32); }
};

// Grid: (H_kv, ceil(M / SPAN)). Dynamic shared memory: `Shared`.
//   q [M, H, D]; pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null;
//   page_table [num_slots + 1, max_pages]; slots, positions [M].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_shared(const bf16* q, Tile::Rows::Element* pages, bf16* kv_scales, const i32* page_table,
                     const i64* slots, const i64* positions, bf16* out_values, u8* out_quantised,
                     float* out_scales, float scale_log2, int max_pages, int num_rows) {
  extern __shared__ __align__(16) u8 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.x, num_kv_heads = gridDim.x, num_heads = num_kv_heads * GROUP;
  const int first_row = blockIdx.y * SPAN;
  Rows rows;
  rows.take(page_table, slots, positions, first_row, num_rows, max_pages, lane);
  const Meeting meeting = {&shared.storage, 1, 0, warp, lane};
  Items items = {rows, {{pages, kv_scales}, page_table, num_kv_heads, kv_head, max_pages}, lane};
  const int num_steps = (rows.num_items() - warp + WARPS - 1) / WARPS;
  items.take(0);
  Tile tile;
  // What the kernel before writes is the newest position of each row: whole tiles before that are there.
  const int newest = warp_min(rows.is_there() ? rows.position / TILE : 1 << 30);
  const bool is_early = IS_CHAINED && num_steps > 0 && __shfl_sync(~0u, items.tile, 0) < newest;
  if (is_early) {
    const i64 at = items.row_at(0);
    items.memory.load_keys(tile, at, TILE - 1, lane), items.memory.load_values(tile, at, TILE - 1, lane);
  }
  wait_for_previous_kernels(), let_next_kernel_start();
  if (num_steps > 0 && !is_early) {
    const i64 at = items.row_at(0);
    const int last_row = items.last_row(0);
    items.memory.load_keys(tile, at, last_row, lane), items.memory.load_values(tile, at, last_row, lane);
  }
  shared.take_queries(q, first_row, num_rows, kv_head, num_heads);
  Accumulator<Tile> acc[BATCHES];
  int position_of[BATCHES][2];  // of this lane's columns
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++) {
    acc[batch].init(shared.query_of(batch, lane));
#pragma unroll
    for (int i = 0; i < 2; i++)
      position_of[batch][i] = __shfl_sync(~0u, rows.position, row_of(batch, lane % 4 * 2 + i));
  }
  const auto add_keys = [&](int step) {
    const int first = __shfl_sync(~0u, items.tile, step % 32) * TILE;
    const int reader = __shfl_sync(~0u, items.row, step % 32);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
      int last[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool reads = reader == ALL || reader == row_of(batch, lane % 4 * 2 + i);
        last[i] = reads ? position_of[batch][i] - first : -1;
      }
      acc[batch].add_keys(tile, scale_log2, last, lane);
    }
  };
  const auto add_values = [&] {
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) acc[batch].add_values(tile);
  };
  // The loop has no branch inside: at one, all loads in flight would be waited for.
  for (int step = 0; step < num_steps - 1;) {
    const int stop = min(num_steps - 1, (step + 1) / 32 * 32 + 31);  // until there items are taken
#pragma unroll 1
    for (; step < stop; step++) {
      const i64 next = items.row_at(step + 1);
      const int last_row = items.last_row(step + 1);
      add_keys(step);
      items.memory.load_keys(tile, next, last_row, lane);
      add_values();
      items.memory.load_values(tile, next, last_row, lane);
    }
    if (step >= num_steps - 1) break;
    // The next 32 items replace those at hand, of which one is still to be counted.
    add_keys(step), add_values();
    items.take(++step);
    const i64 next = items.row_at(step);
    const int last_row = items.last_row(step);
    items.memory.load_keys(tile, next, last_row, lane), items.memory.load_values(tile, next, last_row, lane);
  }
  if (num_steps > 0) add_keys(num_steps - 1), add_values();
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++)
    acc[batch].store(
        lane, [](int) { return true; },
        [&](int column) { return meeting.place_of(batch * COLUMNS + column); });

  const HeadOutput out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
    const int column = query % COLUMNS, row = first_row + row_of(query / COLUMNS, column);
    const float total = state.x > LOWEST ? state.y : 1;  // of a row that reads nothing
    if (column < ROWS * GROUP && row < num_rows)
      store_quotient<D>(out, row, kv_head * GROUP + column % GROUP, values, total, lane);
  });
}
