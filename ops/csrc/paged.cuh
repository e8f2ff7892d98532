// Paged keys and values, and how the warps that share them put their partial results together.
//   PAGE positions of a page, WARPS of a CTA.
#pragma once

#include "attention.cuh"

static_assert(PAGE % TILE == 0);

// One layer's pages, and what a row and key/value head reads of them. A row of memory holds the D keys
// or values of a position.
template <typename Tile>
struct Memory {
  typename Tile::Rows rows;
  const i32* table;  // the slot's row
  int num_kv_heads, head, max_pages;

  // The row of a tile's first key; `page` holds it.
  DEVICE i64 row_at(int page, int tile) const {
    return (static_cast<i64>(page) * 2 * num_kv_heads + head) * PAGE + tile * TILE % PAGE;
  }
  // From a key's row to its value's.
  DEVICE i64 values_offset() const { return num_kv_heads * PAGE; }

  DEVICE void load_keys(Tile& tile, i64 row, int last_row, int lane) const {
    tile.keys.load(rows.data + row * Tile::D, last_row, lane);
  }
  DEVICE void load_values(Tile& tile, i64 row, int last_row, int lane) const {
    tile.load_values(rows.data + (row + values_offset()) * Tile::D, last_row, lane);
  }
};

// The tiles of one warp: `first`, and every `stride`-th from there.
template <typename Tile>
struct Walk {
  Memory<Tile> memory;
  int first, stride, lane;
  int pages;  // of the next 32 tiles, one per lane

  // Takes the pages of tiles `step` and following (a multiple of 32); 0 past the table's end.
  DEVICE void take_pages(int step) {
    const int page = (first + (step + lane) * stride) / (PAGE / TILE);
    pages = page < memory.max_pages ? max(memory.table[page], 0) : 0;
  }

  // The row of the first key of tile `step`, one of the 32 whose pages are taken.
  DEVICE i64 row_at(int step) const {
    return memory.row_at(__shfl_sync(~0u, pages, step % 32), first + step * stride);
  }

  // Asks for tile `step` to be in the L2, if it is among those whose pages are taken with `now`.
  DEVICE void prefetch(int now, int step, int num_tiles) const {
    if (first + step * stride >= num_tiles || step / 32 != now / 32) return;
    constexpr int LINE = 128 / sizeof(typename Tile::Rows::Element);
    constexpr int LINES = TILE * Tile::D / LINE;  // of the keys; of the values as many
    const typename Tile::Rows::Element* keys = memory.rows.data + row_at(step) * Tile::D;
#pragma unroll
    for (int i = 0; i < 2 * LINES; i += 32) {
      const int line = (i + lane) % (2 * LINES);
      const auto* at = keys + (line < LINES ? 0 : memory.values_offset() * Tile::D) + line % LINES * LINE;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
};

// CTAs of a cluster that share a row: those that get at least `min_tiles` tiles per warp. It depends
// on the row's length alone; the others have nothing to do and leave.
DEVICE int active_ctas(int num_tiles, int min_tiles) {
  const int wanted = (num_tiles + WARPS * min_tiles - 1) / (WARPS * min_tiles);
  return min(wanted, static_cast<int>(gridDim.x));
}

// Where partial results of `QUERIES` queries meet: query q in CTA q % active, from every warp of every
// active CTA, in shared memory. At most 32 warps.
//   MOST CTAs may be active.
template <int D, int QUERIES, int MOST>
struct Exchange {
  // Queries that meet in one CTA, times warps: most for one CTA or for all.
  static constexpr int most(int active) {
    return active * WARPS > 32 ? 0 : active * WARPS * ((QUERIES + active - 1) / active);
  }
  static constexpr int most_of_all() {
    int capacity = 0;
    for (int active = 1; active <= MOST; active++)
      if (most(active) > capacity) capacity = most(active);
    return capacity;
  }
  static constexpr int CAPACITY = most_of_all();
  struct Storage {
    float sums[CAPACITY][D];
    float2 states[CAPACITY];
  };

  Storage* storage;
  int active, rank, warp, lane;
  u32 met = 0;  // barrier in shared memory that counts what is sent here; 0: the cluster waits for itself

  DEVICE int queries_per_cta() const { return (QUERIES + active - 1) / active; }

  // Before the first `store`: the shared memory of all active CTAs may be written.
  DEVICE void arrive() const {
    if (active == 1) return;
    if (met == 0) return cluster_arrive();
    if (threadIdx.x == 0 && rank < QUERIES) {
      barrier_init(met, 1);
      barrier_init_fence();
      barrier_expect(met, (QUERIES - rank + active - 1) / active * active * WARPS * (D * 4 + 8));
    }
    cluster_arrive_relaxed();
  }
  DEVICE void wait() const {
    if (active > 1) cluster_wait();
  }

  // Addresses for this warp's part of a query.
  DEVICE Place place_of(int query) const {
    const int at = (rank * WARPS + warp) * queries_per_cta() + query / active;
    const u32 sums = shared_address(storage->sums[at]), state = shared_address(&storage->states[at]);
    if (active == 1) return {sums, state, 0};
    const int to = query % active;
    return {cluster_address(sums, to), cluster_address(state, to), met == 0 ? 0 : cluster_address(met, to)};
  }

  // Once every warp has stored: merges in a fixed order what meets in this CTA, and hands it over.
  //   take: of a query, by its number; this lane's D / 32 weighted sums, and (best, total).
  template <typename Take>
  DEVICE void merge(Take take) const {
    if (active == 1) {
      __syncthreads();
    } else if (met == 0) {
      cluster_arrive(), cluster_wait();
    } else {
      if (rank >= QUERIES) return;
      barrier_wait_cluster(met, 0);
    }
    const int ways = active * WARPS, stride = queries_per_cta();
    for (int slot = warp; slot * active + rank < QUERIES; slot += WARPS) {
      const float2 state = lane < ways ? storage->states[lane * stride + slot] : make_float2(LOWEST, 0);
      const float best = warp_max(state.x);
      const float weight = power_of_2(state.x - best);  // 0 where a warp had no tile
      const float total = warp_sum(state.y * weight);
      float values[D / 32] = {};
#pragma unroll 8
      for (int way = 0; way < ways; way++) {
        const float factor = __shfl_sync(~0u, weight, way);
        const float* part = storage->sums[way * stride + slot] + lane * (D / 32);
#pragma unroll
        for (int i = 0; i < D / 32; i += 2) {
          const float2 pair = *reinterpret_cast<const float2*>(part + i);
          values[i] += pair.x * factor, values[i + 1] += pair.y * factor;
        }
      }
      take(slot * active + rank, values, make_float2(best, total));
    }
  }
};

// Stores weighted sums as a head of a row.
template <int D>
DEVICE void store_quotient(const HeadOutput& out, int row, int head, float (&values)[D / 32], float total,
                           int lane) {
  const float inverse = 1.f / total;
#pragma unroll
  for (int i = 0; i < D / 32; i++) values[i] *= inverse;
  store_head<D>(out, row, head, values, lane);
}
