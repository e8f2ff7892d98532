// out [M, N] = x [M, K] * weight [N, K]^T for few rows, at the speed the weights come from memory; for
// more, see linear_wide.cu.
//
// The weights are the left operand: one CTA takes 64 * WARPGROUPS of their rows (a tile is 64 rows x
// 128 bytes of K, contiguous in memory and swizzled as the tensor cores want it) and streams them
// through a ring of STAGES; the activations are the right operand, COLS columns; CTAs (x, 0), (x, 1),
// ... take COLS rows of x each.
//
// A cluster of SPLIT CTAs shares a tile's K; the partial sums meet in shared memory, summed in the
// order of the ranks, so that a result never varies. What is fetched before
// `wait_for_previous_kernels` is weights only.
//
// Defines: IS_FP8 (e4m3 with a scale per 1x128 of x and 128x128 of the weight, else bf16), COLS,
// WARPGROUPS, STAGES, SPLIT, GATE_UP (rows are 8 of gate, 8 of up, ...; SwiGLU; fp8 is quantised
// again, for which the CTAs of 128 features form a cluster), OWN_ROWS (not 0: each CTA takes these many rows
// of x from memory itself, ITEMS times per thread; they are normed here, IN_FEATURES of them, or, if
// IS_COPIED, come so; MERGE, ATTEND: attention is still to be merged or made, see linear_merge.cuh and
// linear_attend.cuh), BLOCKS_PER_SM (CTAs an SM must have registers for).

#include "linear_epilogue.cuh"
#ifdef MERGE
#include "linear_merge.cuh"
#elif defined(ATTEND)
#include "linear_attend.cuh"
#elif IS_COPIED
#include "linear_copy.cuh"
#else
#include "linear_norm.cuh"
#endif

namespace {

struct Shared {
  u32 ring, operand, scales, full, empty;  // operand, scales: per stage, or whole with OWN_ROWS
  u32 met;  // barrier of what the cluster sends here
};

struct Problem {
  const u8* tiles;          // [row tiles, num_blocks, 8192]
  const float* act_scales;  // [num_blocks, scale_stride]
  int num_blocks;           // of 128 bytes of K
  int scale_stride;
  int tile;                 // of this CTA: its first row tile / WARPGROUPS
  int begin, blocks;        // its K tiles
  int first_row, num_rows;  // of x
};

DEVICE const u8* tile_address(const Problem& p, int group, int block) {
  return p.tiles +
         (static_cast<i64>(p.tile * WARPGROUPS + group) * p.num_blocks + block) * kTileBytes;
}

DEVICE void load_weights(const Shared& shared, const Problem& p, int block, int stage) {
  const u32 barrier = shared.full + stage * 8;
  barrier_expect(barrier, kWeightBytes);
#pragma unroll
  for (int group = 0; group < WARPGROUPS; ++group)
    bulk_copy_streamed(shared.ring + stage * kStageBytes + group * kTileBytes,
                       tile_address(p, group, block), kTileBytes, barrier);
}

DEVICE void load_activations(const Shared& shared, const Problem& p, const TensorMap& map, int block,
                             int stage) {
  if (OWN_ROWS) return;
  const u32 barrier = shared.full + stage * 8;
  const u32 scale_bytes = IS_FP8 ? min(p.scale_stride - p.first_row, COLS) * 4 : 0;
  barrier_expect(barrier, kActBytes + scale_bytes);
  load_rows(shared.operand + stage * kStageBytes, map, block, p.first_row, barrier);
  if (IS_FP8)
    bulk_copy(shared.scales + stage * COLS * 4,
              p.act_scales + static_cast<i64>(block) * p.scale_stride + p.first_row, scale_bytes,
              barrier);
}

// One thread's work: starts the ring with weights, waits for the kernels before, keeps the ring full.
struct Producer {
  const Shared& shared;
  const Problem& p;
  const TensorMap& map;
  int next;             // step to load
  Stage stage, oldest;  // of that step, and of the one kWindow before

