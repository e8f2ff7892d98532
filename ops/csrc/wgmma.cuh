// Warpgroup matrix multiply of Hopper: D [64 x N] f32 in registers += A [64 x k] * B [N x k]^T, both in
// shared memory, K-major, 128-byte swizzled: row r's 16-byte chunk c lies at r * 128 + (c ^ r % 8) * 16.
//
// Thread t of the warpgroup holds, for every 8 columns j, rows r = t / 32 * 16 + t % 32 / 4 and r + 8
// of columns c = 8 * j + t % 4 * 2 and c + 1: d[4j] (r, c), d[4j+1] (r, c+1), d[4j+2] (r+8, c), d[4j+3].
#pragma once

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NO_WGMMA)
// Of a tile that starts on a 1024-byte boundary; + 2 is the next 32 bytes of K.
DEVICE u64 tile_descriptor(u32 address) {
  constexpr u64 kGroupOf8Rows = 1024 >> 4, kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | 1ull << 16 | kGroupOf8Rows << 32 | kSwizzle128 << 62;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <bool kIsFp8, int N>
struct Wgmma;

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D24(i) D16(i), D8(i + 16)
#define D32(i) D16(i), D16(i + 16)
#define D40(i) D32(i), D8(i + 32)
#define D44(i) D40(i), D4(i + 40)
#define D48(i) D32(i), D16(i + 32)
#define D64(i) D32(i), D32(i + 32)
#define D80(i) D64(i), D16(i + 64)
#define D96(i) D64(i), D32(i + 64)

// One instruction: k = 32 for e4m3, 16 for bf16. The old value of d counts if `accumulate` is not 0.
#define DEFINE_WGMMA(N, OUTPUTS, REGISTERS, A, B, P)                                              \
  template <>                                                                                     \
  struct Wgmma<true, N> {                                                                         \
    static DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                     \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B   \
          ", p, 1, 1;\n}"                                                                         \
          : OUTPUTS                                                                               \
          : "l"(a), "l"(b), "r"(accumulate));                                                     \
    }                                                                                             \
  };                                                                                              \
  template <>                                                                                     \
  struct Wgmma<false, N> {                                                                        \
    static DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                     \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, " A ", " B   \
          ", p, 1, 1, 0, 0;\n}"                                                                   \
          : OUTPUTS                                                                               \
          : "l"(a), "l"(b), "r"(accumulate));                                                     \
    }                                                                                             \
  };

#define R4 "%0, %1, %2, %3"
#define R8 R4 ", %4, %5, %6, %7"
#define R16 R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R24 R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define R32 R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define R48 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R64 R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R40 R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R44 R40 ", %40, %41, %42, %43"
#define R80                                                                                       \
  R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

#define R96                                                                                       \
  R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

DEFINE_WGMMA(8, D4(0), R4, "%4", "%5", "%6")
DEFINE_WGMMA(16, D8(0), R8, "%8", "%9", "%10")
DEFINE_WGMMA(32, D16(0), R16, "%16", "%17", "%18")
DEFINE_WGMMA(48, D24(0), R24, "%24", "%25", "%26")
DEFINE_WGMMA(64, D32(0), R32, "%32", "%33", "%34")
DEFINE_WGMMA(80, D40(0), R40, "%40", "%41", "%42")
DEFINE_WGMMA(88, D44(0), R44, "%44", "%45", "%46")
DEFINE_WGMMA(96, D48(0), R48, "%48", "%49", "%50")
DEFINE_WGMMA(128, D64(0), R64, "%64", "%65", "%66")
DEFINE_WGMMA(160, D80(0), R80, "%80", "%81", "%82")
DEFINE_WGMMA(192, D96(0), R96, "%96", "%97", "%98")
#else
// The same by the products of a warp, on any architecture that has them in 8 bits: compiled for sm_120a, never run.
DEVICE u64 tile_descriptor(u32 address) { return address >> 4; }
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int kPending>
DEVICE void wgmma_wait() {}

// Where a lane reads 16 bytes of a row: chunk `half` of the descriptor's 32 bytes of K.
DEVICE u32 chunk_address(u64 descriptor, int row, int half) {
  const u32 tile = static_cast<u32>(descriptor & ~7ull) << 4, chunk = (descriptor & 7) + half;
  return tile + row * 128 + (chunk ^ row % 8) * 16;
}

#define D_A_B_D                                                                                   \
  "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define MMA_OPERANDS                                                                              \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1])

template <bool kIsFp8, int N>
struct Wgmma {
  static DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16;
    u32 rows[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3])
                 : "r"(chunk_address(a, first_row + lane % 16, lane / 16))
                 : "memory");
#pragma unroll
    for (int column = 0; column < N; column += 8) {
      u32 columns[2];
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(columns[0]), "=r"(columns[1])
                   : "r"(chunk_address(b, column + lane % 8, lane / 8 % 2))
                   : "memory");
      multiply(*reinterpret_cast<float(*)[4]>(d + column / 2), rows, columns, accumulate);
    }
  }

  static DEVICE void multiply(float (&d)[4], const u32 (&rows)[4], const u32 (&columns)[2],
                              int accumulate) {
    if (!accumulate) d[0] = d[1] = d[2] = d[3] = 0;
    if constexpr (kIsFp8)
      asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 " D_A_B_D : MMA_OPERANDS);
    else
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " D_A_B_D : MMA_OPERANDS);
  }
};
#endif
