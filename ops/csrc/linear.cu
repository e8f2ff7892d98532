// out [M, N] = x [M, K] * weight [N, K]^T for M <= 128 rows, at the speed the weights come from memory.
//
// The weights are the left operand: one CTA takes 64 * WARPGROUPS of their rows (a tile is 64 rows x
// 128 bytes of K, contiguous in memory and swizzled as the tensor cores want it) and streams them
// through a ring of STAGES; the activations are the right operand, COLS >= M columns.
//
// A cluster of SPLIT CTAs shares a tile's K; the partial sums meet in shared memory, summed in the
// order of the ranks, so that a result never varies. What is fetched before
// `wait_for_previous_kernels` is weights only.
//
// Defines: IS_FP8 (e4m3 with a scale per 1x128 of x and 128x128 of the weight, else bf16), COLS,
// WARPGROUPS, STAGES, SPLIT, GATE_UP (rows are 8 of gate, 8 of up, ...; SwiGLU; fp8 is quantised
// again, for which the CTAs of 128 features form a cluster), PREFETCH (bytes of weights a CTA asks
// into the L2 beyond its ring before it waits), BLOCKS_PER_SM (for the register count).

#include "wgmma.cuh"

namespace {

constexpr int kTileBytes = 8192;
constexpr int kRows = 64 * WARPGROUPS;
constexpr int kConsumers = 128 * WARPGROUPS;
constexpr int kThreads = kConsumers + 32;
constexpr int kWeightBytes = kTileBytes * WARPGROUPS;
constexpr int kActBytes = COLS * 128;
constexpr int kStageBytes = kWeightBytes + kActBytes;
constexpr int kScaleBytes = IS_FP8 ? COLS * 4 : 0;
constexpr int kFeatures = 32 * WARPGROUPS;  // of SwiGLU, per CTA
constexpr bool kQuantises = GATE_UP && IS_FP8;
constexpr int kCluster = kQuantises ? 128 / kFeatures : SPLIT;
constexpr int kExchangeFloats = kQuantises ? (128 / 8 + 1) * COLS : SPLIT > 1 ? kRows * COLS : 0;
constexpr int kUnits = COLS / 8;  // fragments of 8 rows x 8 columns in 8 rows
constexpr int kGroups = kRows / 8 / SPLIT;  // 8-row groups a CTA of the cluster finishes

static_assert(!GATE_UP || SPLIT == 1, "SwiGLU needs whole sums");
static_assert(kRows / 8 % SPLIT == 0, "every rank finishes as many rows");

struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct Shared {
  u32 ring, scales, tile_scales, full, empty;
};

struct Problem {
  const u8* tiles;           // [row tiles, num_blocks, 8192]
  const float2* tile_scales;  // [row tiles, num_blocks]: of rows 0..7 and 8..15 of every 16
  const float* act_scales;   // [num_blocks, scale_stride]
  int num_blocks;            // of 128 bytes of K
  int scale_stride;
  int first_row;  // of x, of this CTA
};

DEVICE void load_weights(const Shared& shared, const Problem& p, int tile, int block, int stage) {
  const u32 barrier = shared.full + stage * 8;
  barrier_expect(barrier, kWeightBytes);
#pragma unroll
  for (int group = 0; group < WARPGROUPS; ++group) {
    const u8* source =
        p.tiles + (static_cast<i64>(tile * WARPGROUPS + group) * p.num_blocks + block) * kTileBytes;
    bulk_copy_streamed(shared.ring + stage * kStageBytes + group * kTileBytes, source, kTileBytes,
                       barrier);
  }
}

DEVICE void load_activations(const Shared& shared, const Problem& p, const TensorMap& map, int block,
                             int stage) {
  const u32 barrier = shared.full + stage * 8;
  const u32 scale_bytes = IS_FP8 ? min(p.scale_stride - p.first_row, COLS) * 4 : 0;
  barrier_expect(barrier, kActBytes + scale_bytes);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared.ring + stage * kStageBytes + kWeightBytes),
      "l"(&map), "r"(block * (IS_FP8 ? 128 : 64)), "r"(p.first_row), "r"(barrier)
      : "memory");
  if (IS_FP8)
    bulk_copy(shared.scales + stage * kScaleBytes,
              p.act_scales + static_cast<i64>(block) * p.scale_stride + p.first_row, scale_bytes, barrier);
}

