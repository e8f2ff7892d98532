// out [M, N] = x [M, K] * weight [N, K]^T for tens of rows, where the copies of x that SMs read would
// weigh as much as the weights.
//
// x is the left operand, 64 rows per warpgroup; the weights are the right one, WIDTH of their rows per
// warpgroup. A CTA takes 64 * ROW_GROUPS rows of x and kWidth = WIDTH * COL_GROUPS of the weight: any
// multiple of 16, so that a matrix is cut into about as many equal parts as there are SMs, and an SM
// reads x once for all of its part. CTAs (x, 0), (x, 1), ... take the rows of x.
//
// A cluster of SPLIT CTAs shares a tile's K; the partial sums meet in shared memory, summed in the
// order of the ranks, so that a result never varies. What is fetched before
// `wait_for_previous_kernels` is weights only.
//
// Defines: IS_FP8 (e4m3 with a scale per 1x128 of x and 128x128 of the weight, else bf16), WIDTH,
// ROW_GROUPS, COL_GROUPS, STAGES, SPLIT, GATE_UP (rows are 8 of gate, 8 of up, ...; SwiGLU; fp8 is
// quantised again, for which the CTAs that hold GROUPS groups of 128 features form a cluster), PARTS
// (of WIDTH, multiplied one after the other for want of registers), BLOCKS_PER_SM (CTAs an SM must
// have registers for).

#include "linear_wide_epilogue.cuh"

namespace {

struct Shared {
  u32 ring, scales, full, empty;
};

struct Problem {
  const u8* tiles;          // [row tiles, num_blocks, 8192]
  const float* act_scales;  // [num_blocks, scale_stride]
  int num_blocks;           // of 128 bytes of K
  int scale_stride;
  int first, end;     // of this CTA: rows of the weight
  int begin, blocks;  // its K tiles
  int first_row;      // of x
  int act_bytes;      // of a stage: of no more rows than x has, as the copy engine fills others slowly
};

// Rows `first` to `end`, 128 bytes of K of each; a row tile holds 64 of them.
DEVICE void load_weights(const Shared& shared, const Problem& p, int block, int stage) {
  const u32 barrier = shared.full + stage * 8;
  barrier_expect(barrier, (p.end - p.first) * 128);
  u32 target = shared.ring + stage * kStageBytes;
  for (int row = p.first; row < p.end;) {
    const int rows = min(64 - row % 64, p.end - row);
    const i64 tile = static_cast<i64>(row / 64) * p.num_blocks + block;
    bulk_copy_streamed(target, p.tiles + tile * kTileBytes + row % 64 * 128, rows * 128, barrier);
    target += rows * 128, row += rows;
  }
}

DEVICE void load_activations(const Shared& shared, const Problem& p, const TensorMap& map, int block,
                             int stage) {
  const u32 barrier = shared.full + stage * 8;
  const u32 scale_bytes = IS_FP8 ? min(p.scale_stride - p.first_row, kRows) * 4 : 0;
  barrier_expect(barrier, p.act_bytes + scale_bytes);
  load_rows(shared.ring + stage * kStageBytes + kWeightBytes, map, block, p.first_row, barrier);
  if (IS_FP8)
    bulk_copy(shared.scales + stage * kRows * 4,
              p.act_scales + static_cast<i64>(block) * p.scale_stride + p.first_row, scale_bytes,
              barrier);
}

// One thread's work: starts the ring with weights, waits for the kernels before, keeps the ring full.
struct Producer {
  const Shared& shared;
  const Problem& p;
  const TensorMap& map;
  int next;  // step to load
  Stage stage;

  DEVICE void start() {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full + stage * 8, 2);  // weights, activations
      barrier_init(shared.empty + stage * 8, kConsumers / 32);
    }
    barrier_init_fence();
    fence_async_proxy();
    next = min(STAGES, p.blocks);
    for (int i = 0; i < next; ++i) load_weights(shared, p, p.begin + i, i);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }

  DEVICE void run() {
    wait_for_previous_kernels();
    for (int i = 0; i < next; ++i) load_activations(shared, p, map, p.begin + i, i);
    for (; next < p.blocks; ++next) {
      barrier_wait(shared.empty + stage.index * 8, stage.parity);
      load_weights(shared, p, p.begin + next, stage.index);
      load_activations(shared, p, map, p.begin + next, stage.index);
      stage.advance();
    }
  }
};

// acc += part * (scale of its row of x * scale of its 8 rows of the weight): a block of 128.
DEVICE void add_scaled(float* acc, const float (&part)[kPart / 2], float2 row_scales,
                       const float* unit_scales) {
#pragma unroll
  for (int unit = 0; unit < kPart / 8; ++unit) {
    const float scale = unit_scales[unit];
    const float upper = row_scales.x * scale, lower = row_scales.y * scale;
    acc[unit * 4 + 0] += part[unit * 4 + 0] * upper;
    acc[unit * 4 + 1] += part[unit * 4 + 1] * upper;
    acc[unit * 4 + 2] += part[unit * 4 + 2] * lower;
    acc[unit * 4 + 3] += part[unit * 4 + 3] * lower;
  }
}

DEVICE void release(const Shared& shared, int stage, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(shared.empty + stage * 8);
}

