// Attention of decode's rows, many of any lengths (50 to 128). Every row is cut into equal parts of at most
// `part_tiles` tiles, and CTAs of WARPS warps take parts of a key/value head in turn, sorted by length. Parts
// of one row meet in global memory: whichever CTA ends last merges them, in their order.
//   See decode.cuh; BLOCKS resident CTAs per SM the compiler must allow.
constexpr int MOST_CTAS = 1;  // that work on a part
#include "decode.cuh"

constexpr int MAX_ROWS = 128, MAX_PARTS = 16;  // of a row
constexpr int THREADS = WARPS * 32;

// What a CTA does next: tiles first..end-1 of a row of `num_tiles`, its part `idx` of `num_parts`.
struct Part {
  int row, kv_head, idx, num_parts, position, first, end;

  DEVICE bool is_last() const { return end == position / TILE + 1; }
};

// Every part of every row, short ones first (long ones first measured slower, by up to a fifth, where most
// CTAs have one part each). All CTAs make the same.
struct Schedule {
  int slots[MAX_ROWS], positions[MAX_ROWS];
  __align__(16) u32 cuts[MAX_ROWS];            // tiles of a part, number of parts << 16
  unsigned short parts[MAX_ROWS * MAX_PARTS];  // row, number of the part << 8
  int num_parts;
  int round, place;  // of the part that this CTA works on: in shared memory, registers are scarce