DEVICE void prefetch_weights(const Problem& p, int tile, int begin, int end) {
  const int bytes = min((end - begin) * kTileBytes, PREFETCH);
  if (bytes <= 0) return;
#pragma unroll
  for (int group = 0; group < WARPGROUPS; ++group) {
    const u8* source =
        p.tiles + (static_cast<i64>(tile * WARPGROUPS + group) * p.num_blocks + begin) * kTileBytes;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
  }
}

// One thread: fills the ring with weights, waits for the kernels before, then keeps it full.
DEVICE void produce(const Shared& shared, const Problem& p, const TensorMap& map, int tile, int begin,
                    int end) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  const int filled = min(begin + STAGES, end);
  for (int block = begin; block < filled; ++block) load_weights(shared, p, tile, block, block - begin);
  prefetch_weights(p, tile, filled, end);
  wait_for_previous_kernels();
  for (int block = begin; block < filled; ++block)
    load_activations(shared, p, map, block, block - begin);
  int stage = 0, parity = 0;
  for (int block = filled; block < end; ++block) {
    barrier_wait(shared.empty + stage * 8, parity);
    load_weights(shared, p, tile, block, stage);
    load_activations(shared, p, map, block, stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// acc += part * (weight scale * activation scale): the sums of one block of 128.
DEVICE void add_scaled(float (&acc)[COLS / 2], const float (&part)[COLS / 2], float2 weight_scale,
                       const float2* act_scales, int lane) {
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const float2 scale = act_scales[unit * 4 + lane % 4];
    acc[unit * 4 + 0] += part[unit * 4 + 0] * (weight_scale.x * scale.x);
    acc[unit * 4 + 1] += part[unit * 4 + 1] * (weight_scale.x * scale.y);
    acc[unit * 4 + 2] += part[unit * 4 + 2] * (weight_scale.y * scale.x);
    acc[unit * 4 + 3] += part[unit * 4 + 3] * (weight_scale.y * scale.y);
  }
}

DEVICE void multiply(float (&d)[COLS / 2], u32 weights, u32 activations, bool accumulate) {
  const u64 a = tile_descriptor(weights), b = tile_descriptor(activations);
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    Wgmma<IS_FP8, COLS>::run(d, a + 2 * k, b + 2 * k, accumulate || k > 0);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The sums over this CTA's part of K, in the register layout of wgmma.cuh.
DEVICE void consume(float (&acc)[COLS / 2], const Shared& shared, const float2* tile_scales,
                    const float2* act_scales, int num_blocks, int group, int lane) {
  int stage = 0, parity = 0;
  for (int i = 0; i < num_blocks; ++i) {
    const u32 weights = shared.ring + stage * kStageBytes + group * kTileBytes;
    const u32 activations = shared.ring + stage * kStageBytes + kWeightBytes;
    barrier_wait(shared.full + stage * 8, parity);
    if constexpr (IS_FP8) {
      float part[COLS / 2];
      multiply(part, weights, activations, false);
      const float2 weight_scale = tile_scales[i * WARPGROUPS + group];
      wgmma_wait<0>();
      add_scaled(acc, part, weight_scale, act_scales + stage * (COLS / 2), lane);
    } else {
      multiply(acc, weights, activations, i > 0);
      wgmma_wait<0>();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

struct Output {
  const bf16* bias;      // [N] or null
  const bf16* residual;  // [M, N] or null
  bf16* out;             // [M, N]
  int num_rows, num_features;
};

// Rounds the sum to bf16 before the residual is added, as two ops would.
DEVICE void store(const Output& o, int feature, int row, float sum) {
  if (row >= o.num_rows || feature >= o.num_features) return;
  const i64 index = static_cast<i64>(row) * o.num_features + feature;
  if (o.bias != nullptr) sum += __bfloat162float(o.bias[feature]);
  bf16 value = __float2bfloat16_rn(sum);
  if (o.residual != nullptr)
    value = __float2bfloat16_rn(__bfloat162float(value) + __bfloat162float(o.residual[index]));
  o.out[index] = value;
}

DEVICE void store_whole(const float (&acc)[COLS / 2], const Output& o, int first, int warp, int lane) {
  const int feature = first + warp * 16 + lane / 4;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit * 8 >= o.num_rows) break;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store(o, feature + i / 2 * 8, unit * 8 + lane % 4 * 2 + i % 2, acc[unit * 4 + i]);
  }
}

// Sends every 8-row group to the rank that finishes it. There it lies as [source rank][group][unit]
// [lane] pairs, so that a warp writes 256 contiguous bytes.
DEVICE void send_partial_sums(const float (&acc)[COLS / 2], u32 exchange, int num_rows, int rank,
                              int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = warp * 2 + half;
    const u32 slot = (rank * kGroups + group % kGroups) * kUnits;
    const u32 target = cluster_address(exchange + (slot * 32 + lane) * 8, group / kGroups);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit * 8 >= num_rows) break;
      cluster_store2(target + unit * 256, acc[unit * 4 + half * 2], acc[unit * 4 + half * 2 + 1]);
    }
  }
}