// The sums over this CTA's part of K, in the register layout of wgmma.cuh.
DEVICE void consume(float (&acc)[WIDTH / 2], const Shared& shared, const float* act_scales,
                    const float* unit_scales, int num_blocks, int row_group, int col_group, int warp,
                    int lane) {
  Stage stage;
  int last = 0;
  for (int block = 0; block < num_blocks; ++block) {
    barrier_wait(shared.full + stage.index * 8, stage.parity);
    const u32 base = shared.ring + stage.index * kStageBytes;
    const u32 weights = base + col_group * WIDTH * 128;
    const u32 activations = base + kWeightBytes + row_group * 8192;
    if constexpr (IS_FP8) {
      const float* scales = act_scales + stage.index * kRows + row_group * 64 + warp % 4 * 16 + lane / 4;
      const float2 row_scales = {scales[0], scales[8]};
      const float* units = unit_scales + block * kUnits + col_group * (WIDTH / 8);
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        float part[kPart / 2];
        multiply<kPart>(part, activations, weights + i * kPart * 128, false);
        wgmma_wait<0>();
        if (i == PARTS - 1) release(shared, stage.index, lane);
        add_scaled(acc + i * kPart / 2, part, row_scales, units + i * kPart / 8);
      }
    } else {
      multiply<WIDTH>(acc, activations, weights, block > 0);
      if (block > 0) wgmma_wait<1>(), release(shared, last, lane);
      last = stage.index;
    }
    stage.advance();
  }
  if (!IS_FP8) wgmma_wait<0>();
}

// From here to the last barrier the CTAs of the cluster may write into each other's exchange.
DEVICE void open_exchange() {
  if (kCluster == 1) return;
  if (!kQuantises) cluster_arrive();  // in the ring: when all CTAs are done with theirs
  cluster_wait();
}

DEVICE void close_exchange() {
  if (kCluster == 1)
    consumers_sync();
  else
    cluster_arrive(), cluster_wait();
}

DEVICE void finish(const float (&acc)[WIDTH / 2], u32* maxima, u8* ring, const Output& o, int first,
                   int end, int rank, const Place& at) {
  if constexpr (GATE_UP) {
    float h[WIDTH / 4];
    swiglu_all(h, acc);
    if constexpr (IS_FP8) {
      open_exchange();
      send_maxima(h, shared_address(maxima), first / 2, end / 2, rank, at);
      close_exchange();
      store_fp8_tile(h, maxima, ring, o, first / 2, rank, at);
    } else {
      store_bf16_tile(h, ring, o, first / 2, at);
    }
  } else {
    uint4 residuals[kItems];
    if (kCluster == 1) consumers_sync();  // all warps are past the last stage
    open_exchange();
    send_partial_sums(acc, shared_address(ring), o.num_rows, rank, at);
    load_residuals(residuals, o, first, rank, at.thread);
    close_exchange();
    store_summed(reinterpret_cast<const float4*>(ring), residuals, o, first, rank, at.thread);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    linear_wide(const __grid_constant__ TensorMap map, const u8* tiles, const float* tile_scales,
                const float* act_scales, Output output, int num_blocks, int row_tiles) {
  extern __shared__ __align__(1024) u8 ring[];
  float* scales = reinterpret_cast<float*>(ring + STAGES * kStageBytes);
  u32* maxima = reinterpret_cast<u32*>(scales + (IS_FP8 ? STAGES * kRows : 0));
  u64* barriers = reinterpret_cast<u64*>(maxima + kMaxima);
  float* unit_scales = reinterpret_cast<float*>(barriers + 2 * STAGES);  // [blocks][kUnits]

  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int first = blockIdx.x / SPLIT * kWidth, first_row = blockIdx.y * kRows;
  const int end = max(first, min(first + kWidth, row_tiles * 64));
  const int begin = SPLIT > 1 ? rank * num_blocks / SPLIT : 0;
  const int stop = SPLIT > 1 ? (rank + 1) * num_blocks / SPLIT : num_blocks;
  const int blocks = first < end ? stop - begin : 0;
  const Shared shared = {shared_address(ring), shared_address(scales), shared_address(barriers),
                         shared_address(barriers + STAGES)};
  const Problem problem = {tiles, act_scales, num_blocks, output.scale_stride, first,
                           end,   begin,      blocks,     first_row,
                           min(kRows, (output.num_rows + 7) / 8 * 8) * 128};
  Producer producer = {shared, problem, map};
  const bool is_producer = thread == kConsumers;
  if (is_producer) producer.start();
  __syncwarp();
  if (IS_FP8)
    for (int i = thread; i < blocks * kUnits; i += kThreads) {
      const int row = min(first + i % kUnits * 8, end - 8), block = begin + i / kUnits;
      unit_scales[i] = tile_scales[(static_cast<i64>(row / 64) * num_blocks + block) * 2 + row / 8 % 2];
    }
  for (int i = thread; i < kMaxima; i += kThreads) maxima[i] = 0;
  __syncthreads();
  if (kQuantises && kCluster > 1) cluster_arrive();  // this CTA runs, its maxima are zeros
  if (warp == kConsumers / 32) {
    if (is_producer) producer.run();
    __syncwarp();
    if (kCluster > 1) open_exchange(), close_exchange();
    return;
  }

  const int group = warp / 4;
  float acc[WIDTH / 2] = {};
  consume(acc, shared, scales, unit_scales, blocks, group / COL_GROUPS, group % COL_GROUPS, warp, lane);
  wait_for_previous_kernels();

  output.keep_rows(first_row, kRows);
  finish(acc, maxima, ring, output, first, end, rank,
         {thread, group / COL_GROUPS * 64 + warp % 4 * 16 + lane / 4, group % COL_GROUPS, lane});
}
