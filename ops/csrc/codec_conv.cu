// Causal convolution over streams as one matrix product, channels last:
//   y[b, t, n] = bias[n] + sum over taps j, channels c of in[b, t - (kTaps - 1 - j) * dilation, c] * weight[n, j, c]
// with what lies before a stream's first step taken from its history. Linear layers are the case of
// one tap; transposed convolutions that of two taps and `stride` times the columns.
//
// A CTA makes a tile of BM rows x BN columns. The rows' input, with the halo of its taps, lies in
// shared memory once for all taps of a block of CB channels (a slab); weights stream past it. A
// fragment of the input goes through registers, so that a tap is a shift of the rows that are read.
// Every row adds up its products in the same order whatever the batch and the tile.
//
// Defined by the caller: WARPGROUPS (BM = 64 * WARPGROUPS), BN (32, 96), CB, STAGES. BM and the steps
// of a stream must divide one another unless there is one tap; channels are one block, or blocks of 64.
#include <cuda_fp16.h>

#include "common.cuh"

#ifndef WARPGROUPS
#define WARPGROUPS 2
#define BN 96
#define CB 64
#define STAGES 4
#endif

constexpr int kThreads = WARPGROUPS * 128, BM = WARPGROUPS * 64;
constexpr int kSlabStride = CB * 2 + 16;  // bytes; odd in units of 16, so that ldmatrix has no conflicts
constexpr int kAhead = STAGES - 1;
constexpr int kTileBytes = BN * 128;  // weights of 64 products for each column
constexpr int kSumStride = BN + 8;    // floats
static_assert(CB % 16 == 0 && BN % 32 == 0, "");

enum Activation { kNone, kSnake, kGelu, kSwiglu };

DEVICE void copy16(u32 destination, const void* source, bool is_there) {
  int size = is_there ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(size)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
DEVICE void load_fragment(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NO_WGMMA)
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R48                                                                                       \
  R16                                                                                             \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "  \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

// d [64 x BN] += a [64 x 16] (registers) * weights [BN x 16]^T (shared, 128-byte swizzled).
DEVICE void multiply(float (&d)[BN / 2], const u32 (&a)[4], u32 weights, int, int) {
  u64 tile = u64((weights & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
#if BN == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" R16
      "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : D16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile));
#else
  static_assert(BN == 96, "");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" R48
      "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
      : D16(0), D16(16), D16(32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile));
#endif
}
DEVICE u32 step_address(u32 tile, int step) { return tile + step * 32; }
DEVICE void begin_products() {
  fence_async_proxy();  // weights were written by ordinary copies
}
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
#else
// The same on any architecture, a warp's 16 rows at a time.
DEVICE void multiply(float (&d)[BN / 2], const u32 (&a)[4], u32 tile, int step, int lane) {
  int row = lane % 8 + lane / 16 * 8, chunk = step * 2 + lane / 8 % 2;
#pragma unroll
  for (int n = 0; n < BN; n += 16) {
    u32 b[4];
    load_fragment(b, tile + (n + row) * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* c = d + n / 2 + half * 4;
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * half]), "r"(b[2 * half + 1]));
    }
  }
}
DEVICE u32 step_address(u32 tile, int) { return tile; }
DEVICE void begin_products() {}
DEVICE void fence_registers() {}
DEVICE void finish_products() {}
DEVICE void wait_products() {}
#endif

