// What the codec's convolutions share: the tile of a CTA, the products of a fragment of its input with
// a tile of weights, activations, and what becomes of the sums.
//
// Defined by the including file: WARPGROUPS (BM = 64 * WARPGROUPS rows), BN (32, 96 or 192 columns),
// CB (channels at a time), STAGES (tiles of weights in flight).
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

constexpr int kThreads = WARPGROUPS * 128, BM = WARPGROUPS * 64;
constexpr int kPieceBytes = 32 * 128;        // weights of 64 products for 32 columns
constexpr int kTileBytes = BN / 32 * kPieceBytes;
constexpr int kSumStride = BN + 8;           // floats
constexpr int kBarrierBytes = 2 * STAGES * 8;  // of a stage: it is full, it is empty
static_assert(CB % 16 == 0 && BN % 32 == 0, "");

enum Activation { kNone, kSnake, kGelu, kSwiglu };

DEVICE void copy16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
DEVICE void wait_copies(int pending) {  // all but the latest `pending` groups, of which at most 6 are left
  switch (pending) {
    case 0: return wait_copies<0>();
    case 1: return wait_copies<1>();
    case 2: return wait_copies<2>();
    case 3: return wait_copies<3>();
    case 4: return wait_copies<4>();
    case 5: return wait_copies<5>();
    default: return wait_copies<6>();
  }
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
#define R96                                                                                       \
  R48                                                                                             \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// d [64 x BN] += a [64 x 16] (registers) * weights [BN x 16]^T (shared, 128-byte swizzled).
DEVICE void multiply(float (&d)[BN / 2], const u32 (&a)[4], u32 weights, int, int) {
  u64 tile = u64((weights & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
#if BN == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" R16
      "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : D16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile));
#elif BN == 192
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" R96
      "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
      : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80)
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
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void finish_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
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
DEVICE void fence_registers() {}
DEVICE void finish_products() {}
template <int kPending>
DEVICE void wait_products() {}
#endif

// Rounded to halves; what is out of their range becomes their largest.
DEVICE u32 packed(float low, float high) {
  u32 halves;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}
DEVICE uint4 packed(const float (&v)[8]) {
  return make_uint4(packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]), packed(v[6], v[7]));
}
DEVICE void load8(float (&v)[8], const float* source) {
  float4 low = reinterpret_cast<const float4*>(source)[0];
  float4 high = reinterpret_cast<const float4*>(source)[1];
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

// v + sin(alpha v)^2 / alpha
DEVICE void snake(float (&v)[8], const float (&alpha)[8], const float (&inverse)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float wave = __sinf(alpha[i] * v[i]);
    v[i] += wave * wave * inverse[i];
  }
}

DEVICE void activate(float (&v)[8], int activation, const float (&alpha)[8],
                     const float (&inverse)[8]) {
  if (activation == kSnake) {
    snake(v, alpha, inverse);
  } else if (activation == kGelu) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= 0.5f * (1 + erff(v[i] * 0.70710678f));
  } else if (activation == kSwiglu) {  // columns alternate: gate, up; the results come first
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = v[2 * i] / (1 + __expf(-v[2 * i])) * v[2 * i + 1];
  }
}

// Tiles of weights on their way to shared memory: full barriers, then empty ones, then the tiles.
struct WeightStream {
  u32 base, tiles;
  const __half* weight;  // of the CTA's first tile
  int num_tiles, num_pieces;  // of a tile: pieces of 32 columns, one after the other
  int pitch;  // pieces from a tile's first to the next one's

  DEVICE u32 full(int k) const { return base + k % STAGES * 8; }
  DEVICE u32 empty(int k) const { return base + (STAGES + k % STAGES) * 8; }
  DEVICE u32 tile(int k) const { return tiles + k % STAGES * kTileBytes; }
  DEVICE void load(int k) const {  // one thread
    const u32 bytes = num_pieces * kPieceBytes;
    barrier_expect(full(k), bytes);
    bulk_copy(tile(k), weight + i64(k) * pitch * (kPieceBytes / 2), bytes, full(k));
  }
  DEVICE void start() const {  // one thread; nothing waits for the kernel before
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kThreads / 32);
    }
    barrier_init_fence();
    for (int k = 0; k < min(STAGES, num_tiles); k++) load(k);
  }
  DEVICE void wait(int k) const { barrier_wait(full(k), k / STAGES & 1); }
  // All threads, once the products of tile k are under way: into the tile before comes the next.
  DEVICE void refill(int k) const {
    if (threadIdx.x != 0 || k == 0 || k - 1 + STAGES >= num_tiles) return;
    barrier_wait(empty(k - 1), (k - 1) / STAGES & 1);
    load(k - 1 + STAGES);
  }
  DEVICE void release(int k) const {  // all threads, after the products of tile k
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(k));
  }
};