  DEVICE void start() {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full + stage * 8, OWN_ROWS ? 1 : 2);  // weights, activations
      barrier_init(shared.empty + stage * 8, kConsumers / 32);
    }
    if (kExchangeBytes > 0) barrier_init(shared.met, 1);
    barrier_init_fence();
    fence_async_proxy();
    if (kExchangeBytes > 0) barrier_expect(shared.met, sent_bytes(p.num_rows));
    for (next = 0; next < min(kWindow, p.blocks); ++next) {
      load_weights(shared, p, p.begin + next, next);
      stage.advance();
    }
    for (int i = STAGES; i < min(p.blocks, STAGES + kAhead); ++i)
#pragma unroll
      for (int group = 0; group < WARPGROUPS; ++group)
        bulk_prefetch(tile_address(p, group, p.begin + i), kTileBytes);
    if (!OWN_ROWS) asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }

  DEVICE void fill() {
    if (OWN_ROWS) return;
    wait_for_previous_kernels();
    for (int i = 0; i < next; ++i) load_activations(shared, p, map, p.begin + i, i);
  }

  DEVICE void refill() {
    for (; next < p.blocks; ++next) {
      if (kWindow < STAGES) barrier_wait(shared.full + oldest.index * 8, oldest.parity), oldest.advance();
      if (next >= STAGES) barrier_wait(shared.empty + stage.index * 8, stage.parity ^ 1);
      load_weights(shared, p, p.begin + next, stage.index);
      load_activations(shared, p, map, p.begin + next, stage.index);
      stage.advance();
    }
  }
};

// acc += part * (weight scale * activation scale): the sums of one block of 128. Returns bits of all
// that it read of the activations' scales.
DEVICE u32 add_scaled(float (&acc)[COLS / 2], const float (&part)[COLS / 2], float2 weight_scale,
                       const float2* act_scales, int lane) {
  u32 bits = 0;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const float2 scale = act_scales[unit * 4 + lane % 4];
    bits |= __float_as_uint(scale.x) | __float_as_uint(scale.y);
    const float upper[2] = {weight_scale.x * scale.x, weight_scale.x * scale.y};
    const float lower[2] = {weight_scale.y * scale.x, weight_scale.y * scale.y};
    float* sums = acc + unit * 4;
    sums[0] += part[unit * 4 + 0] * upper[0];
    sums[1] += part[unit * 4 + 1] * upper[1];
    sums[2] += part[unit * 4 + 2] * (GATE_UP ? lower : upper)[0];
    sums[3] += part[unit * 4 + 3] * (GATE_UP ? lower : upper)[1];
  }
  return bits;
}

// Gives a stage back.
DEVICE void release(u32 barrier, u32 loaded, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(after_loads(barrier, loaded));
}

// The sums over this CTA's part of K, in the register layout of wgmma.cuh.
DEVICE void consume(float (&acc)[COLS / 2], const Shared& shared, const float2* tile_scales,
                    const float2* act_scales, const Problem& p, int group, int lane) {
  Stage stage;
  for (int first = 0; first < p.blocks; first += kBatch) {
    float parts[IS_FP8 ? kBatch : 1][COLS / 2];
    const Stage oldest = stage;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= p.blocks) break;
      barrier_wait(shared.full + stage.index * 8, stage.parity);
      const u32 weights = shared.ring + stage.index * kStageBytes + group * kTileBytes;
      const u32 operand =
          shared.operand + (OWN_ROWS ? (first + i) * kActBytes : stage.index * kStageBytes);
      if constexpr (IS_FP8)
        multiply<COLS>(parts[i], weights, operand, false);
      else
        multiply<COLS>(acc, weights, operand, first + i > 0);
      stage.advance();
    }
    wgmma_wait<0>();
    Stage done = oldest;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= p.blocks) break;
      u32 bits = 0;
      if constexpr (IS_FP8)
        bits = add_scaled(acc, parts[i], tile_scales[(first + i) * WARPGROUPS + group],
                          act_scales + (OWN_ROWS ? first + i : done.index) * (COLS / 2), lane);
      release(shared.empty + done.index * 8, OWN_ROWS ? 0 : bits, lane);
      done.advance();
    }
  }
}