DEVICE void store_summed(const float2* exchange, const Output& o, int first, int warp, int lane) {
  const int num_units = min(kUnits, (o.num_rows + 7) / 8);
  for (int i = warp; i < kGroups * num_units; i += kConsumers / 32) {
    const int group = i / num_units, unit = i % num_units;
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int source = 0; source < SPLIT; ++source) {
      const float2 part = exchange[((source * kGroups + group) * kUnits + unit) * 32 + lane];
      sum.x += part.x, sum.y += part.y;
    }
    const int feature = first + group * 8 + lane / 4, row = unit * 8 + lane % 4 * 2;
    store(o, feature, row, sum.x);
    store(o, feature, row + 1, sum.y);
  }
}

DEVICE float bf16_round(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// silu(gate) * up with the roundings of the two ops on bf16 tensors.
DEVICE float swiglu(float gate, float up) {
  gate = bf16_round(gate);
  return bf16_round(bf16_round(gate / (1.f + __expf(-gate))) * bf16_round(up));
}

// h[unit * 2 + i]: feature warp * 8 + lane / 4 of the CTA, row unit * 8 + lane % 4 * 2 + i.
DEVICE void swiglu_all(float (&h)[COLS / 4], const float (&acc)[COLS / 2]) {
#pragma unroll
  for (int i = 0; i < COLS / 4; ++i)
    h[i] = swiglu(acc[i / 2 * 4 + i % 2], acc[i / 2 * 4 + 2 + i % 2]);
}

// Every warp's maxima of 8 features go to all CTAs of the 128-feature group: [16 warps][COLS].
DEVICE void send_maxima(const float (&h)[COLS / 4], u32 exchange, int rank, int warp, int lane) {
  const u32 slot = exchange + ((rank * WARPGROUPS * 4 + warp) * COLS + lane % 4 * 2) * 4;
  const u32 target = cluster_address(slot, min(lane / 4, kCluster - 1));
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    float x = fabsf(h[unit * 2]), y = fabsf(h[unit * 2 + 1]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
      y = fmaxf(y, __shfl_xor_sync(~0u, y, offset));
    }
    if (lane / 4 < kCluster) cluster_store2(target + unit * 32, x, y);
  }
}

