// Attention of decode's rows over paged keys and values. A cluster of CTAs of WARPS warps shares the positions
// of one row and one key/value head: its warps take tiles of 16 positions in turn and merge what they
// have through distributed shared memory, in a fixed order. For few rows; for very many clusters of one.
//   See decode.cuh; BLOCKS resident CTAs per SM the compiler must allow; SPLITS CTAs of a cluster.
constexpr int MOST_CTAS = 8;  // that share a row
#include "decode.cuh"

// Grid: (SPLITS, H_kv, M), clusters of SPLITS CTAs: 1, 2, 4 or 8, with at most 32 warps.
//   qkv, qk_norm, rope, eps: see `Input`.
//   pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null,
//   page_table [num_slots + 1, max_pages].
//   min_tiles: a row is shared by so many CTAs that each warp has this many tiles.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    attention(const bf16* qkv, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
              bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions,
              bf16* out_values, u8* out_quantised, float* out_scales, float eps, float scale_log2,
              int max_pages, int min_tiles) {
  __shared__ __align__(16) Shared shared;
  extern __shared__ __align__(128) u8 dynamic[];  // of the rings
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int kv_head = blockIdx.y, row = blockIdx.z, num_kv_heads = gridDim.y;
  const int num_heads = num_kv_heads * GROUP;
  if (IS_CHAINED)
    let_next_kernel_start();
  else
    wait_for_previous_kernels(), let_next_kernel_start();
  const int position = static_cast<int>(positions[row]);
  const i32* table = page_table + slots[row] * max_pages;
  const int last_tile = position / TILE;
  const int active = SPLITS == 1 ? 1 : active_ctas(last_tile + 1, min_tiles), ways = active * WARPS;
  if (rank >= active) return;
  const Meeting meeting = {&shared.storage, active, rank, warp, lane, shared_address(&shared.met)};
  meeting.arrive();
  Walk<Tile> walk = {{{pages, kv_scales}, table, num_kv_heads, kv_head, max_pages},
                     rank * WARPS + warp, ways, lane};
  const Input input = {qkv, qk_norm, rope, eps, scale_log2, num_heads, num_kv_heads};
  const bool is_last = last_tile % ways / WARPS == rank;
  Accumulator<Tile> acc;
  Feed feed = feed_of(dynamic, warp, lane);
  attend(acc, feed, shared, input, walk, row, position, last_tile + 1, is_last);
  meeting.wait();
  acc.store(
      lane, [](int query) { return query < GROUP; },
      [&](int query) { return meeting.place_of(query); });
  const HeadOutput out = {out_values, out_quantised, out_scales, static_cast<int>(gridDim.z), num_heads};
  meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
    store_quotient<D>(out, row, kv_head * GROUP + query, values, state.y, lane);
  });
}
