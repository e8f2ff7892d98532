// Attention of rows whose neighbours read the same positions: streams that begin with the pages of one voice,
// rows of one prompt. What SPAN rows share is read once for all of them. Their tiles of 16 positions are one
// list: those that all share, then each row's own; the warps of a cluster take them in turn and merge in a
// fixed order.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS, IS_FP8: keys and
//   values in 8 bits.
//   IS_FUSED: rows of distinct slots come from the kernel before neither normed nor rotated. Past keys and
//   values are read, and the next kernel starts, before that one has ended.
// Slots, positions and tables are always older than the kernel before.
#include "ring.cuh"

constexpr int D = HEAD_DIM;
constexpr int BATCHES = 2;             // of eight columns (an mma's), for which a warp reads a tile once
constexpr int ROWS = COLUMNS / GROUP;  // of a batch
constexpr int SPAN = BATCHES * ROWS, QUERIES = BATCHES * COLUMNS;
constexpr int ALL = SPAN;     // the row of a tile that all read
constexpr int MOST_CTAS = 2;  // that share rows
static_assert(SPAN <= 32);
using Tile = KvTile<D>;
using Meeting = Exchange<D, QUERIES, MOST_CTAS>;

// Column c of batch b is head c % GROUP of row b * ROWS + c / GROUP; columns past the last repeat it.
DEVICE int row_of(int batch, int column) { return batch * ROWS + min(column / GROUP, ROWS - 1); }

struct Shared {
  union {
    __align__(256) u8 rings[WARPS][Ring<Tile>::BYTES];
    typename Meeting::Storage storage;  // once all tiles are read
  };
  bf16 queries[SPAN * GROUP][Tile::QUERY_STRIDE];  // of heads, row by row

  DEVICE const bf16* query_of(int batch, int lane) const {
    return queries[row_of(batch, lane / 4) * GROUP + lane / 4 % GROUP];
  }
};

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

// The tiles that one warp takes of the list: `first_item`, and every `stride`-th from there.
struct Items {
  const Rows& rows;
  Memory<Tile> memory;
  int first_item, stride, lane;
  int page, what;  // of the next 32 items, one per lane

  // Of what: the tile, the row that reads it or ALL, its last position to read.
  static DEVICE int tile_of(int what) { return what & 0xffff; }
  static DEVICE int reader_of(int what) { return what >> 16 & 0xff; }
  static DEVICE int last_of(int what) { return what >> 24; }

  DEVICE void take(int step) {
    const int left = first_item + (step + lane) * stride - rows.num_shared;
    int tile = left + rows.num_shared, row = ALL, end = 0;
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
    const int last = is_item ? min(position - tile * TILE, TILE - 1) : 0;
    what = tile | row << 16 | last << 24;
  }
  DEVICE int at(int step) const { return __shfl_sync(~0u, what, step % 32); }
  // Starts copying an item.
  DEVICE void copy(const Ring<Tile>& ring, int step) const {
    const i64 row = memory.row_at(__shfl_sync(~0u, page, step % 32), tile_of(at(step)));
    ring.copy(step % STAGES, memory, row, last_of(at(step)));
  }
};

// What a launch reads: q is qkv [M, H + 2 H_kv, D] if IS_FUSED; else q [M, H, D], and qk_norm, rope, eps are
// not used.
struct Input {
  const bf16 *q, *qk_norm;  // qk_norm [H + H_kv, D] or null
  const float2* rope;       // [max_len, D / 2] cos and sin
  float eps;
  int first_row, num_rows;  // of the CTA; of all

  DEVICE i64 row(int i) const { return min(first_row + i, num_rows - 1); }  // rows past the last repeat it
};

// The CTA's rows before norm and rotation. Of each row GROUP queries, the key and the value of one key/value
// head; `round` after `round`, a thread has eight values of one of them.
struct Projected {
  static constexpr int LANES = HeadLanes<D>::COUNT, HEADS = GROUP + 2, TASKS = SPAN * HEADS;
  static constexpr int AT_ONCE = WARPS * HeadLanes<D>::PER_WARP, ROUNDS = (TASKS + AT_ONCE - 1) / AT_ONCE;
  const Input& input;
  const Rows& rows;
  const Memory<Tile>& memory;

  DEVICE int task(int round) const { return min(round * AT_ONCE + static_cast<int>(threadIdx.x) / LANES, TASKS - 1); }
  DEVICE int row(int round) const { return task(round) / HEADS; }
  DEVICE int part(int round) const { return task(round) % HEADS; }
  DEVICE int offset() const { return threadIdx.x % LANES * 8; }
  DEVICE int head(int part) const {
    if (part < GROUP) return memory.head * GROUP + part;
    return memory.num_kv_heads * (GROUP + (part == GROUP ? 0 : 1)) + memory.head;
  }
  DEVICE HeadTables tables(int round) const {
    const int rotated = part(round) > GROUP ? 0 : head(part(round));  // values are not
    const bf16* weights = input.qk_norm == nullptr ? nullptr : input.qk_norm + rotated * D;
    const i64 position = __shfl_sync(~0u, rows.position, row(round));
    return load_tables(weights, input.rope + position * (D / 2), offset());
  }
  DEVICE uint4 load(int round) const {
    const i64 num_all = memory.num_kv_heads * HEADS;
    return *reinterpret_cast<const uint4*>(input.q + (input.row(row(round)) * num_all + head(part(round))) * D +
                                           offset());
  }
  // All lanes of the warp must call it.
  DEVICE void store(Shared& shared, int round, uint4 values, uint4 rotated) const {
    const int at = part(round), slot = __shfl_sync(~0u, rows.slot, row(round));
    const int position = __shfl_sync(~0u, rows.position, row(round));
    const auto eight = Tile::Rows::eight(at == GROUP ? rotated : values);
    if (at < GROUP) {
      uint4& query = *reinterpret_cast<uint4*>(&shared.queries[row(round) * GROUP + at][offset()]);
      query = Tile::query(rotated);
      return;
    }
    const i64 first = memory.row_at(rows.page_table[slot + position / PAGE], position / TILE);
    memory.rows.store(first + position % TILE + (at == GROUP ? 0 : memory.values_offset()), offset(), eight);
  }
};