DEVICE float clamped(float value) { return fminf(fmaxf(value, -65504.f), 65504.f); }
DEVICE uint4 packed(const float (&v)[8]) {
  uint4 result;
  __half2* halves = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (int i = 0; i < 4; i++)
    halves[i] = __floats2half2_rn(clamped(v[2 * i]), clamped(v[2 * i + 1]));
  return result;
}
DEVICE void load8(float (&v)[8], const float* source) {
  float4 low = reinterpret_cast<const float4*>(source)[0];
  float4 high = reinterpret_cast<const float4*>(source)[1];
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

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

DEVICE void activate(float (&v)[8], int activation, int column, const float* alpha,
                     const float* inverse) {
  if (activation == kSnake) {
    float a[8], r[8];
    load8(a, alpha + column), load8(r, inverse + column);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float wave = __sinf(a[i] * v[i]);
      v[i] += wave * wave * r[i];
    }
  } else if (activation == kGelu) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= 0.5f * (1 + erff(v[i] * 0.70710678f));
  } else if (activation == kSwiglu) {  // columns alternate: gate, up; the results come first
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = v[2 * i] / (1 + __expf(-v[2 * i])) * v[2 * i + 1];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_conv(const __half* in, const __half* history, __half* new_history, const i64* slots,
               const __half* weight, const float* bias, const float* alpha, const float* inverse,
               const void* residual, void* raw, __half* out, int num_rows, int num_steps,
               int channels, int columns, int num_taps, int dilation, int padded_products,
               int history_values, int history_start, int activation, int is_f32, int num_slabs) {
  extern __shared__ unsigned char shared[];
  const Shape s{num_rows, num_steps,       channels,       columns,       num_taps,   dilation,
                padded_products, history_values, history_start, activation, is_f32};
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int first_column = blockIdx.x * BN, first = blockIdx.y * BM;
  const int halo = (num_taps - 1) * dilation, steps = min(num_steps, BM);
  const int slab_rows = (BM / steps) * (steps + halo);
  const u32 tiles = (shared_address(shared) + 1023) & ~1023u;
  const u32 slabs = tiles + STAGES * kTileBytes, slab_bytes = slab_rows * kSlabStride;
  unsigned char* after = shared + (slabs - shared_address(shared)) + num_slabs * slab_bytes;
  const __half** sources = reinterpret_cast<const __half**>(after);  // [slab_rows]

  const int num_tiles = padded_products / 64;

  auto load_weights = [&](int k) {
    for (int row = tid / 8; row < BN; row += kThreads / 8) {
      int column = first_column + row, chunk = tid % 8;
      copy16(tiles + k % STAGES * kTileBytes + row * 128 + (chunk ^ row % 8) * 16,
             weight + i64(column) * padded_products + k * 64 + chunk * 8, column < columns);
    }
  };
  int next_block = 0, next_slab = 0;  // to be loaded; block b begins in tile b * num_taps
  auto load_slab = [&](int k) {
    if (k != next_block * num_taps || next_block * CB >= channels) return;
    u32 slab = slabs + next_slab * slab_bytes;
    for (int i = tid; i < slab_rows * (CB / 8); i += kThreads) {
      int row = i / (CB / 8), chunk = i % (CB / 8);
      const __half* source = sources[row];
      copy16(slab + row * kSlabStride + chunk * 16,
             source ? source + next_block * CB + chunk * 8 : weight, source != nullptr);
    }
    next_block++, next_slab = next_slab + 1 == num_slabs ? 0 : next_slab + 1;
  };

  for (int k = 0; k < kAhead; k++)
    if (k < num_tiles) load_weights(k);
  wait_for_previous_kernels();
  let_next_kernel_start();
  for (int row = tid; row < slab_rows; row += kThreads)
    sources[row] = slab_source(row, first, s, in, history, slots);
  __syncthreads();
  for (int k = 0; k < kAhead; k++) {
    if (k < num_tiles) load_slab(k);
    commit_copies();
  }

  float sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sums[i] = 0;
  const int tile_row = warp * 16 + lane % 16;
  const u32 lane_offset =
      (tile_row / steps * (steps + halo) + tile_row % steps) * kSlabStride + lane / 16 * 16;
  int channel = 0, tap = 0, block = 0, slab_index = 0;  // of the next step of 16 products
  for (int k = 0; k < num_tiles; k++) {
    wait_copies<kAhead - 1>();
    begin_products();
    __syncthreads();
    const u32 tile = tiles + k % STAGES * kTileBytes;
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 slab = slabs + slab_index * slab_bytes + lane_offset;
      load_fragment(a[i], slab + tap * dilation * kSlabStride + channel * 2);
      channel += 16;
      if (channel < CB) continue;
      channel = 0, tap++;
      if (tap < num_taps) continue;
      tap = 0, block++;
      // Past the last product the weights are zeros; what they meet must still be finite.
      if (block * CB < channels) slab_index = slab_index + 1 == num_slabs ? 0 : slab_index + 1;
    }
    fence_registers();
#pragma unroll
    for (int i = 0; i < 4; i++) multiply(sums, a[i], step_address(tile, i), i, lane);
    finish_products();
    if (k + kAhead < num_tiles) load_weights(k + kAhead), load_slab(k + kAhead);
    commit_copies();
    wait_products();
  }
  wait_copies<0>();
  __syncthreads();

  float* staged = reinterpret_cast<float*>(shared + (tiles - shared_address(shared)));
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
    float* at = staged + (warp * 16 + lane / 4) * kSumStride + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(sums[4 * j], sums[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kSumStride) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
  __syncthreads();
  for (int i = tid; i < BM * (BN / 8); i += kThreads) {
    int row = first + i / (BN / 8), column = first_column + i % (BN / 8) * 8;
    if (row >= num_rows || column >= columns) continue;
    float v[8], other[8];
    load8(v, staged + i / (BN / 8) * kSumStride + i % (BN / 8) * 8);
    i64 place = i64(row) * columns + column;
    if (bias) {
      load8(other, bias + column);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] += other[e];
    }
    if (residual && is_f32) {
      load8(other, static_cast<const float*>(residual) + place);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] += other[e];
    } else if (residual) {
      uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const __half*>(residual) + place);
      const __half2* halves = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float2 pair = __half22float2(halves[e]);
        v[2 * e] += pair.x, v[2 * e + 1] += pair.y;
      }
    }
    if (raw && is_f32) {
      float4* at = reinterpret_cast<float4*>(static_cast<float*>(raw) + place);
      at[0] = make_float4(v[0], v[1], v[2], v[3]), at[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else if (raw) {
      *reinterpret_cast<uint4*>(static_cast<__half*>(raw) + place) = packed(v);
    }
    if (!out) continue;
    activate(v, activation, column, alpha, inverse);
    if (activation == kSwiglu)
      *reinterpret_cast<uint2*>(out + place / 2) = make_uint2(packed(v).x, packed(v).y);
    else
      *reinterpret_cast<uint4*>(out + place) = packed(v);
  }
  if (blockIdx.x == 0) write_history(first, s, in, history, new_history, slots);
}
