// A slab: what a tile's rows need of the input, with the halo of their taps, in shared memory; a block
// of CB channels at a time. And the history: the inputs that a stream's next call needs.
#pragma once

#include "codec_conv.cuh"

constexpr int kChunks = CB / 8, kRowsAtOnce = kThreads / kChunks;  // of a slab's row; that all copy
constexpr int kSlabStride = CB * 2 + 16;  // bytes; odd in units of 16, so that ldmatrix has no conflicts

struct Shape {
  int num_rows, num_steps, channels, columns;  // rows = streams * steps
  int num_taps, dilation;
  int padded_products;  // length of a weight row: taps * channels, zeros up to a multiple of 64
  int history_values, history_start;  // of a stream's row of the history; where this layer's lie
  int activation, is_f32;             // of residual and raw
};

// Copy `count` chunks of 16 bytes, from(i) -> to(i), a worker's share of them, several in flight.
template <class From, class To>
DEVICE void copy_chunks(int count, int worker, int num_workers, From from, To to) {
  constexpr int kAtOnce = 4;
  const int step = num_workers * kThreads;
  for (int i = worker * kThreads + threadIdx.x; i < count; i += kAtOnce * step) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (i + j * step < count) held[j] = *from(i + j * step);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (i + j * step < count) *to(i + j * step) = held[j];
  }
}

// The last inputs of every stream, the history of its next call; the CTAs of the same rows, the
// workers, share it.
DEVICE void write_history(int first, const Shape& s, const __half* in, const __half* history,
                          __half* new_history, const i64* slots, int worker, int num_workers) {
  const int past = (s.num_taps - 1) * s.dilation, chunks = s.channels / 8;
  const int steps = min(s.num_steps, BM), begin = s.num_steps < BM ? 0 : first % s.num_steps;
  const int first_kept = max(begin, s.num_steps - past), num_new = begin + steps - first_kept;
  const int first_stream = first / s.num_steps;
  const int num_streams = (min(first + BM, s.num_rows) - first + steps - 1) / steps;
  if (past == 0 || num_new <= 0) return;
  auto target = [&](int stream) {
    return reinterpret_cast<uint4*>(new_history + i64(stream) * s.history_values + s.history_start);
  };
  copy_chunks(
      num_streams * num_new * chunks, worker, num_workers,
      [&](int i) {
        int stream = first_stream + i / chunks / num_new, t = first_kept + i / chunks % num_new;
        return reinterpret_cast<const uint4*>(in + i64(stream * s.num_steps + t) * s.channels) +
               i % chunks;
      },
      [&](int i) {
        int stream = first_stream + i / chunks / num_new, t = first_kept + i / chunks % num_new;
        return target(stream) + (t - s.num_steps + past) * chunks + i % chunks;
      });
  const int kept = (past - s.num_steps) * chunks;  // chunks of the old ones
  if (kept <= 0) return;
  copy_chunks(
      num_streams * kept, worker, num_workers,
      [&](int i) {
        const __half* old = history + slots[first_stream + i / kept] * s.history_values;
        return reinterpret_cast<const uint4*>(old + s.history_start) + s.num_steps * chunks + i % kept;
      },
      [&](int i) { return target(first_stream + i / kept) + i % kept; });
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
  // The slots are read, which only what ran before the kernel before may have written.
  DEVICE void start(int first, const Shape& s, const __half* in, const __half* history,
                    const i64* slots) const {
    const int first_stream = first / s.num_steps, begin = first - first_stream * s.num_steps;
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      const int segment = s.num_steps < BM ? row / (steps + halo) : 0;
      const int stream = first_stream + segment, t = begin + row - segment * (steps + halo) - halo;
      sources[row] = nullptr;
      if (stream * s.num_steps < s.num_rows && t < s.num_steps)
        sources[row] = t >= 0 ? in + i64(stream * s.num_steps + t) * s.channels
                              : history + slots[stream] * s.history_values + s.history_start +
                                    i64(halo + t) * s.channels;
      if (sources[row]) continue;
      for (int i = 0; i < num_slabs; i++)
        for (int chunk = 0; chunk < CB / 8; chunk++)
          reinterpret_cast<uint4*>(memory + i * bytes + row * kSlabStride)[chunk] =
              make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
  // A thread's chunk of a row, and the first of its rows; it has every kRowsAtOnce-th.
  DEVICE int my_chunk() const { return threadIdx.x % kChunks; }
  DEVICE int my_row() const {
    return threadIdx.x < kRowsAtOnce * kChunks ? threadIdx.x / kChunks : rows;
  }
  // All threads: copy the channels from `channel` on to slab i.
  DEVICE void load(int i, int channel) const {
    const u32 to = slab(i) + my_chunk() * 16;
    const int offset = channel + my_chunk() * 8;
#pragma unroll 4
    for (int row = my_row(); row < rows; row += kRowsAtOnce) {
      const __half* source = sources[row];
      if (source) copy16(to + row * kSlabStride, source + offset);
    }
  }
};
