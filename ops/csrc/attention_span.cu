// Attention of rows that share a slot, a span of a prompt: each warp reads a tile of keys and values
// once for the queries of several rows. A cluster of CTAs of WARPS warps shares the positions of SPAN
// rows and one key/value head, and merges as in attention.cu.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS,
//   BATCHES of eight columns (an mma's) per warp.
#include "paged.cuh"

constexpr int D = HEAD_DIM;
constexpr int ROWS = COLUMNS / GROUP;  // of a batch
constexpr int SPAN = BATCHES * ROWS, QUERIES = BATCHES * COLUMNS;

using Meeting = Exchange<D, QUERIES>;

// Grid: (splits, H_kv, ceil(M / SPAN)), clusters of `splits` CTAs. Dynamic shared memory for `Meeting`.
//   q [M, H, D]; pages [P, 2, H_kv, PAGE, D]; page_table [num_slots + 1, max_pages]; slots [M], all the
//   same; positions [M], rising. min_tiles, depth: see attention.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_span(const bf16* q, const bf16* pages, const i32* page_table, const i64* slots,
                   const i64* positions, bf16* out_values, u8* out_quantised, float* out_scales,
                   float scale_log2, int max_pages, int num_rows, int min_tiles, int depth) {
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, num_heads = num_kv_heads * GROUP;
  const int first_row = blockIdx.z * SPAN;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int last_position = static_cast<int>(positions[min(first_row + SPAN, num_rows) - 1]);
  const i32* table = page_table + slots[first_row] * max_pages;
  const int num_tiles = last_position / TILE + 1, active = active_ctas(num_tiles, min_tiles);
  if (rank >= active) return;
  const Meeting meeting = {reinterpret_cast<Meeting::Storage*>(shared), active, rank, warp, lane};
  meeting.arrive();
  const int ways = active * WARPS;
  Walk<D> walk = {{pages, table, num_kv_heads, kv_head, max_pages}, rank * WARPS + warp, ways, lane};
  walk.take_pages(0);
  // Column c of batch b is head c % GROUP of row b * ROWS + c / GROUP; columns past the last repeat it.
  int last_of[BATCHES][2];
  Accumulator<D> acc[BATCHES];
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++) {
    const int of_lane = min(lane / 4, ROWS * GROUP - 1);
    const int row = min(first_row + batch * ROWS + of_lane / GROUP, num_rows - 1);
    const bf16* query = q + (static_cast<i64>(row) * num_heads + kv_head * GROUP + of_lane % GROUP) * D;
    acc[batch].init(query, 1, 0, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = min(lane % 4 * 2 + i, ROWS * GROUP - 1);
      last_of[batch][i] =
          static_cast<int>(positions[min(first_row + batch * ROWS + column / GROUP, num_rows - 1)]);
    }
  }

  Tile<D> tile;
  if (walk.first < num_tiles) {
    const bf16* keys = walk.keys_at(0);
    tile.load_keys(keys, last_position - walk.first * TILE, lane);
    tile.load_values(keys + walk.memory.values_offset(), last_position - walk.first * TILE, lane);
    for (int step = 1; step <= depth; step++) walk.prefetch(0, step, num_tiles);
  }
  int step = 0;
  for (int i = walk.first; i < num_tiles; i += ways) {
    const int next = i + ways, next_last_row = last_position - next * TILE;
    step++;
    if (step % 32 == 0) walk.take_pages(step);
    const bf16* next_keys = walk.keys_at(step);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
      acc[batch].add_keys(tile, scale_log2,
                          {last_of[batch][0] - i * TILE, last_of[batch][1] - i * TILE}, lane);
    if (next < num_tiles) tile.load_keys(next_keys, next_last_row, lane);
    if (depth > 0) walk.prefetch(step, step + depth, num_tiles);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) acc[batch].add_values(tile);
    if (next < num_tiles)
      tile.load_values(next_keys + walk.memory.values_offset(), next_last_row, lane);
  }

  meeting.wait();
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++)
    acc[batch].store(COLUMNS, lane,
                     [&](int column) { return meeting.place_of(batch * COLUMNS + column); });
  const Output out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  meeting.merge(out, [&](int query) {
    const int column = query % COLUMNS, row = first_row + query / COLUMNS * ROWS + column / GROUP;
    const bool is_one = column < ROWS * GROUP && row < num_rows;
    return make_int2(is_one ? row : -1, kv_head * GROUP + column % GROUP);
  });
}
