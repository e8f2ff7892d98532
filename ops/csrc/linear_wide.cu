// out [M, N] = x [M, K] * weight [N, K]^T for tens of rows, where the copies of x that SMs read would
// weigh as much as the weights.
//
// x is the left operand, 64 rows per warpgroup; the weights are the right one, WIDTH of their rows per
// warpgroup. A CTA takes 64 * ROW_GROUPS rows of x and kWidth = WIDTH * COL_GROUPS of the weight: any
// multiple of 8 (with gate and up, of 16), so that a matrix is cut into about as many equal parts as
// there are SMs, and an SM reads x once for all of its part. CTAs (x, 0), (x, 1), ... take the rows of x.
//
// A cluster of SPLIT CTAs shares a tile's K; the partial sums meet in shared memory, summed in the
// order of the ranks, so that a result never varies. What is fetched before
// `wait_for_previous_kernels` is weights only. Weights and x have rings of their own: loads arrive in
// turn, so that x is late where more weights are asked for than the memory needs to be busy.
//
// Defines: IS_FP8 (e4m3 with a scale per 1x128 of x and 128x128 of the weight, else bf16), WIDTH,
// ROW_GROUPS, COL_GROUPS, STAGES (of weights), ROW_STAGES (of x), SPLIT, GATE_UP (rows are 8 of gate, 8
// of up, ...; SwiGLU; fp8 is quantised again, for which the CTAs that hold GROUPS groups of 128
// features form a cluster), BATCH (blocks of K in straight code, the next product under way while one
// is scaled), PRODUCERS (threads beside those that sum: 32, or 128 that give away their registers),
// BLOCKS_PER_SM (CTAs an SM must have registers for), NORMS and SCALES_ROWS (the RMSNorm after and
// before, see linear_wide_norm.cuh), IN_FEATURES (with SCALES_ROWS: values of a row of x).

#include "linear_wide_norm.cuh"

namespace {

struct Shared {
  u32 weights, rows, scales;              // rings; scales are those of x
  u32 full_weights, full_rows, released;  // their barriers; blocks of both are released together
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
DEVICE void load_weights(const Shared& shared, const Problem& p, int index) {
  const u32 barrier = shared.full_weights + index % STAGES * 8;
  barrier_expect(barrier, (p.end - p.first) * 128);
  u32 target = shared.weights + index % STAGES * kWeightBytes;
  for (int row = p.first; row < p.end;) {
    const int rows = min(64 - row % 64, p.end - row);
    const i64 tile = static_cast<i64>(row / 64) * p.num_blocks + p.begin + index;
    bulk_copy_streamed(target, p.tiles + tile * kTileBytes + row % 64 * 128, rows * 128, barrier);
    target += rows * 128, row += rows;
  }
}

DEVICE void load_activations(const Shared& shared, const Problem& p, const TensorMap& map, int index) {
  const int stage = index % ROW_STAGES, block = p.begin + index;
  const u32 barrier = shared.full_rows + stage * 8;
  const u32 scale_bytes = IS_FP8 ? min(p.scale_stride - p.first_row, kRows) * 4 : 0;
  barrier_expect(barrier, p.act_bytes + scale_bytes);
  load_rows(shared.rows + stage * kActBytes, map, block, p.first_row, barrier);
  if (IS_FP8)
    bulk_copy(shared.scales + stage * kRows * 4,
              p.act_scales + static_cast<i64>(block) * p.scale_stride + p.first_row, scale_bytes,
              barrier);
}

// One thread's work: starts the ring with weights, waits for the kernels before, keeps the rings full.
struct Producer {
  const Shared& shared;
  const Problem& p;
  const TensorMap& map;

  DEVICE void start() {
    for (int stage = 0; stage < STAGES; ++stage) barrier_init(shared.full_weights + stage * 8, 1);
    for (int stage = 0; stage < ROW_STAGES; ++stage) barrier_init(shared.full_rows + stage * 8, 1);
    for (int stage = 0; stage < kReleased; ++stage)
      barrier_init(shared.released + stage * 8, kConsumers / 32);
    barrier_init_fence();
    fence_async_proxy();
    for (int i = 0; i < min(STAGES, p.blocks); ++i) load_weights(shared, p, i);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }

  DEVICE void run() {
    wait_for_previous_kernels();
    for (int i = 0; i < min(ROW_STAGES, p.blocks); ++i) load_activations(shared, p, map, i);
    StageOf<kReleased> stage;
    for (int i = 0; i + kLeast < p.blocks; ++i) {
      barrier_wait(shared.released + stage.index * 8, stage.parity);
      if (i + ROW_STAGES < p.blocks) load_activations(shared, p, map, i + ROW_STAGES);
      if (i + STAGES < p.blocks) load_weights(shared, p, i + STAGES);
      stage.advance();
    }
  }
};

// acc += product * (scale of its row of x * scale of its 8 rows of the weight): a block of 128.
DEVICE void add_scaled(float (&acc)[WIDTH / 2], const float (&product)[WIDTH / 2], float2 row_scales,
                       const float* unit_scales) {
#pragma unroll
  for (int unit = 0; unit < WIDTH / 8; ++unit) {
    const float scale = unit_scales[scale_of_unit(unit)];
    const float upper = row_scales.x * scale, lower = row_scales.y * scale;
    acc[unit * 4 + 0] += product[unit * 4 + 0] * upper;
    acc[unit * 4 + 1] += product[unit * 4 + 1] * upper;
    acc[unit * 4 + 2] += product[unit * 4 + 2] * lower;
    acc[unit * 4 + 3] += product[unit * 4 + 3] * lower;
  }
}

// A consumer's way through the rings.
struct Consumer {
  const Shared& shared;
  const float *act_scales, *unit_scales;
  float2 factors;  // of this thread's rows of x, with SCALES_ROWS
  int num_blocks, row_group, col_group, warp, lane;
  StageOf<STAGES> started_weights;
  StageOf<ROW_STAGES> started_rows;
  StageOf<kReleased> ended;

  // Starts the product of the next block. Returns the scales of this thread's two rows of x.
  DEVICE float2 start(float (&d)[WIDTH / 2], bool accumulate) {
    barrier_wait(shared.full_rows + started_rows.index * 8, started_rows.parity);
    float2 row_scales = {};
    if (IS_FP8) {
      const float* scales =
          act_scales + started_rows.index * kRows + row_group * 64 + warp % 4 * 16 + lane / 4;
      row_scales = {scales[0], scales[8]};
#if SCALES_ROWS
      row_scales.x *= factors.x, row_scales.y *= factors.y;
#endif
    }
    barrier_wait(shared.full_weights + started_weights.index * 8, started_weights.parity);
    multiply<WIDTH>(d, shared.rows + started_rows.index * kActBytes + row_group * 8192,
                    shared.weights + started_weights.index * kWeightBytes + col_group * WIDTH * 128,
                    accumulate);
    started_weights.advance(), started_rows.advance();
    return row_scales;
  }

  // Gives a block's stages back.
  DEVICE void release(u32 loaded) {
    __syncwarp();
    if (lane == 0) barrier_arrive(after_loads(shared.released + ended.index * 8, loaded));
    ended.advance();
  }

  // Adds a product that has come to its end.
  DEVICE void add(float (&acc)[WIDTH / 2], float (&product)[WIDTH / 2], float2 row_scales) {
    keep_order(product);
    release(__float_as_uint(row_scales.x) | __float_as_uint(row_scales.y));
    add_scaled(acc, product, row_scales, unit_scales);
    unit_scales += kScales;
  }

  // The compiler follows products in flight through straight code only, so that the last is waited for.
  template <int kBlocks>
  DEVICE void add_blocks(float (&acc)[WIDTH / 2]) {
    float products[2][WIDTH / 2];
    float2 row_scales[2];
    row_scales[0] = start(products[0], false);
#pragma unroll
    for (int i = 0; i < kBlocks - 1; ++i) {
      row_scales[(i + 1) % 2] = start(products[(i + 1) % 2], false);
      wgmma_wait<1>();
      add(acc, products[i % 2], row_scales[i % 2]);
    }
    wgmma_wait<0>();
    add(acc, products[(kBlocks - 1) % 2], row_scales[(kBlocks - 1) % 2]);
  }

