// out [M, N] = x [M, K] * weight [N, K]^T in MXFP8 (e4m3, a power of two per 1x32) for sm_120a.
// Compiled, never run: no such card was at hand.
//
// The weight is the left operand: a CTA takes 16 of its rows and all of K, an eighth per warp, COLS
// rows of x are the columns; the partial sums meet in shared memory in the order of the warps.
// Within 32 values that share a scale the order of K is free, so that a thread takes 8 neighbours.
//
// Scales: one u32 per 128 values (4 exponents, the lowest K in the lowest byte), K-major
// [K / 128, stride]. K is a multiple of 128. Defines: COLS.

#include "common.cuh"

namespace {

constexpr int kWarps = 8, kUnits = COLS / 8;

// d [16 x 8] += a [16 x 32] * b [8 x 32]^T, byte kByte of the scales: lane holds those of row
// lane / 4 + lane % 2 * 8 of a and of column lane / 4 of b.
template <unsigned short kByte>
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
  asm volatile(
      "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32."
      "ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %13}, {%11}, "
      "{%12, %13};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b),
        "h"(kByte), "h"(static_cast<unsigned short>(0)));
#endif
}

DEVICE uint2 load8(const u8* source, bool is_inside) {
  return is_inside ? *reinterpret_cast<const uint2*>(source) : uint2{0, 0};
}

template <unsigned short kByte>
DEVICE void multiply_group(float (&acc)[kUnits][4], const u8* rows, const u8* columns, i64 offset, int k,
                           const bool (&has_row)[2], int num_columns, int column, u32 scale_a,
                           const u32 (&scale_b)[kUnits]) {
  const uint2 low = load8(rows + offset + kByte * 32, has_row[0]);
  const uint2 high = load8(rows + offset + 8ll * k + kByte * 32, has_row[1]);
  const u32 a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const bool has_column = column + unit * 8 < num_columns;
    const uint2 pair = load8(columns + offset + static_cast<i64>(unit) * 8 * k + kByte * 32, has_column);
    const u32 b[2] = {pair.x, pair.y};
    multiply<kByte>(acc[unit], a, b, scale_a, scale_b[unit]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    linear_mxfp8(const u8* x, const u32* x_scales, int x_stride, const u8* weight,
                 const u32* weight_scales, int weight_stride, bf16* out, int num_rows, int num_features,
                 int num_columns) {
  __shared__ float partial[kWarps][16][COLS];
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int feature = blockIdx.x * 16 + lane / 4, row = blockIdx.y * COLS + lane / 4;
  const int scaled_feature = feature + lane % 2 * 8;
  const int num_blocks = num_columns / 128;
  const bool has_row[2] = {feature < num_features, feature + 8 < num_features};
  const u8* rows = weight + static_cast<i64>(feature) * num_columns + lane % 4 * 8;
  const u8* columns = x + static_cast<i64>(row) * num_columns + lane % 4 * 8;
  float acc[kUnits][4] = {};
  for (int block = warp; block < num_blocks; block += kWarps) {
    const i64 offset = static_cast<i64>(block) * 128;
    const u32 scale_a = scaled_feature < num_features
                            ? weight_scales[static_cast<i64>(block) * weight_stride + scaled_feature]
                            : 0;
    u32 scale_b[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      scale_b[unit] = row + unit * 8 < num_rows
                          ? x_scales[static_cast<i64>(block) * x_stride + row + unit * 8]
                          : 0;
#define GROUP(i)                                                                                    \
  multiply_group<i>(acc, rows, columns, offset, num_columns, has_row, num_rows, row, scale_a, scale_b);
    GROUP(0) GROUP(1) GROUP(2) GROUP(3)
#undef GROUP
  }
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      partial[warp][lane / 4 + i / 2 * 8][unit * 8 + lane % 4 * 2 + i % 2] = acc[unit][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * COLS; i += kWarps * 32) {
    const int f = blockIdx.x * 16 + i % 16, m = blockIdx.y * COLS + i / 16;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][i % 16][i / 16];
    if (f < num_features && m < num_rows)
      out[static_cast<i64>(m) * num_features + f] = __float2bfloat16_rn(sum);
  }
}
