// A slab: what a tile's rows need of the input, with the halo of their taps, in shared memory; a block
// of CB channels at a time. And the history: the inputs that a stream's next call needs.
#pragma once

#include "codec_conv.cuh"

constexpr int kSlabStride = CB * 2 + 16;  // bytes; odd in units of 16, so that ldmatrix has no conflicts

struct Shape {
  int num_rows, num_steps, channels, columns;  // rows = streams * steps
  int num_taps, dilation;
  int padded_products;  // length of a weight row: taps * channels, zeros up to a multiple of 64
  int history_values, history_start;  // of a stream's row of the history; where this layer's lie
  int activation, is_f32;             // of residual and raw
};

// Where row `row` of the slab comes from; null: zeros.
DEVICE const __half* slab_source(int row, int first, const Shape& s, const __half* in,
                                 const __half* history, const i64* slots) {
  int halo = (s.num_taps - 1) * s.dilation, steps = min(s.num_steps, BM);
  int segment = row / (steps + halo), offset = row - segment * (steps + halo) - halo;
  int stream = first / s.num_steps + segment;
  int t = (s.num_steps < BM ? 0 : first % s.num_steps) + offset;
  if (stream * s.num_steps >= s.num_rows || t >= s.num_steps) return nullptr;
  if (t >= 0) return in + i64(stream * s.num_steps + t) * s.channels;
  return history + slots[stream] * s.history_values + s.history_start + i64(halo + t) * s.channels;
}

// The last inputs of every stream, the history of its next call.
DEVICE void write_history(int first, const Shape& s, const __half* in, const __half* history,
                          __half* new_history, const i64* slots) {
  int past = (s.num_taps - 1) * s.dilation, chunks = s.channels / 8;
  int steps = min(s.num_steps, BM), last = min(first + BM, s.num_rows);
  if (past == 0 || first % s.num_steps + steps + past <= s.num_steps) return;
  for (int i = threadIdx.x; i < (last - first) * chunks; i += kThreads) {
    int row = first + i / chunks, chunk = i % chunks, stream = row / s.num_steps;
    int place = row % s.num_steps - s.num_steps + past;
    if (place < 0) continue;
    auto source = reinterpret_cast<const uint4*>(in + i64(row) * s.channels) + chunk;
    auto target = new_history + i64(stream) * s.history_values + s.history_start;
    reinterpret_cast<uint4*>(target + place * s.channels)[chunk] = *source;
  }
  int num_kept = past - s.num_steps;  // of the old ones
  if (num_kept <= 0) return;
  int num_streams = (last - first) / s.num_steps;
  for (int i = threadIdx.x; i < num_streams * num_kept * chunks; i += kThreads) {
    int stream = first / s.num_steps + i / (num_kept * chunks), j = i % (num_kept * chunks);
    auto source = history + slots[stream] * s.history_values + s.history_start;
    auto target = new_history + i64(stream) * s.history_values + s.history_start;
    reinterpret_cast<uint4*>(target)[j] =
        reinterpret_cast<const uint4*>(source + s.num_steps * s.channels)[j];
  }
}

// A CTA's shared memory: barriers, STAGES tiles of weights, slabs, where each row of a slab comes from.
struct Slabs {
  int num_slabs, halo, steps, rows;  // of a stream in the tile: steps; of a slab: rows
  u32 base, tiles, begin, bytes;     // addresses: of all, the weights, slab 0; of a slab: bytes
  unsigned char* memory;             // slab 0
  const __half** sources;            // [rows]; null: zeros

  DEVICE Slabs(unsigned char* shared, const Shape& s, int num_slabs) : num_slabs(num_slabs) {
    halo = (s.num_taps - 1) * s.dilation, steps = min(s.num_steps, BM);
    rows = (BM / steps) * (steps + halo);
    base = shared_address(shared), tiles = (base + kBarrierBytes + 1023) & ~1023u;
    begin = tiles + STAGES * kTileBytes, bytes = rows * kSlabStride;
    memory = shared + (begin - base);
    sources = reinterpret_cast<const __half**>(memory + num_slabs * bytes);
  }
  DEVICE u32 slab(int i) const { return begin + i * bytes; }
  // Where a thread's row of a fragment begins in a slab.
  DEVICE u32 lane_offset() const {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
    return (row / steps * (steps + halo) + row % steps) * kSlabStride + chunk * 16;
  }
  DEVICE float* staged() const { return reinterpret_cast<float*>(memory - STAGES * kTileBytes); }
  // All threads, once: where the rows come from; those that come from nowhere are zeros in every slab.
  DEVICE void start(int first, const Shape& s, const __half* in, const __half* history,
                    const i64* slots) const {
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      sources[row] = slab_source(row, first, s, in, history, slots);
      if (sources[row]) continue;
      for (int i = 0; i < num_slabs; i++)
        for (int chunk = 0; chunk < CB / 8; chunk++)
          reinterpret_cast<uint4*>(memory + i * bytes + row * kSlabStride)[chunk] =
              make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
  // All threads: copy the channels from `channel` on to slab i; a thread, every kThreads-th chunk.
  DEVICE void load(int i, int channel) const {
    for (int at = threadIdx.x; at < rows * (CB / 8); at += kThreads) {
      int row = at / (CB / 8), chunk = at % (CB / 8);
      const __half* source = sources[row];
      if (source) copy16(slab(i) + row * kSlabStride + chunk * 16, source + channel + chunk * 8);
    }
  }
};