// Copies the transposed tile [COLS][kFeatures] of `Element` in shared memory to out [M, F].
template <typename Element>
DEVICE void store_tile(const Element* tile, Element* out, int first, int num_rows, int num_features,
                       int thread) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kFeatures / kPerChunk;
  for (int i = thread; i < num_rows * kChunks; i += kConsumers) {
    const int row = i / kChunks, feature = i % kChunks * kPerChunk;
    if (first + feature < num_features)
      *reinterpret_cast<uint4*>(out + static_cast<i64>(row) * num_features + first + feature) =
          *reinterpret_cast<const uint4*>(tile + row * kFeatures + feature);
  }
}

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    linear(const __grid_constant__ TensorMap map, const u8* tiles, const float2* tile_scales,
           const float* act_scales, const bf16* bias, const bf16* residual, void* out,
           float* out_scales, int num_rows, int num_features, int num_blocks, int scale_stride) {
  extern __shared__ __align__(1024) u8 ring[];
  float* act_scale_ring = reinterpret_cast<float*>(ring + STAGES * kStageBytes);
  float* exchange = act_scale_ring + STAGES * kScaleBytes / 4;
  u64* barriers = reinterpret_cast<u64*>(exchange + kExchangeFloats);
  float2* block_scales = reinterpret_cast<float2*>(barriers + 2 * STAGES);  // [blocks][WARPGROUPS]

  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int tile = blockIdx.x / SPLIT;
  const int begin = SPLIT > 1 ? rank * num_blocks / SPLIT : 0;
  const int end = SPLIT > 1 ? (rank + 1) * num_blocks / SPLIT : num_blocks;
  const Shared shared = {shared_address(ring), shared_address(act_scale_ring), 0,
                         shared_address(barriers), shared_address(barriers + STAGES)};
  const int first_row = blockIdx.y * COLS;
  const Problem problem = {tiles, tile_scales, act_scales, num_blocks, scale_stride, first_row};

  if (thread == kConsumers) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full + stage * 8, 2);  // weights, activations
      barrier_init(shared.empty + stage * 8, kConsumers / 32);
    }
    barrier_init_fence();
  }
  if (IS_FP8)
    for (int i = thread; i < (end - begin) * WARPGROUPS; i += kThreads)
      block_scales[i] = tile_scales[(tile * WARPGROUPS + i % WARPGROUPS) * static_cast<i64>(num_blocks) +
                                    begin + i / WARPGROUPS];
  __syncthreads();
  if (kCluster > 1) cluster_arrive();  // this CTA runs: its shared memory may be written
  if (warp == kConsumers / 32) {
    if (lane == 0) produce(shared, problem, map, tile, begin, end);
    __syncwarp();
    if (kCluster > 1) cluster_wait(), cluster_arrive(), cluster_wait();
    return;
  }

  float acc[COLS / 2];
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) acc[i] = 0.f;
  consume(acc, shared, block_scales, reinterpret_cast<float2*>(act_scale_ring), end - begin, warp / 4,
          lane);
  wait_for_previous_kernels();

  const i64 skipped = static_cast<i64>(first_row) * num_features;
  num_rows = min(num_rows - first_row, COLS);
  const Output output = {bias, residual != nullptr ? residual + skipped : nullptr,
                         static_cast<bf16*>(out) + skipped, num_rows, num_features};
  if constexpr (kQuantises) {
    float h[COLS / 4];
    swiglu_all(h, acc);
    cluster_wait();
    send_maxima(h, shared_address(exchange), rank, warp, lane);
    cluster_arrive(), cluster_wait();
    float* inverses = exchange + 16 * COLS;
    for (int row = thread; row < min(COLS, scale_stride - first_row); row += kConsumers) {
      float amax = 1e-10f;
      for (int i = 0; i < 16; ++i) amax = fmaxf(amax, exchange[i * COLS + row]);
      inverses[row] = 448.f / amax;
      if (rank == 0)
        out_scales[static_cast<i64>(tile / kCluster) * scale_stride + first_row + row] =
            row < num_rows ? 1.f / inverses[row] : 0.f;
    }
    consumers_sync();
    u8* transposed = ring;  // all warps are past the last stage
#pragma unroll
    for (int i = 0; i < COLS / 4; ++i) {
      const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      transposed[row * kFeatures + warp * 8 + lane / 4] =
          __nv_cvt_float_to_fp8(h[i] * inverses[row], __NV_SATFINITE, __NV_E4M3);
    }
    consumers_sync();
    store_tile(transposed, static_cast<u8*>(out) + skipped, tile * kFeatures, num_rows, num_features, thread);
  } else if constexpr (GATE_UP) {
    float h[COLS / 4];
    swiglu_all(h, acc);
    bf16* transposed = reinterpret_cast<bf16*>(ring);
    consumers_sync();  // all warps are past the last stage
#pragma unroll
    for (int i = 0; i < COLS / 4; ++i)
      transposed[(i / 2 * 8 + lane % 4 * 2 + i % 2) * kFeatures + warp * 8 + lane / 4] =
          __float2bfloat16_rn(h[i]);
    consumers_sync();
    store_tile(transposed, output.out, tile * kFeatures, num_rows, num_features, thread);
  } else if constexpr (SPLIT > 1) {
    cluster_wait();
    send_partial_sums(acc, shared_address(exchange), num_rows, rank, warp, lane);
    cluster_arrive(), cluster_wait();
    store_summed(reinterpret_cast<float2*>(exchange), output, tile * kRows + rank * kGroups * 8, warp,
                 lane);
  } else {
    store_whole(acc, output, tile * kRows, warp, lane);
  }
}
