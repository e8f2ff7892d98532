// codec_conv for one tap and few rows: y = x * weight^T, where a launch takes as long as its waits.
// All weights of a CTA are on their way before the kernel ahead has finished; all of its input
// follows at once, and the products run without a wait between them.
//
// ROWS: 64, or 8, whose tensor-core rows 8 .. 63 read whatever follows and are never looked at.
// NORM: x is f32, and each CTA makes its RMSNorm itself, the bits of codec_rms_norm.
#define WARPGROUPS 1
#define BN 32
#define CB 64
#define STAGES 16
#ifndef ROWS
#define ROWS 64
#endif
#ifndef NORM
#define NORM 0
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

#if NORM
using Input = float;

// The RMSNorm of x [count, channels] -> the input's tiles of 64 channels, as halves. Its sums have the
// order of those of codec_rms_norm, which has as many threads.
DEVICE void take_input(unsigned char* input, const float* x, const float* norm_weight, float eps,
                       int count, int channels, int) {
  constexpr int kMost = 1024 / kThreads;  // channels of a thread
  __shared__ float parts[ROWS][kThreads / 32];
  const int tid = threadIdx.x;
  float v[ROWS][kMost], weight[kMost];
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const int c = tid + i * kThreads;
    weight[i] = c < channels ? norm_weight[c] : 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
      v[row][i] = row < count && c < channels ? x[row * channels + c] : 0;
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kMost; i++) squares += v[row][i] * v[row][i];
    squares = warp_sum(squares);
    if (tid % 32 == 0) parts[row][tid / 32] = squares;
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) sum += parts[row][i];
    const float scale = rsqrtf(sum / channels + eps);
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      const int c = tid + i * kThreads;
      if (c >= channels) break;
      const float value = fminf(fmaxf(v[row][i] * scale * weight[i], -65504.f), 65504.f);
      const int at = c / 64 * kInputBytes + row * 128 + (c % 64 / 8 ^ row % 8) * 16 + c % 8 * 2;
      *reinterpret_cast<__half*>(input + at) = __float2half_rn(value);
    }
  }
}
#else
using Input = __half;

// The first num_tiles * 64 channels of x [count, channels] -> the input's tiles.
DEVICE void take_input(unsigned char* input, const __half* x, const float*, float, int count,
                       int channels, int num_tiles) {
  const int chunks = num_tiles * 8;
  for (int i = threadIdx.x; i < count * chunks; i += kThreads) {
    int row = i / chunks, chunk = i % chunks;
    copy16(shared_address(input) + chunk / 8 * kInputBytes + row * 128 + (chunk % 8 ^ row % 8) * 16,
           x + i64(row) * channels + chunk * 8);
  }
  commit_copies();
  wait_copies<0>();
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_linear(const Input* x, const __half* weight, const float* bias, const float* alpha,
                 const float* inverse, const void* residual, void* raw, __half* out, int num_rows,
                 int channels, int columns, int activation, int is_f32, int num_splits,
                 const float* norm_weight, float eps) {
  extern __shared__ unsigned char shared[];
  const int tid = threadIdx.x, rank = blockIdx.z;
  const int first_column = blockIdx.x * BN, first = blockIdx.y * ROWS;
  const int num_tiles = channels / 64 / num_splits, pitch = (columns + 31) / 32;
  const u32 base = shared_address(shared), tiles = (base + kBarrierBytes + 1023) & ~1023u;
  const u32 input = tiles + num_tiles * kTileBytes;
  const WeightStream weights{
      base,  tiles, weight + (i64(rank * num_tiles) * pitch + blockIdx.x) * (kPieceBytes / 2), num_tiles,
      1,     pitch};
  if (tid == 0) weights.start();  // num_tiles is at most STAGES
  wait_for_previous_kernels();
  let_next_kernel_start();
  take_input(shared + (input - base), x + i64(first) * channels + rank * num_tiles * 64, norm_weight,
             eps, min(ROWS, num_rows - first), channels, num_tiles);
  float sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sums[i] = 0;
  fence_async_proxy();
  __syncthreads();
  for (int k = 0; k < num_tiles; k++) {
    weights.wait(k);
    fence_registers();
    multiply_tile(sums, input + k * kInputBytes, weights.tile(k));
    finish_products();
  }
  wait_products<0>();
  __syncthreads();

  float* staged = reinterpret_cast<float*>(shared + (tiles - base));
  stage(staged, sums);
  finish(Finish{bias, alpha, inverse, residual, raw, out, min(num_rows, first + ROWS), columns,
                activation, is_f32},
         staged, first, first_column, rank, num_splits);
}
