// The fast AR's attention: at most 16 positions, kept as long as a frame. Norm, rotation, append and
// attention of POSITIONS new positions of one row and one key/value head by one CTA.
//   HEAD_DIM (D), GROUP query heads per key/value head, POSITIONS (1 or 2); IS_LAST_ONLY: the last alone
//   attends.
//   IS_CHAINED: positions from before this launch are read, and the next kernel starts, before the kernel
//   before it has ended.
#include "attention.cuh"

constexpr int D = HEAD_DIM;
constexpr int LANES = HeadLanes<D>::COUNT;
constexpr int TASKS = GROUP + 2;  // heads a position has: queries, key, value
constexpr int WARPS = (POSITIONS * TASKS * LANES + 31) / 32;
static_assert(POSITIONS <= WARPS && GROUP <= COLUMNS);

using FrameTile = Bf16Tile<D>;

struct Shared {
  bf16 queries[POSITIONS][GROUP][FrameTile::QUERY_STRIDE];
  bf16 keys[POSITIONS][D], values[POSITIONS][D];
};

// Grid: (H_kv, R).
//   qkv [R * POSITIONS, H + 2 H_kv, D], qk_norm [H + H_kv, D] or null, rope [n, D / 2] cos and sin,
//   memory [2, capacity, H_kv, num_held, D]: keys, then values; positions start.. are written.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    frame_attention(const bf16* qkv, const bf16* qk_norm, const float2* rope, bf16* memory,
                    bf16* out_values, u8* out_quantised, float* out_scales, float eps,
                    float scale_log2, int start, int capacity, int num_held) {
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.x, num_kv_heads = gridDim.x, num_heads = num_kv_heads * GROUP;
  const int first_row = blockIdx.y * POSITIONS;
  bf16* keys_at = memory + (static_cast<i64>(blockIdx.y) * num_kv_heads + kv_head) * num_held * D;
  bf16* values_at = keys_at + static_cast<i64>(capacity) * num_kv_heads * num_held * D;
  if (IS_CHAINED)
    let_next_kernel_start();
  else
    wait_for_previous_kernels(), let_next_kernel_start();
  FrameTile tile;
  if (warp < POSITIONS) {  // rows from `start` on are patched below
    tile.keys.load(keys_at, max(start - 1, 0), lane);
    tile.load_values(values_at, max(start - 1, 0), lane);
  }
  const int task = threadIdx.x / LANES, offset = threadIdx.x % LANES * 8;
  const int idx = min(task / TASKS, POSITIONS - 1), part = task % TASKS;
  const int head = part < GROUP    ? kv_head * GROUP + part
                   : part == GROUP ? num_heads + kv_head
                                   : num_heads + num_kv_heads + kv_head;
  const bf16* weight = qk_norm == nullptr ? nullptr : qk_norm + (part > GROUP ? 0 : head) * D;
  const HeadTables tables = load_tables(weight, rope + (start + idx) * (D / 2), offset);
  if (IS_CHAINED) wait_for_previous_kernels();

  const i64 all_heads = num_heads + 2 * num_kv_heads;
  const uint4 values =
      *reinterpret_cast<const uint4*>(qkv + ((first_row + idx) * all_heads + head) * D + offset);
  const uint4 rotated = rotated_head<D>(values, tables, qk_norm != nullptr, eps);
  if (task < POSITIONS * TASKS) {
    if (part < GROUP) {
      *reinterpret_cast<uint4*>(&shared.queries[idx][part][offset]) = rotated;
    } else {
      const bool is_key = part == GROUP;
      bf16* target = (is_key ? keys_at : values_at) + (start + idx) * D + offset;
      *reinterpret_cast<uint4*>(target) = is_key ? rotated : values;
      *reinterpret_cast<uint4*>(&(is_key ? shared.keys : shared.values)[idx][offset]) =
          is_key ? rotated : values;
    }
  }
  __syncthreads();
  if (warp >= POSITIONS || (IS_LAST_ONLY && warp < POSITIONS - 1)) return;

  const int position = start + warp;  // one warp per new position
  tile.patch({shared.keys[0], nullptr}, {shared.values[0], nullptr}, start, position, lane);
  Accumulator<FrameTile> acc;
  acc.init(shared.queries[warp][lane / 4 % GROUP]);
  acc.add_keys(tile, scale_log2, {position, position}, lane);
  acc.add_values(tile);
  const int num_rows = gridDim.y * (IS_LAST_ONLY ? 1 : POSITIONS);
  const HeadOutput out = {out_values, out_quantised, out_scales, num_rows, num_heads};
  acc.finish(out, IS_LAST_ONLY ? blockIdx.y : first_row + warp, kv_head * GROUP, GROUP, lane);
}
