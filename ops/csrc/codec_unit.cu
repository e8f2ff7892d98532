// A residual unit of the codec in one kernel: x + conv1(snake(conv7(snake(x)))), and perhaps the
// snake that follows. x is read and written once.
//
// A CTA makes BM rows of all BN = channels columns. The snake is applied to the slab where it lies.
// What conv7 gives stays in registers: a thread's sums of 16 columns are, rounded, its part of a
// fragment of conv1's input.
#ifndef WARPGROUPS
#define WARPGROUPS 2
#define BN 96
#define CB 96
#define STAGES 4
#endif

#include "codec_slab.cuh"

constexpr int kTaps = 7, kBlocks = BN / CB, kSlabs = kBlocks > 1 ? 2 : 1;
constexpr int kFirstTiles = (kTaps * BN + 63) / 64, kLastTiles = (BN + 63) / 64;  // of conv7, conv1
// The next slab's snake is applied in parts, during some taps of a block's.
constexpr int kParts = 3, kFirstPart = 2;
static_assert(STAGES >= kLastTiles, "");  // those of conv1 are never released

struct Snakes {
  const float *alpha, *inverse;
  DEVICE float2 operator()(int column, float2 v) const {
    float2 a = *reinterpret_cast<const float2*>(alpha + column);
    float2 r = *reinterpret_cast<const float2*>(inverse + column);
    float x = __sinf(a.x * v.x), y = __sinf(a.y * v.y);
    return make_float2(v.x + x * x * r.x, v.y + y * y * r.y);
  }
};

// Two CTAs are to fit an SM where their shared memory does.
extern "C" __global__ void __launch_bounds__(kThreads, BN == 96 ? 512 / kThreads : 1)
    codec_unit(const __half* x, const __half* history, __half* new_history, const i64* slots,
               const __half* weight, const float* bias7, const float* bias1, const float* alpha0,
               const float* inverse0, const float* alpha1, const float* inverse1, const float* alpha2,
               const float* inverse2, __half* out, int num_rows, int num_steps, int dilation,
               int history_values, int history_start) {
  extern __shared__ unsigned char shared[];
  const Shape s{num_rows, num_steps,      BN,            BN,     kTaps, dilation,
                0,        history_values, history_start, kSnake, 0};
  const Slabs slabs(shared, s, kSlabs);
  const int tid = threadIdx.x, lane = tid % 32, first = blockIdx.x * BM;
  constexpr int kTiles = kFirstTiles + kLastTiles;
  const WeightStream weights{slabs.base, slabs.tiles, weight, kTiles, BN / 32, BN / 32};

  auto load_slab = [&](int block) {
    slabs.load(block % kSlabs, block * CB);
    commit_copies();
  };
  // A thread applies the snake to the chunks that it has copied itself, or to a part of them.
  auto apply_snake = [&](int block, int part, int num_parts) {
    const int column = block * CB + slabs.my_chunk() * 8;
    float alpha[8], inverse[8];
    load8(alpha, alpha0 + column), load8(inverse, inverse0 + column);
    unsigned char* mine = slabs.memory + block % kSlabs * slabs.bytes + slabs.my_chunk() * 16;
#pragma unroll 2
    for (int row = slabs.my_row() + part * kRowsAtOnce; row < slabs.rows;
         row += num_parts * kRowsAtOnce) {
      uint4* at = reinterpret_cast<uint4*>(mine + row * kSlabStride);
      float v[8] = {};
      add(v, *at);
      snake(v, alpha, inverse);
      *at = packed(v);
    }
  };

  if (tid == 0) weights.start();
  slabs.start(first, s, x, history, slots);
  wait_for_previous_kernels();
  let_next_kernel_start();
  load_slab(0);
  wait_copies<0>();
  apply_snake(0, 0, 1);

  float sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sums[i] = 0;
  const u32 lane_offset = slabs.lane_offset(), tap_bytes = dilation * kSlabStride;
  u32 at = slabs.slab(0) + lane_offset;  // of the tap's rows
  int channel = 0, tap = 0, block = 0;
  bool is_new_block = true;
  int part = -1;  // of the next slab, whose snake is applied while the products of a tile run
  auto fetch = [&](u32 (&a)[4][4]) {
    if (is_new_block) {
      __syncthreads();
      if (kBlocks > 1 && block + 1 < kBlocks) load_slab(block + 1);
      is_new_block = false;
    }
    part = kBlocks > 1 && block + 1 < kBlocks ? tap - kFirstPart : -1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load_fragment(a[i], at + channel * 2);
      channel += 16;
      if (channel < CB) continue;
      channel = 0, tap++, at += tap_bytes;
      if (tap < kTaps) continue;
      tap = 0, block++;
      is_new_block = block < kBlocks;
      at = slabs.slab(block < kBlocks ? block % kSlabs : 0) + lane_offset;
    }
  };
  auto snake_next_slab = [&] {
    if (kBlocks == 1 || part < 0 || part >= kParts) return;
    wait_copies<0>();
    apply_snake(block + 1, part, kParts);
  };
  // Where a tile has parts of two taps, all is known of each only if there is no loop.
  multiply_tiles<CB == 64 ? 1 : kFirstTiles>(sums, weights, kFirstTiles, fetch, snake_next_slab);

  // Sums of columns 16 i .. 16 i + 15 -> fragment i of the second product.
  u32 inner[kLastTiles * 4][4] = {};
  const Snakes snake1{alpha1, inverse1};
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
    int column = j * 8 + lane % 4 * 2;
    float2 bias = *reinterpret_cast<const float2*>(bias7 + column);
    float2 low = snake1(column, make_float2(sums[4 * j] + bias.x, sums[4 * j + 1] + bias.y));
    float2 high = snake1(column, make_float2(sums[4 * j + 2] + bias.x, sums[4 * j + 3] + bias.y));
    inner[j / 2][j % 2 * 2] = packed(low.x, low.y);
    inner[j / 2][j % 2 * 2 + 1] = packed(high.x, high.y);
    sums[4 * j] = sums[4 * j + 1] = sums[4 * j + 2] = sums[4 * j + 3] = 0;
  }
  fence_registers();
#pragma unroll
  for (int i = 0; i < kLastTiles * 4; i++) {
    const int k = kFirstTiles + i / 4;
    if (i % 4 == 0) weights.wait(k);
    multiply(sums, inner[i], step_address(weights.tile(k), i % 4), i % 4, lane);
    if (i % 4 == 3) finish_products(), weights.refill(k);
  }
  wait_products<0>();
  __syncthreads();

  const int column = my_columns();
  float bias[8], alpha[8] = {}, inverse[8] = {};
  load8(bias, bias1 + column);
  if (alpha2) load8(alpha, alpha2 + column), load8(inverse, inverse2 + column);
  uint4 input[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int row = my_first_row() + pass * kOutAtOnce;
    input[pass] = make_uint4(0, 0, 0, 0);
    if (row < BM && first + row < num_rows)
      input[pass] = *reinterpret_cast<const uint4*>(x + i64(first + row) * BN + column);
  }
  float* staged = slabs.staged();
  stage(staged, sums);
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int row = my_first_row() + pass * kOutAtOnce;
    if (row >= BM || first + row >= num_rows) break;
    float v[8];
    load8(v, staged + row * kSumStride + column);
    add(v, bias), add(v, input[pass]);
    if (alpha2) snake(v, alpha, inverse);
    *reinterpret_cast<uint4*>(out + i64(first + row) * BN + column) = packed(v);
  }
  write_history(first, s, x, history, new_history, slots, 0, 1);
}