  // Takes the next part, back and forth over the CTAs. By one thread.
  DEVICE void advance() {
    round++;
    place = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  DEVICE void make(const i64* all_slots, const i64* all_positions, int num_rows, int part_tiles) {
    for (int row = threadIdx.x; row < (num_rows + 3) / 4 * 4; row += THREADS) {
      cuts[row] = 0;
      if (row >= num_rows) continue;
      const int slot = static_cast<int>(all_slots[row]), position = static_cast<int>(all_positions[row]);
      const int num_tiles = position / TILE + 1, count = (num_tiles + part_tiles - 1) / part_tiles;
      slots[row] = slot, positions[row] = position;
      cuts[row] = (num_tiles + count - 1) / count | count << 16;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < num_rows; row += THREADS) {
      const u32 tiles = cuts[row] & 0xffff, count = cuts[row] >> 16;
      int before = 0, total = 0;
      for (int i = 0; i < num_rows; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(&cuts[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 other = word(four, j), other_tiles = other & 0xffff;
          total += other >> 16;
          if (other_tiles < tiles || (other_tiles == tiles && i + j < row)) before += other >> 16;
        }
      }
      for (int part = 0; part < count; part++) parts[before + part] = row | part << 8;
      if (row == 0) num_parts = total;
    }
    if (threadIdx.x == 0) round = -1, advance();
    __syncthreads();
  }

  // Of all parts and key/value heads the one at hand.
  DEVICE Part part(int num_kv_heads) const {
    const int of_row = parts[place / num_kv_heads], row = of_row & 0xff, idx = of_row >> 8;
    const int tiles = cuts[row] & 0xffff, position = positions[row];
    return {row, place % num_kv_heads, idx, static_cast<int>(cuts[row] >> 16), position,
            idx * tiles, min((idx + 1) * tiles, position / TILE + 1)};
  }
};

// Where parts of rows meet: of each row, key/value head and part GROUP x D sums, in the order
// of this struct's own, and GROUP (best, total).
struct Scratch {
  float* sums;
  float2* states;
  u32* counts;  // [M, H_kv]: parts that are there; 0 before and after
  int most_parts;

  DEVICE i64 place(int pair, int part, int query) const {
    return (static_cast<i64>(pair) * most_parts + part) * GROUP + query;
  }

  DEVICE void store(i64 place, const float (&values)[D / 32], float2 state, int lane) const {
#pragma unroll
    for (int i = 0; i < D / 32; i++) __stcg(sums + place * D + 32 * i + lane, values[i]);
    if (lane == 0) __stcg(states + place, state);
  }

  // By a warp, once all parts are there: their sums into `values`; returns their total.
  DEVICE float merged(float (&values)[D / 32], int pair, int query, int num_parts, int lane) const {
    const float2 state =
        lane < num_parts ? __ldcg(states + place(pair, lane, query)) : make_float2(LOWEST, 0);
    const float weight = power_of_2(state.x - warp_max(state.x));
    for (int part = 0; part < num_parts; part++) {
      const float factor = __shfl_sync(~0u, weight, part);
      const float* from = sums + place(pair, part, query) * D + lane;
#pragma unroll
      for (int i = 0; i < D / 32; i++) values[i] += __ldcg(from + 32 * i) * factor;
    }
    return warp_sum(state.y * weight);
  }
};

// Grid: any number of CTAs. qkv, qk_norm, rope, eps: see `Input`; the rest as in attention.cu.
//   num_rows: M, at most MAX_ROWS; part_tiles: 16 or more (so that none is empty), and so many that no row
//   has more than MAX_PARTS parts, nor more than `most_parts`, for which there is room in the scratch.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_parts(const bf16* qkv, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
                    bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions,
                    bf16* out_values, u8* out_quantised, float* out_scales, float* sums,
                    float2* states, u32* counts, float eps, float scale_log2, int max_pages,
                    int num_rows, int num_kv_heads, int part_tiles, int most_parts) {
  __shared__ __align__(16) Shared shared;
  extern __shared__ __align__(128) u8 dynamic[];  // of the rings
  __shared__ Schedule schedule;
  __shared__ bool is_complete;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_heads = num_kv_heads * GROUP;
  if (IS_CHAINED)
    let_next_kernel_start();
  else
    wait_for_previous_kernels(), let_next_kernel_start();
  schedule.make(slots, positions, num_rows, part_tiles);
  const Input input = {qkv, qk_norm, rope, eps, scale_log2, num_heads, num_kv_heads};
  const HeadOutput out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  const Scratch scratch = {sums, states, counts, most_parts};
  const Meeting meeting = {&shared.storage, 1, 0, warp, lane};

#pragma unroll 1
  while (schedule.place < schedule.num_parts * num_kv_heads) {
    Accumulator<Tile> acc;
    {
      const Part part = schedule.part(num_kv_heads);
      const i32* table = page_table + static_cast<i64>(schedule.slots[part.row]) * max_pages;
      Walk<Tile> walk = {{{pages, kv_scales}, table, num_kv_heads, part.kv_head, max_pages},
                         part.first + warp, WARPS, lane};
      Feed feed = feed_of(dynamic, warp, lane);
      attend(acc, feed, shared, input, walk, part.row, part.position, part.end, part.is_last());
    }
    acc.store(
        lane, [](int query) { return query < GROUP; },
        [&](int query) { return meeting.place_of(query); });
    const Part part = schedule.part(num_kv_heads);  // again, see `Schedule::place`
    const int pair = part.row * num_kv_heads + part.kv_head, first_head = part.kv_head * GROUP;
    meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
      if (part.num_parts == 1)
        store_quotient<D>(out, part.row, first_head + query, values, state.y, lane);
      else
        scratch.store(scratch.place(pair, part.idx, query), values, state, lane);
    });
    if (part.num_parts > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        const u32 last = part.num_parts - 1;
        is_complete = atomicInc(&counts[pair], last) == last;
      }
      __syncthreads();
      if (is_complete) {
        __threadfence();
        for (int query = warp; query < GROUP; query += WARPS) {
          float values[D / 32] = {};
          const float total = scratch.merged(values, pair, query, part.num_parts, lane);
          store_quotient<D>(out, part.row, first_head + query, values, total, lane);
        }
      }
    }
    if (threadIdx.x == 0) schedule.advance();
    __syncthreads();  // before the next part overwrites what is shared
  }
}
