// Attention of decode's rows, one or two, whose wo merges what the CTAs that share a row have found: nothing is
// waited for in between. CTAs of WARPS warps take tiles of 16 positions of one row and one key/value head in
// turn.
//   See decode.cuh; BLOCKS resident CTAs per SM the compiler must allow.
constexpr int MOST_CTAS = 1;  // that merge among themselves
#include "decode.cuh"

// Grid: (splits, H_kv, M). sums [M, H, splits, D], states [M, H, splits]: see linear_merge.cuh; the rest as in
// attention.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    attention_split(const bf16* qkv, const bf16* qk_norm, const float2* rope, Tile::Rows::Element* pages,
                    bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions, float* sums,
                    float2* states, float eps, float scale_log2, int max_pages) {
  __shared__ __align__(16) Shared shared;
  extern __shared__ __align__(128) u8 dynamic[];  // of the rings
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x, ways = gridDim.x * WARPS;
  const int kv_head = blockIdx.y, row = blockIdx.z, num_kv_heads = gridDim.y, num_heads = num_kv_heads * GROUP;
  if (IS_CHAINED)
    let_next_kernel_start();
  else
    wait_for_previous_kernels(), let_next_kernel_start();
  const int position = static_cast<int>(positions[row]), last_tile = position / TILE;
  const i32* table = page_table + slots[row] * max_pages;
  Walk<Tile> walk = {{{pages, kv_scales}, table, num_kv_heads, kv_head, max_pages}, rank * WARPS + warp, ways, lane};
  const Input input = {qkv, qk_norm, rope, eps, scale_log2, num_heads, num_kv_heads};
  const Meeting meeting = {&shared.storage, 1, 0, warp, lane};
  Accumulator<Tile> acc;
  Feed feed = feed_of(dynamic, warp, lane);
  attend(acc, feed, shared, input, walk, row, position, last_tile + 1, last_tile % ways / WARPS == rank);
  acc.store(
      lane, [](int query) { return query < GROUP; },
      [&](int query) { return meeting.place_of(query); });
  meeting.merge([&](int query, float(&values)[D / 32], float2 state) {
    const i64 place = (static_cast<i64>(row) * num_heads + kv_head * GROUP + query) * gridDim.x + rank;
#pragma unroll
    for (int i = 0; i < D / 32; i += 2)
      *reinterpret_cast<float2*>(sums + place * D + lane * (D / 32) + i) = make_float2(values[i], values[i + 1]);
    if (lane == 0) states[place] = state;
  });
}