  // The sums over this CTA's part of K, in the register layout of wgmma.cuh.
  DEVICE void sum(float (&acc)[WIDTH / 2]) {
    int left = num_blocks;
    if constexpr (IS_FP8) {
      for (; left >= BATCH; left -= BATCH) add_blocks<BATCH>(acc);
      for (; left > 0; --left) add_blocks<1>(acc);
    } else {
      for (; left > 0; --left) {
        start(acc, left < num_blocks);
        if (left < num_blocks) wgmma_wait<1>(), release(0);
      }
      wgmma_wait<0>();
    }
  }
};

// `scratch`: of the rows' scales, which have been read.
DEVICE void finish(const float (&acc)[WIDTH / 2], u8* ring, u8* exchange, float* scratch, u32 arrived,
                   const Output& o, const Norms& norms, const uint4& norm_weight, int first, int end,
                   int rank, const Place& at) {
  if constexpr (GATE_UP) {
    float h[WIDTH / 4];
    swiglu_all(h, acc);
    if constexpr (IS_FP8) {
      u32* maxima = reinterpret_cast<u32*>(exchange);
      note_maxima(h, maxima, first / 2, end / 2, at);
      open_exchange();
      send_maxima(maxima, arrived, rank, at.thread);
      store_fp8_tile(h, maxima, ring, o, first / 2, rank, at);
    } else {
      store_bf16_tile(h, ring, o, first / 2, at);
    }
  } else {
    uint4 residuals[kItems];
    put_partial_sums(acc, ring, exchange, arrived, o.num_rows, rank, at);
    open_exchange();
    send_partial_sums(ring, exchange, arrived, o.num_rows, rank, at);
    load_residuals(residuals, o, first, rank, at.thread);
    if (kCluster > 1) barrier_wait_cluster(arrived, 0);
    close_exchange();
    const float4* sums = reinterpret_cast<const float4*>(kCluster > 1 ? exchange : ring);
#if NORMS
    store_normed(sums, residuals[0], norm_weight, reinterpret_cast<float2*>(scratch), o, norms, first,
                 rank, at.thread);
#else
    store_summed(sums, residuals, o, first, rank, at.thread);
#endif
    leave_exchange();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    linear_wide(const __grid_constant__ TensorMap map, const u8* tiles, const float* tile_scales,
                const float* act_scales, Output output, int num_blocks, int row_tiles, Norms norms) {
  extern __shared__ __align__(1024) u8 ring[];
  u8* exchange = ring + kRingBytes;
  float* scales = reinterpret_cast<float*>(exchange + kExchangeBytes);
  u64* barriers = reinterpret_cast<u64*>(scales + (IS_FP8 ? ROW_STAGES * kRows : 0));
  float* unit_scales = reinterpret_cast<float*>(barriers + kBarriers);  // [blocks][kScales]

  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int first = blockIdx.x / SPLIT * kWidth, first_row = blockIdx.y * kRows;
  const int end = max(first, min(first + kWidth, row_tiles * 64));
  const int part = rank % SPLIT;  // of K
  const int begin = SPLIT > 1 ? part * num_blocks / SPLIT : 0;
  const int stop = SPLIT > 1 ? (part + 1) * num_blocks / SPLIT : num_blocks;
  const int blocks = first < end ? stop - begin : 0;
  const u32 full_weights = shared_address(barriers), full_rows = full_weights + STAGES * 8;
  const u32 released = full_rows + ROW_STAGES * 8, arrived = released + kReleased * 8;
  const Shared shared = {shared_address(ring),    shared_address(ring) + STAGES * kWeightBytes,
                         shared_address(scales), full_weights, full_rows, released};
  const Problem problem = {tiles, act_scales, num_blocks, output.scale_stride, first,
                           end,   begin,      blocks,     first_row,
                           min(kRows, (output.num_rows + 7) / 8 * 8) * 128};
  output.keep_rows(first_row, kRows);
  norms.skip_rows(first_row, output.num_features);
  Producer producer = {shared, problem, map};
  const bool is_producer = thread == kConsumers;
  if (is_producer) {
    barrier_init(arrived, 1);
    producer.start();
    barrier_expect(arrived, bytes_to_arrive(output.num_rows, rank));
  }
  __syncwarp();
  if (IS_FP8)
    for (int i = thread; i < blocks * kScales; i += kThreads) {
      const int row = min(first + unit_of_scale(i % kScales) * 8, end - 8), block = begin + i / kScales;
      unit_scales[i] = tile_scales[(static_cast<i64>(row / 64) * num_blocks + block) * 2 + row / 8 % 2];
    }
  if (kQuantises)
    for (int i = thread; i < kPlaces * kRows; i += kThreads) reinterpret_cast<u32*>(exchange)[i] = 0;
  __syncthreads();
  announce();
  if (warp >= kConsumers / 32) {
    if (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (is_producer) producer.run();
    __syncwarp();
    open_exchange(), close_exchange(), leave_exchange();
    return;
  }

  if (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int row_group = warp / 4 / COL_GROUPS, col_group = warp / 4 % COL_GROUPS;
  const Place at = {thread, row_group * 64 + warp % 4 * 16 + lane / 4, col_group, lane};
  const int finished = first / (kWidth * kTiles) * (kWidth * kTiles);  // first of the cluster's columns
  uint4 norm_weight = {};
#if NORMS
  norm_weight = load_norm_weight(norms, output, finished, rank, thread);
#endif
  float2 factors = {};
#if SCALES_ROWS
  wait_for_previous_kernels();
  factors = factors_of(norms, output.num_rows, at);
#endif
  float acc[WIDTH / 2] = {};
  Consumer consumer = {shared,  scales,    unit_scales + col_group * (kScales / COL_GROUPS),
                       factors, blocks,    row_group,
                       col_group, warp,    lane};
  consumer.sum(acc);
  if (!SCALES_ROWS) wait_for_previous_kernels();
  finish(acc, ring, exchange, scales, arrived, output, norms, norm_weight, GATE_UP ? first : finished,
         end, rank, at);
}
