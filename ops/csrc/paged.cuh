// Paged keys and values, and how the warps that share them put their partial results together.
//   PAGE positions of a page.
#pragma once

#include "attention.cuh"

static_assert(PAGE % TILE == 0);

template <int D>
struct Memory {  // one layer's pages, and what the row reads of them
  const bf16* pages;
  const i32* table;  // the slot's row
  int num_kv_heads, head, max_pages;
  int ways;  // warps that share the row and head, at most 32

  // Row 0 of a tile's keys; `page` holds it.
  DEVICE const bf16* keys_at(int page, int tile) const {
    return pages + ((static_cast<i64>(page) * 2 * num_kv_heads + head) * PAGE + tile * TILE % PAGE) * D;
  }
  DEVICE i64 values_offset() const { return static_cast<i64>(num_kv_heads) * PAGE * D; }
};

// Pages of the next 32 tiles of this warp, one per lane; 0 past the table's end.
template <int D>
DEVICE int load_pages(const Memory<D>& memory, int first_tile, int lane) {
  const int page = (first_tile + lane * memory.ways) / (PAGE / TILE);
  return page < memory.max_pages ? memory.table[page] : 0;
}

// Merges the partial results of all warps of the cluster, in a fixed order, and stores the queries this
// warp is given. Every warp has left sums [QUERIES, D] and states [QUERIES] in its CTA's shared memory.
//   place_of: the row and head of a query; row < 0: there is none.
template <int D, int QUERIES, int NUM_WARPS, typename PlaceOf>
DEVICE void merge(const float* all_sums, const float2* all_states, const Output& out, int splits,
                  int warp, int lane, PlaceOf place_of) {
  const int ways = splits * NUM_WARPS, rank = blockIdx.x;
  const u32 states = shared_address(all_states), sums = shared_address(all_sums);
  for (int query = rank + splits * warp; query < QUERIES; query += ways) {
    const int2 place = place_of(query);
    if (place.x < 0) continue;
    float best = LOWEST, total = 0;
    if (lane < ways) {
      const u32 at = cluster_address(states, lane / NUM_WARPS) + (lane % NUM_WARPS * QUERIES + query) * 8;
      best = cluster_load(at), total = cluster_load(at + 4);
    }
    const float weight = exp2f(best - warp_max(best));  // 0 where a warp had no tile
    const float inverse = 1.f / warp_sum(total * weight);
    float values[D / 32] = {};
#pragma unroll 8
    for (int way = 0; way < ways; way++) {
      const float factor = __shfl_sync(~0u, weight, way);
      const u32 at = cluster_address(sums, way / NUM_WARPS) + (way % NUM_WARPS * QUERIES + query) * D * 4 +
                     lane * (D / 32) * 4;
#pragma unroll
      for (int i = 0; i < D / 32; i += 2) {
        const float2 part = cluster_load2(at + i * 4);
        values[i] += part.x * factor, values[i + 1] += part.y * factor;
      }
    }
#pragma unroll
    for (int i = 0; i < D / 32; i++) values[i] *= inverse;
    store_head<D>(out, place.x, place.y, values, lane);
  }
}
