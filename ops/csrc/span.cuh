// What several rows of one key/value head need to share reads: their queries as columns of mmas.
//   HEAD_DIM (D), GROUP query heads per key/value head, PAGE positions of a page, WARPS,
//   BATCHES of eight columns (an mma's) per warp, IS_FP8: keys and values in 8 bits.
#pragma once

#include "paged.cuh"

constexpr int D = HEAD_DIM;
constexpr int ROWS = COLUMNS / GROUP;  // of a batch
constexpr int SPAN = BATCHES * ROWS, QUERIES = BATCHES * COLUMNS;
static_assert(SPAN <= 32);
using Tile = KvTile<D>;

// Column c of batch b is head c % GROUP of row b * ROWS + c / GROUP; columns past the last repeat it.
DEVICE int row_of(int batch, int column) { return batch * ROWS + min(column / GROUP, ROWS - 1); }

//   MOST CTAs share the rows.
template <int MOST>
struct SpanShared {
  using Meeting = Exchange<D, QUERIES, MOST>;
  typename Meeting::Storage storage;
  bf16 queries[SPAN * GROUP][Tile::QUERY_STRIDE];  // of heads, row by row

  // Takes the queries of q [M, H, D] from `first_row` on; rows past the last repeat it.
  DEVICE void take_queries(const bf16* q, int first_row, int num_rows, int kv_head, int num_heads) {
    for (int i = threadIdx.x; i < SPAN * GROUP * D / 8; i += WARPS * 32) {
      const int query = i / (D / 8), offset = i % (D / 8) * 8, row = min(first_row + query / GROUP, num_rows - 1);
      const i64 head = static_cast<i64>(row) * num_heads + kv_head * GROUP + query % GROUP;
      const uint4 values = *reinterpret_cast<const uint4*>(q + head * D + offset);
      *reinterpret_cast<uint4*>(&queries[query][offset]) = Tile::query(values);
    }
    __syncthreads();
  }

  DEVICE const bf16* query_of(int batch, int lane) const {
    return queries[row_of(batch, lane / 4) * GROUP + lane / 4 % GROUP];
  }
};
