// Attention of rows whose neighbours share a slot, spans of prompts: each warp reads a tile of keys and
// values once for the queries of several rows. A cluster of CTAs of WARPS warps shares the positions of
// SPAN rows and one key/value head, and merges as in attention.cu.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS,
//   BATCHES of eight columns (an mma's) per warp, IS_FP8: keys and values in 8 bits.
#include "span.cuh"

using Shared = SpanShared<8>;
using Meeting = Shared::Meeting;

// The rows of a CTA, one per lane; lanes past the last row repeat it.
struct Rows {
  i64 slot;
  int position;

  // One past the last row of the run from `begin` on that shares a slot.
  DEVICE int run_end(int begin) const {
    const u32 differ = __ballot_sync(~0u, slot != __shfl_sync(~0u, slot, begin)) >> begin;
    return differ == 0 ? SPAN : begin + __ffs(differ) - 1;
  }
  DEVICE int last_position(int begin, int end, int lane) const {
    return __reduce_max_sync(~0u, begin <= lane && lane < end ? position : 0);
  }
};

// Attention of rows begin..end-1 over what this warp reads of their slot, into the meeting place.
DEVICE void attend_run(const Shared& shared, const Rows& rows, int begin, int end, Walk<Tile> walk,
                       const Meeting& meeting, float scale_log2) {
  const int lane = walk.lane, last_position = rows.last_position(begin, end, lane);
  int last_of[BATCHES][2];  // of this lane's columns; before every tile where they are of other rows
  Accumulator<Tile> acc[BATCHES];
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++) {
    acc[batch].init(shared.query_of(batch, lane));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = row_of(batch, lane % 4 * 2 + i);
      const int position = __shfl_sync(~0u, rows.position, row);
      last_of[batch][i] = begin <= row && row < end ? position : -1;
    }
  }
  const int num_tiles = last_position / TILE + 1;
  const int last_step = num_tiles > walk.first ? (num_tiles - 1 - walk.first) / walk.stride : -1;
  Tile tile;
  const auto add_keys = [&](int step) {
    const int first = (walk.first + step * walk.stride) * TILE;
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
      acc[batch].add_keys(tile, scale_log2, {last_of[batch][0] - first, last_of[batch][1] - first}, lane);
  };
  const auto add_values = [&] {
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) acc[batch].add_values(tile);
  };
  if (last_step >= 0) {
    walk.take_pages(0);
    const i64 row = walk.row_at(0);
    walk.memory.load_keys(tile, row, last_position - walk.first * TILE, lane);
    walk.memory.load_values(tile, row, last_position - walk.first * TILE, lane);
  }
  // The loop has no branch inside: at one, all loads in flight would be waited for.
  for (int step = 0; step < last_step;) {
    const int stop = min(last_step, (step + 1) / 32 * 32 + 31);  // until there its pages are taken
#pragma unroll 1
    for (; step < stop; step++) {
      const i64 next = walk.row_at(step + 1);
      const int last_row = last_position - (walk.first + (step + 1) * walk.stride) * TILE;
      add_keys(step);
      walk.memory.load_keys(tile, next, last_row, lane);
      add_values();
      walk.memory.load_values(tile, next, last_row, lane);
    }
    if (step < last_step) walk.take_pages(step + 1);
  }
  if (last_step >= 0) add_keys(last_step), add_values();
  if (begin == 0) meeting.wait();
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++)
    acc[batch].store(
        lane,
        [&](int column) { return begin <= row_of(batch, column) && row_of(batch, column) < end; },
        [&](int column) { return meeting.place_of(batch * COLUMNS + column); });
}

// Grid: (splits, H_kv, ceil(M / SPAN)), clusters of `splits` CTAs. Dynamic shared memory: `Shared`.
//   q [M, H, D]; pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null; page_table [num_slots + 1, max_pages]; slots, positions
//   [M]: any, but only runs of rows of one slot share reads. min_tiles: see attention.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_span(const bf16* q, Tile::Rows::Element* pages, bf16* kv_scales, const i32* page_table,
                   const i64* slots, const i64* positions, bf16* out_values, u8* out_quantised, float* out_scales,
                   float scale_log2, int max_pages, int num_rows, int min_tiles) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, num_heads = num_kv_heads * GROUP;
  const int first_row = blockIdx.z * SPAN;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int row_of_lane = min(first_row + min(lane, SPAN - 1), num_rows - 1);
  const Rows rows = {slots[row_of_lane], static_cast<int>(positions[row_of_lane])};
  const int most_tiles = rows.last_position(0, SPAN, lane) / TILE + 1;
  const int active = active_ctas(most_tiles, min_tiles);
  if (rank >= active) return;
  const Meeting meeting = {&shared.storage, active, rank, warp, lane};
  meeting.arrive();
  shared.take_queries(q, first_row, num_rows, kv_head, num_heads);
#pragma unroll 1
  for (int begin = 0; begin < SPAN;) {
    const int end = rows.run_end(begin);
    const i32* table = page_table + __shfl_sync(~0u, rows.slot, begin) * max_pages;
    const Walk<Tile> walk = {{{pages, kv_scales}, table, num_kv_heads, kv_head, max_pages},
                             rank * WARPS + warp, active * WARPS, lane};
    attend_run(shared, rows, begin, end, walk, meeting, scale_log2);
    begin = end;
  }

  const HeadOutput out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
    const int column = query % COLUMNS, row = first_row + row_of(query / COLUMNS, column);
    if (column < ROWS * GROUP && row < num_rows)
      store_quotient<D>(out, row, kv_head * GROUP + column % GROUP, values, state.y, lane);
  });
}