// sums += the products of tiles 0 .. count - 1 of the weights with the fragments that fetch(a) gives;
// meanwhile() is called while a tile's products run. All threads. To have the next tile's fragments
// and products under way before a tile's are done is slower: its stage is then refilled later.
template <int kUnrolled, class Fetch, class Meanwhile>
DEVICE void multiply_tiles(float (&sums)[BN / 2], const WeightStream& weights, int count, Fetch fetch,
                           Meanwhile meanwhile) {
  const int lane = threadIdx.x % 32;
#pragma unroll kUnrolled
  for (int k = 0; k < count; k++) {
    u32 a[4][4];
    fetch(a);
    weights.wait(k);
    fence_registers();
#pragma unroll
    for (int i = 0; i < 4; i++) multiply(sums, a[i], step_address(weights.tile(k), i), i, lane);
    finish_products();
    weights.refill(k);
    meanwhile();
    wait_products<0>();
    weights.release(k);
  }
}

// The sums of all threads -> [BM, kSumStride] in shared memory.
DEVICE void stage(float* staged, const float (&sums)[BN / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
    float* at = staged + (warp * 16 + lane / 4) * kSumStride + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(sums[4 * j], sums[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kSumStride) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
}

DEVICE void add(float (&v)[8], const float (&other)[8]) {
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] += other[e];
}

DEVICE void add(float (&v)[8], uint4 bits) {
  const __half2* halves = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float2 pair = __half22float2(halves[e]);
    v[2 * e] += pair.x, v[2 * e + 1] += pair.y;
  }
}

// Who finishes what of a tile: a thread, 8 columns of every kOutAtOnce-th row.
constexpr int kMostSplits = 4;
constexpr int kOutAtOnce = kThreads / (BN / 8), kPasses = (BM + kOutAtOnce - 1) / kOutAtOnce;
DEVICE int my_columns() { return threadIdx.x % (BN / 8) * 8; }
DEVICE int my_first_row() {
  return threadIdx.x < kOutAtOnce * (BN / 8) ? threadIdx.x / (BN / 8) : BM;
}

// What becomes of a sum: bias, residual, the raw result, activation, the result.
struct Finish {
  const float *bias, *alpha, *inverse;
  const void* residual;
  void* raw;
  __half* out;
  int num_rows, columns, activation, is_f32;
};

// Finish a staged tile. The CTAs of a cluster have parts of the same sums: each finishes its share of
// the rows, and nobody leaves while others read its part. What is read from memory is asked for at
// once, before the sums are waited for.
DEVICE void finish(const Finish& f, const float* staged, int first, int first_column, int rank,
                   int num_splits) {
  const int share = BM / num_splits, column = first_column + my_columns();
  const bool has_column = column < f.columns;
  auto is_mine = [&](int row) {
    return has_column && row < share && first + rank * share + row < f.num_rows;
  };
  auto place_of = [&](int row) { return i64(first + rank * share + row) * f.columns + column; };
  float bias[8] = {}, alpha[8] = {}, inverse[8] = {};
  if (has_column && f.bias) load8(bias, f.bias + column);
  if (has_column && f.activation == kSnake)
    load8(alpha, f.alpha + column), load8(inverse, f.inverse + column);
  uint4 residual[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int row = my_first_row() + pass * kOutAtOnce;
    residual[pass] = make_uint4(0, 0, 0, 0);
    if (f.residual && !f.is_f32 && is_mine(row))
      residual[pass] = *reinterpret_cast<const uint4*>(static_cast<const __half*>(f.residual) +
                                                       place_of(row));
  }
  __syncthreads();
  if (num_splits > 1) cluster_sync();
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int row = my_first_row() + pass * kOutAtOnce;
    if (!is_mine(row)) break;
    const i64 place = place_of(row);
    const float* mine = staged + (rank * share + row) * kSumStride + my_columns();
    float v[8] = {};
    if (num_splits == 1) {
      load8(v, mine);
    } else {
      float4 low[kMostSplits], high[kMostSplits];  // all parts are on their way before the first is added
#pragma unroll
      for (int part = 0; part < kMostSplits; part++) {
        if (part >= num_splits) break;
        u32 address = cluster_address(shared_address(mine), part);
        low[part] = cluster_load4(address), high[part] = cluster_load4(address + 16);
      }
#pragma unroll
      for (int part = 0; part < kMostSplits; part++) {
        if (part >= num_splits) break;
        v[0] += low[part].x, v[1] += low[part].y, v[2] += low[part].z, v[3] += low[part].w;
        v[4] += high[part].x, v[5] += high[part].y, v[6] += high[part].z, v[7] += high[part].w;
      }
    }
    if (f.bias) add(v, bias);
    if (f.residual && f.is_f32) {
      float other[8];
      load8(other, static_cast<const float*>(f.residual) + place);
      add(v, other);
    } else if (f.residual) {
      add(v, residual[pass]);
    }
    if (f.raw && f.is_f32) {
      float4* at = reinterpret_cast<float4*>(static_cast<float*>(f.raw) + place);
      at[0] = make_float4(v[0], v[1], v[2], v[3]), at[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else if (f.raw) {
      *reinterpret_cast<uint4*>(static_cast<__half*>(f.raw) + place) = packed(v);
    }
    if (!f.out) continue;
    activate(v, f.activation, alpha, inverse);
    uint4 halves = packed(v);
    if (f.activation == kSwiglu)
      *reinterpret_cast<uint2*>(f.out + place / 2) = make_uint2(halves.x, halves.y);
    else
      *reinterpret_cast<uint4*>(f.out + place) = halves;
  }
  if (num_splits > 1) __syncwarp(), cluster_sync();
}
