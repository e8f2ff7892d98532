// codec_conv for one tap and few rows: y = x * weight^T, where a launch takes as long as its waits.
// A CTA makes ROWS rows of 32 columns. STAGES tiles of its weights, 64 products each, are on their way
// before the kernel ahead has finished; as many of its input follow at once. 16 are all there are: the
// products run without a wait between them. Of fewer, a tile's place takes the one STAGES further on.
//
// ROWS: 64, or 8, whose tensor-core rows 8 .. 63 read whatever follows and are never looked at.
#define WARPGROUPS 1
#define BN 32
#define CB 64
#ifndef ROWS
#define ROWS 64
#endif
#ifndef STAGES
#define STAGES 16
#endif

#include "codec_conv.cuh"

constexpr int kInputBytes = ROWS * 128;  // of 64 channels

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NO_WGMMA)
DEVICE u64 descriptor(u32 address) {  // groups of 8 rows one after another, 128-byte swizzled
  return u64((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// sums [64 x 32] += input [64 x 64] * weights [32 x 64]^T, both in shared memory.
DEVICE void multiply_tile(float (&d)[BN / 2], u32 input, u32 weights) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" R16 "}, %16, %17, 1, 1, 1, 0, 0;"
                 : D16(0)
                 : "l"(descriptor(input + i * 32)), "l"(descriptor(weights + i * 32)));
}
#else
DEVICE void multiply_tile(float (&d)[BN / 2], u32 input, u32 weights) {
  const int lane = threadIdx.x % 32, row = (threadIdx.x / 32 * 16 + lane % 16) % ROWS;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 a[4];
    load_fragment(a, input + row * 128 + ((i * 2 + lane / 16) ^ row % 8) * 16);
    multiply(d, a, weights, i, lane);
  }
}
#endif

// A tile of the input, 64 channels of `count` rows, begins to be copied.
DEVICE void copy_tile(u32 to, const __half* from, int count, int channels) {
  const int chunk = threadIdx.x % 8;
#pragma unroll
  for (int first = 0; first < ROWS; first += kThreads / 8) {
    const int row = first + threadIdx.x / 8;
    if (row < count)
      copy16(to + row * 128 + (chunk ^ row % 8) * 16, from + i64(row) * channels + chunk * 8);
  }
  commit_copies();
}

// All tiles of a few rows: no thread is idle.
DEVICE void copy_rows(u32 to, const __half* from, int count, int channels, int num_tiles) {
  const int chunks = num_tiles * 8;
  for (int i = threadIdx.x; i < count * chunks; i += kThreads) {
    int row = i / chunks, chunk = i % chunks;
    copy16(to + chunk / 8 * kInputBytes + row * 128 + (chunk % 8 ^ row % 8) * 16,
           from + i64(row) * channels + chunk * 8);
  }
  commit_copies();
}

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_linear(const __half* x, const __half* weight, const float* bias, const float* alpha,
                 const float* inverse, const void* residual, void* raw, __half* out, int num_rows,
                 int channels, int columns, int activation, int is_f32, int num_splits) {
  extern __shared__ unsigned char shared[];
  const int tid = threadIdx.x, rank = blockIdx.z;
  const int first_column = blockIdx.x * BN, first = blockIdx.y * ROWS;
  const int num_tiles = channels / 64 / num_splits, pitch = (columns + 31) / 32;
  const u32 base = shared_address(shared), tiles = (base + kBarrierBytes + 1023) & ~1023u;
  const int held = min(num_tiles, STAGES);
  const u32 input = tiles + held * kTileBytes;
  const WeightStream weights{
      base,  tiles, weight + (i64(rank * num_tiles) * pitch + blockIdx.x) * (kPieceBytes / 2), num_tiles,
      1,     pitch};
  if (tid == 0) weights.start();
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int count = min(ROWS, num_rows - first);
  const __half* rows = x + i64(first) * channels + rank * num_tiles * 64;
  float sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sums[i] = 0;
#if STAGES == 16
  copy_rows(input, rows, count, channels, num_tiles);
  wait_copies<0>();
  fence_async_proxy();
  __syncthreads();
  for (int k = 0; k < num_tiles; k++) {
    weights.wait(k);
    fence_registers();
    multiply_tile(sums, input + k * kInputBytes, weights.tile(k));
    finish_products();
  }
#else
  for (int k = 0; k < STAGES; k++)
    copy_tile(input + k * kInputBytes, rows + k * 64, k < num_tiles ? count : 0, channels);
  for (int k = 0; k < num_tiles; k++) {
    wait_copies<STAGES - 2>();
    fence_async_proxy();
    wait_products<0>();
    __syncthreads();  // tile k has come, and nobody needs the one before
    const int next = k - 1 + STAGES;
    if (k > 0 && next < num_tiles) {
      if (tid == 0) weights.load(next);
      copy_tile(input + next % STAGES * kInputBytes, rows + next * 64, count, channels);
    } else {
      commit_copies();
    }
    weights.wait(k);
    fence_registers();
    multiply_tile(sums, input + k % STAGES * kInputBytes, weights.tile(k));
    finish_products();
  }
#endif
  wait_products<0>();
  __syncthreads();

  float* staged = reinterpret_cast<float*>(shared + (tiles - base));
  stage(staged, sums);
  finish(Finish{bias, alpha, inverse, residual, raw, out, min(num_rows, first + ROWS), columns,
                activation, is_f32},
         staged, first, first_column, rank, num_splits);
}
