// Attention of many rows of any lengths. Every row is cut into equal parts of at most `part_tiles` tiles,
// and CTAs of WARPS warps take parts of a key/value head in turn, long ones first. Parts of one row meet in
// global memory: whichever CTA ends last merges them, in their order.
//   See decode.cuh; BLOCKS resident CTAs per SM the compiler must allow.
#include "decode.cuh"

constexpr int MAX_ROWS = 128, MAX_PARTS = 16;  // of a row
constexpr int THREADS = WARPS * 32;

struct Cut {  // of a row of so many tiles
  int num_parts, part_tiles;

  DEVICE Cut(int num_tiles, int most_tiles) {
    num_parts = (num_tiles + most_tiles - 1) / most_tiles;
    part_tiles = (num_tiles + num_parts - 1) / num_parts;
  }
};

// Every part of every row, long ones first. All CTAs make the same.
struct Schedule {
  __align__(16) u32 cuts[MAX_ROWS];  // tiles of a part, number of parts << 16
  unsigned short parts[MAX_ROWS * MAX_PARTS];  // row, number of the part << 8

  // Returns the number of parts.
  DEVICE int make(const i64* positions, int num_rows, int part_tiles) {
    for (int row = threadIdx.x; row < MAX_ROWS; row += THREADS) {
      cuts[row] = 0;
      if (row >= num_rows) continue;
      const Cut cut(static_cast<int>(positions[row]) / TILE + 1, part_tiles);
      cuts[row] = cut.part_tiles | cut.num_parts << 16;
    }
    __syncthreads();
    int total = 0;
    for (int row = threadIdx.x; row < MAX_ROWS; row += THREADS) {
      const u32 tiles = cuts[row] & 0xffff, num_parts = cuts[row] >> 16;
      int before = 0;
      total = 0;
#pragma unroll 4
      for (int i = 0; i < MAX_ROWS; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(&cuts[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 other = word(four, j), other_tiles = other & 0xffff;
          total += other >> 16;
          if (other_tiles > tiles || (other_tiles == tiles && i + j < row)) before += other >> 16;
        }
      }
      for (int part = 0; part < num_parts; part++) parts[before + part] = row | part << 8;
    }
    __syncthreads();
    return total;
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
    const float weight = exp2f(state.x - warp_max(state.x));
    for (int part = 0; part < num_parts; part++) {
      const float factor = __shfl_sync(~0u, weight, part);
      const float* from = sums + place(pair, part, query) * D + lane;
#pragma unroll
      for (int i = 0; i < D / 32; i++) values[i] += __ldcg(from + 32 * i) * factor;
    }
    return warp_sum(state.y * weight);
  }
};

// Grid: any number of CTAs. q, qk_norm, rope, eps: see `Input`; the rest as in attention.cu.
//   num_rows: M, at most MAX_ROWS; part_tiles: 16 or more (so that none is empty), and so many that no row
//   has more than MAX_PARTS parts, nor more than `most_parts`, for which there is room in the scratch.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_parts(const bf16* q, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
                    bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions,
                    bf16* out_values, u8* out_quantised, float* out_scales, float* sums,
                    float2* states, u32* counts, float eps, float scale_log2, int max_pages,
                    int num_rows, int num_kv_heads, int part_tiles, int most_parts, int depth) {
  __shared__ __align__(16) Shared shared;
  __shared__ Schedule schedule;
  __shared__ bool is_complete;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_heads = num_kv_heads * GROUP;
  if (!IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const int num_parts = schedule.make(positions, num_rows, part_tiles);
  const Input input = {q, qk_norm, rope, eps, scale_log2, num_heads, num_kv_heads};
  const Output out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  const Scratch scratch = {sums, states, counts, most_parts};
  const Meeting meeting = {&shared.storage, 1, 0, warp, lane};

#pragma unroll 1
  for (int round = 0;; round++) {
    // Back and forth, so that who has had a long part has a short one next.
    const int place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int at = round * gridDim.x + place;
    if (at >= num_parts * num_kv_heads) return;
    const int kv_head = at % num_kv_heads, part = schedule.parts[at / num_kv_heads] >> 8;
    const int row = schedule.parts[at / num_kv_heads] & 0xff, pair = row * num_kv_heads + kv_head;
    const int position = static_cast<int>(positions[row]), num_tiles = position / TILE + 1;
    const Cut cut(num_tiles, part_tiles);
    const int first = part * cut.part_tiles, end = min(first + cut.part_tiles, num_tiles);
    Walk<Tile> walk = {
        {{pages, kv_scales}, page_table + slots[row] * max_pages, num_kv_heads, kv_head, max_pages},
        first + warp, WARPS, lane};
    Accumulator<Tile> acc;
    attend(acc, shared, input, walk, row, position, end, end == num_tiles, depth);
    acc.store(
        lane, [](int query) { return query < GROUP; },
        [&](int query) { return meeting.place_of(query); });
    meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
      if (cut.num_parts == 1)
        store_quotient<D>(out, row, kv_head * GROUP + query, values, state.y, lane);
      else
        scratch.store(scratch.place(pair, part, query), values, state, lane);
    });
    if (cut.num_parts > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0)
        is_complete = atomicInc(&counts[pair], cut.num_parts - 1) == cut.num_parts - 1;
      __syncthreads();
      if (is_complete) {
        __threadfence();
        for (int query = warp; query < GROUP; query += WARPS) {
          float values[D / 32] = {};
          const float total = scratch.merged(values, pair, query, cut.num_parts, lane);
          store_quotient<D>(out, row, kv_head * GROUP + query, values, total, lane);
        }
      }
    }
    __syncthreads();  // before the next part overwrites what is shared
  }
}
