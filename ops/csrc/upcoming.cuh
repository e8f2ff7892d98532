// The weights of the linear that comes next, asked into the L2 by a kernel that has asked for all of its
// own: memory would be idle from there until the next linear's CTAs have their place, their rows, and
// free stages.
#pragma once

#include "common.cuh"

namespace {

struct Upcoming {
  const u8* tiles;  // [row tiles, num_blocks, 8192], or null
  int row_tiles, num_blocks;
  int split;   // parts of K that different CTAs take
  int first, blocks;  // of each part: those that are asked for
};

// One thread of every CTA calls this.
DEVICE void prefetch_upcoming(const Upcoming& next) {
  const int parts = next.tiles == nullptr ? 0 : next.row_tiles * next.split;
  const int cta = blockIdx.y * gridDim.x + blockIdx.x, num_ctas = gridDim.x * gridDim.y;
  for (int i = cta; i < parts; i += num_ctas) {
    const int rank = i % next.split;
    const int begin = rank * next.num_blocks / next.split + next.first;
    const int end = min(begin + next.blocks, (rank + 1) * next.num_blocks / next.split);
    if (begin >= end) continue;
    const u8* source =
        next.tiles + (static_cast<i64>(i / next.split) * next.num_blocks + begin) * 8192;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"((end - begin) * 8192)
                 : "memory");
  }
}

}  // namespace
