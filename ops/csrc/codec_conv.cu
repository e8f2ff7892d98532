// Causal convolution over streams as one matrix product, channels last:
//   y[b, t, n] = bias[n] + sum over taps j, channels c of
//                          in[b, t - (num_taps - 1 - j) * dilation, c] * weight[n, j, c]
// with what lies before a stream's first step taken from its history. Linear layers are the case of
// one tap; transposed convolutions that of two taps and `stride` times the columns.
//
// A CTA makes a tile of BM rows x BN columns. The rows' input, with the halo of its taps, lies in
// shared memory once for all taps of a block of CB channels (a slab); weights, packed as the tensor
// cores want them, stream past it by bulk copies. A fragment of the input goes through registers, so
// that a tap is a shift of the rows that are read. Every row adds up its products in the same order
// whatever the batch and the tile.
//
// A long sum is split over the CTAs of a cluster, each a range of channels; their parts are added up
// in order, by each CTA for its share of the rows.
//
// BM and the steps of a stream must divide one another unless there is one tap; channels are one
// block, or blocks of 64.
#ifndef WARPGROUPS
#define WARPGROUPS 2
#define BN 96
#define CB 64
#define STAGES 4
#endif

#include "codec_slab.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_conv(const __half* in, const __half* history, __half* new_history, const i64* slots,
               const __half* weight, const float* bias, const float* alpha, const float* inverse,
               const void* residual, void* raw, __half* out, int num_rows, int num_steps,
               int channels, int columns, int num_taps, int dilation, int padded_products,
               int history_values, int history_start, int activation, int is_f32, int num_slabs,
               int num_splits) {
  extern __shared__ unsigned char shared[];
  const Shape s{num_rows, num_steps,       channels,       columns,       num_taps,   dilation,
                padded_products, history_values, history_start, activation, is_f32};
  const Slabs slabs(shared, s, num_slabs);
  const int tid = threadIdx.x;
  const int first_column = blockIdx.x * BN, first = blockIdx.y * BM;
  const int rank = blockIdx.z;  // in the cluster
  const int num_blocks = (channels + CB - 1) / CB / num_splits;
  const int num_tiles = padded_products / 64 / num_splits;
  const int pitch = (columns + 31) / 32;
  const __half* piece =
      weight + (i64(rank * num_tiles) * pitch + first_column / 32) * (kPieceBytes / 2);
  const int num_pieces = min(BN / 32, (columns - first_column + 31) / 32);
  const WeightStream weights{slabs.base, slabs.tiles, piece, num_tiles, num_pieces, pitch};

  int next_block = 0, next_slab = 0;  // to be loaded
  auto load_slab = [&]() {
    if (next_block < num_blocks) {
      slabs.load(next_slab, (rank * num_blocks + next_block) * CB);
      next_block++, next_slab = next_slab + 1 == num_slabs ? 0 : next_slab + 1;
    }
    commit_copies();
  };

  if (tid == 0) weights.start();
  slabs.start(first, s, in, history, slots);
  wait_for_previous_kernels();
  let_next_kernel_start();
  for (int i = 0; i < max(1, num_slabs - 1); i++) load_slab();

  float sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sums[i] = 0;
  const u32 lane_offset = slabs.lane_offset(), tap_bytes = dilation * kSlabStride;
  u32 slab = slabs.slab(0) + lane_offset, at = 0;  // the block's, and the tap's within
  int channel = 0, tap = 0, block = 0, slab_index = 0;
  bool is_new_block = true;

  auto fetch = [&](u32 (&a)[4][4]) {
    if (is_new_block) {
      wait_copies(num_slabs > 1 ? num_slabs - 2 : 0);
      __syncthreads();
      if (num_slabs > 1) load_slab();
      is_new_block = false;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load_fragment(a[i], slab + at + channel * 2);
      channel += 16;
      if (channel < CB) continue;
      channel = 0, tap++, at += tap_bytes;
      if (tap < num_taps) continue;
      tap = 0, at = 0, block++;
      // Past the last product the weights are zeros; what they meet must still be finite.
      if (block == num_blocks) continue;
      is_new_block = true, slab_index = slab_index + 1 == num_slabs ? 0 : slab_index + 1;
      slab = slabs.slab(slab_index) + lane_offset;
    }
  };
  multiply_tiles<1>(sums, weights, num_tiles, fetch, [] {});
  wait_copies<0>();
  __syncthreads();

  float* staged = slabs.staged();
  stage(staged, sums);
  finish(Finish{bias, alpha, inverse, residual, raw, out, num_rows, columns, activation, is_f32},
         staged, first, first_column, rank, num_splits);
  write_history(first, s, in, history, new_history, slots, blockIdx.x * num_splits + rank,
                gridDim.x * num_splits);
}