DEVICE void finish(const float (&acc)[COLS / 2], const bf16 (&residuals)[kPairs][2], float* exchange,
                   u32 met, u8* ring, const Output& o, int tile, int rank, int warp, int lane) {
  if (kExchangesInRing)
    cluster_sync();  // all CTAs are done with theirs
  else if (kCluster > 1)
    cluster_wait();  // all CTAs run, and what is sent to them is counted
  if constexpr (GATE_UP) {
    float h[COLS / 4];
    swiglu_all(h, acc);
    if constexpr (IS_FP8 && COLS == 8) {
      send_maxima(h, shared_address(exchange), met, rank, warp, lane);
      barrier_wait_cluster(met, 0);
      store_fp8_rows(h, exchange, o, tile, rank, warp, lane);
    } else if constexpr (IS_FP8) {
      float* factors = exchange + 16 * COLS;
      send_maxima(h, shared_address(exchange), met, rank, warp, lane);
      barrier_wait_cluster(met, 0);
      reduce_maxima(factors, exchange, o, tile / kCluster, rank, warp * 32 + lane);
      store_fp8_tile(h, factors, ring, o, tile * kFeatures, warp, lane);
    } else {
      store_bf16_tile(h, ring, o, tile * kFeatures, warp, lane);
    }
  } else if constexpr (SPLIT > 1) {
    send_partial_sums(acc, shared_address(exchange), met, o.num_rows, rank, warp, lane);
    barrier_wait_cluster(met, 0);
    store_summed(reinterpret_cast<float2*>(exchange), residuals, o, first_feature(tile, rank), warp, lane);
  } else {
    store_whole(acc, o, tile * kRows, warp, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    linear(const __grid_constant__ TensorMap map, const u8* tiles, const float2* tile_scales,
           const float* act_scales, Output output, int num_blocks, RowInput input) {
  extern __shared__ __align__(1024) u8 ring[];
  const int most_blocks = (num_blocks + SPLIT - 1) / SPLIT;
  u8* operand = OWN_ROWS ? ring + STAGES * kStageBytes : ring + kWeightBytes;
  float* scales =
      reinterpret_cast<float*>(ring + STAGES * kStageBytes + (OWN_ROWS ? most_blocks * kActBytes : 0));
  float* own_exchange = scales + (IS_FP8 ? (OWN_ROWS ? most_blocks : STAGES) * COLS : 0);
  float* exchange = kExchangesInRing ? reinterpret_cast<float*>(ring + kExchangeOffset) : own_exchange;
  u64* barriers = reinterpret_cast<u64*>(own_exchange + (kExchangesInRing ? 0 : kExchangeBytes / 4));
  float2* block_scales = reinterpret_cast<float2*>(barriers + 2 * STAGES + 1);  // [blocks][WARPGROUPS]

  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int tile = blockIdx.x / SPLIT, first_row = blockIdx.y * COLS;
  const int begin = SPLIT > 1 ? rank * num_blocks / SPLIT : 0;
  const int end = SPLIT > 1 ? (rank + 1) * num_blocks / SPLIT : num_blocks;
  output.keep_rows(first_row, COLS);
  const Shared shared = {shared_address(ring),     shared_address(operand), shared_address(scales),
                         shared_address(barriers), shared_address(barriers + STAGES),
                         shared_address(barriers + 2 * STAGES)};
  const Problem problem = {tiles, act_scales,  num_blocks, output.scale_stride, tile,
                           begin, end - begin, first_row,  output.num_rows};
  if (warp == kConsumers / 32) {
    Producer producer = {shared, problem, map};
    if (lane == 0) producer.start();
    __syncwarp();
    if (kArrivesEarly) cluster_arrive_relaxed();
    barriers_are_there();
    if (lane == 0) producer.fill(), producer.refill();
    __syncwarp();
    if (kArrivesEarly) cluster_wait();
    if (kExchangesInRing) cluster_sync();
    return;
  }
  if (kArrivesEarly) cluster_arrive_relaxed();
  if (IS_FP8)
    for (int i = thread; i < (end - begin) * WARPGROUPS; i += kConsumers)
      copy8(shared_address(block_scales + i),
            tile_scales + static_cast<i64>(tile * WARPGROUPS + i % WARPGROUPS) * num_blocks + begin +
                i / WARPGROUPS);
#if OWN_ROWS
  float* sums = reinterpret_cast<float*>(block_scales + (IS_FP8 ? most_blocks * WARPGROUPS : 0));
  make_rows(operand, scales, sums, input, begin, end, thread);
#endif
  wait_for_previous_kernels();
  bf16 residuals[kPairs][2] = {};
  if (SPLIT > 1) load_residuals(residuals, output, first_feature(tile, rank), warp, lane);
  wait_for_copies();
  wait_for_barriers();
  float acc[COLS / 2] = {};
  consume(acc, shared, block_scales, reinterpret_cast<float2*>(scales), problem, warp / 4, lane);
  finish(acc, residuals, exchange, shared.met, ring, output, tile, rank, warp, lane);
}