// Queries into shared memory, keys and values into their pages: each CTA of a cluster does it for itself.
DEVICE void take_projected(Shared& shared, const Projected& projected) {
  const Input& input = projected.input;
  HeadTables tables[Projected::ROUNDS];
  uint4 values[Projected::ROUNDS];
#pragma unroll
  for (int i = 0; i < Projected::ROUNDS; i++) tables[i] = projected.tables(i);
  wait_for_previous_kernels();
#pragma unroll
  for (int i = 0; i < Projected::ROUNDS; i++) values[i] = projected.load(i);
#pragma unroll
  for (int i = 0; i < Projected::ROUNDS; i++)
    projected.store(shared, i, values[i],
                    rotated_head<D>(values[i], tables[i], input.qk_norm != nullptr, input.eps));
  __syncthreads();
}

// Queries that are ready into shared memory.
DEVICE void take_queries(Shared& shared, const Input& input, const Memory<Tile>& memory) {
  for (int i = threadIdx.x; i < SPAN * GROUP * D / 8; i += WARPS * 32) {
    const int query = i / (D / 8), offset = i % (D / 8) * 8;
    const i64 head = (input.row(query / GROUP) * memory.num_kv_heads + memory.head) * GROUP + query % GROUP;
    const uint4 values = *reinterpret_cast<const uint4*>(input.q + head * D + offset);
    *reinterpret_cast<uint4*>(&shared.queries[query][offset]) = Tile::query(values);
  }
  __syncthreads();
}

// Grid: (splits, H_kv, ceil(M / SPAN)), clusters of `splits` CTAs. Dynamic shared memory: `Shared`.
//   q, qk_norm, rope, eps: see `Input`.
//   pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null;
//   page_table [num_slots + 1, max_pages]; slots, positions [M].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 12 / WARPS)
    attention_shared(const bf16* q, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
                     bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions,
                     bf16* out_values, u8* out_quantised, float* out_scales, float eps, float scale_log2,
                     int max_pages, int num_rows) {
  extern __shared__ __align__(256) u8 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, first_row = blockIdx.z * SPAN;
  if (IS_FUSED) let_next_kernel_start();
  Rows rows;
  rows.take(page_table, slots, positions, first_row, num_rows, max_pages, lane);
  const int num_items = rows.num_items(), active = max(active_ctas(num_items, 1), 1);
  if (rank >= active) return;
  const Meeting meeting = {&shared.storage, active, rank, warp, lane};
  const int first_item = rank * WARPS + warp, stride = active * WARPS;
  Items items = {rows, {{pages, kv_scales}, page_table, num_kv_heads, kv_head, max_pages}, first_item, stride, lane};
  const int num_steps = (num_items - first_item + stride - 1) / stride;
  items.take(0);
  const Ring<Tile> ring = {shared_address(shared.rings[warp]), lane};
  const Input input = {q, qk_norm, rope, eps, first_row, num_rows};
  // The newest position of each row is written last: whole tiles before that are there.
  const int newest = warp_min(rows.is_there() ? rows.position / TILE : 1 << 30);
  int coming = items.at(0);  // the item on its way
  const bool is_early = IS_FUSED && num_steps > 0 && Items::tile_of(coming) < newest;
  if (is_early) items.copy(ring, 0);
  if (IS_FUSED)
    take_projected(shared, {input, rows, items.memory});
  else
    wait_for_previous_kernels(), let_next_kernel_start();
  if (num_steps > 0 && !is_early) items.copy(ring, 0);
  if (!IS_FUSED) take_queries(shared, input, items.memory);
  Accumulator<Tile> acc[BATCHES];
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++) acc[batch].init(shared.query_of(batch, lane));
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    ring.wait();
    const int now = coming;
    Tile tile;
    ring.read_keys(tile, step % STAGES, Items::last_of(now));
    if (step + 1 < num_steps) {
      if ((step + 1) % 32 == 0) items.take(step + 1);
      coming = items.at(step + 1), items.copy(ring, step + 1);
    }
    const int first = Items::tile_of(now) * TILE, reader = Items::reader_of(now);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
      int last[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = row_of(batch, lane % 4 * 2 + i), position = __shfl_sync(~0u, rows.position, row);
        last[i] = reader == ALL || reader == row ? position - first : -1;
      }
      acc[batch].add_keys(tile, scale_log2, last, lane);
    }
    ring.read_values(tile, step % STAGES);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) acc[batch].add_values(tile);
  }
  if (active == 1) __syncthreads();  // all tiles are read
  meeting.arrive(), meeting.wait();
#pragma unroll
  for (int batch = 0; batch < BATCHES; batch++)
    acc[batch].store(
        lane, [](int) { return true; },
        [&](int column) { return meeting.place_of(batch * COLUMNS + column); });

  const HeadOutput out = {out_values, out_quantised, out_scales, num_rows, num_kv_heads * GROUP};
  meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
    const int column = query % COLUMNS, row = first_row + row_of(query / COLUMNS, column);
    const float total = state.x > LOWEST ? state.y : 1;  // of a row that reads nothing
    if (column < ROWS * GROUP && row < num_rows)
      store_quotient<D>(out, row, kv_head * GROUP + column % GROUP, values, total, lane);
  });
}
