// Queries and keys normed and rotated; keys and values written into their pages. One launch.
//   HEAD_DIM (D), PAGE positions of a page, IS_FP8: keys and values in 8 bits.
#include "kv_rows.cuh"

constexpr int D = HEAD_DIM;
constexpr int LANES = HeadLanes<D>::COUNT;
#if IS_FP8
using Rows = Fp8Rows<D>;
#else
using Rows = Bf16Rows<D>;
#endif

// Grid: (ceil((H + 2 H_kv) / heads of a block), M).
//   qkv [M, H + 2 H_kv, D], qk_norm [H + H_kv, D] or null, rope [max_len, D / 2] cos and sin,
//   pages [P, 2, H_kv, PAGE, D], kv_scales [P, 2, H_kv, PAGE] or null,
//   page_table [num_slots + 1, max_pages], q [M, H, D].
extern "C" __global__ void __launch_bounds__(128)
    rope_append(const bf16* qkv, const bf16* qk_norm, const float2* rope, Rows::Element* pages,
                bf16* kv_scales, const i32* page_table, const i64* slots, const i64* positions, bf16* q,
                float eps, int num_heads, int num_kv_heads, int max_pages) {
  const int row = blockIdx.y, num_all = num_heads + 2 * num_kv_heads;
  const int head = (blockIdx.x * 128 + threadIdx.x) / LANES;
  const int offset = threadIdx.x % LANES * 8;
  const int at = min(head, num_all - 1);  // lanes past the end take part in the reductions
  wait_for_previous_kernels();
  let_next_kernel_start();
  const i64 position = positions[row], slot = slots[row];
  const uint4 values = *reinterpret_cast<const uint4*>(qkv + (static_cast<i64>(row) * num_all + at) * D + offset);
  const i64 page = page_table[slot * max_pages + position / PAGE];
  const bool is_value = at >= num_heads + num_kv_heads;
  const bf16* weight = qk_norm == nullptr ? nullptr : qk_norm + (is_value ? 0 : at) * D;
  const HeadTables tables = load_tables(weight, rope + position * (D / 2), offset);
  const uint4 rotated = rotated_head<D>(values, tables, qk_norm != nullptr, eps);
  const Rows::Eight eight = Rows::eight(is_value ? values : rotated);
  if (head >= num_all) return;
  if (head < num_heads) {
    bf16* target = q + (static_cast<i64>(row) * num_heads + head) * D + offset;
    *reinterpret_cast<uint4*>(target) = rotated;
    return;
  }
  const int plane = head - num_heads;  // keys of all heads, then values
  const Rows rows = {pages, kv_scales};
  rows.store((page * 2 * num_kv_heads + plane) * PAGE + position % PAGE, offset, eight);
}
