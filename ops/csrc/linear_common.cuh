// What linear.cu and linear_wide.cu share: rows of x from the copy engine, the order of the ring's
// stages, where the output goes, SwiGLU.
#pragma once

#include "wgmma.cuh"

namespace {

constexpr int kTileBytes = 8192;  // 64 rows of the weight x 128 bytes of K
constexpr bool kQuantises = GATE_UP && IS_FP8;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Block `block` of 128 bytes of K of rows `first_row` and on; the box of the map says how many.
DEVICE void load_rows(u32 target, const TensorMap& map, int block, int first_row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(target),
      "l"(&map), "r"(block * (IS_FP8 ? 128 : 64)), "r"(first_row), "r"(barrier)
      : "memory");
}

template <int kCount>
struct StageOf {
  int index = 0, parity = 0;
  DEVICE void advance() {
    if (++index == kCount) index = 0, parity ^= 1;
  }
};
using Stage = StageOf<STAGES>;

// The barrier, once what was `loaded` from shared memory is there. An arrival does not wait for loads that
// are on their way, and a co-resident CTA's can hold them up until the copy engine has written the next
// scales. So its address is computed from their bits, as far as the compiler knows: grids have one layer.
DEVICE u32 after_loads(u32 barrier, u32 loaded) { return barrier + (loaded & (gridDim.z - 1)); }

// What is written before stays before, and what reads `d` after, after.
template <int kCount>
DEVICE void keep_order(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Starts d [64 x N] = or += a * b over a block of 128 bytes of K; `wgmma_wait` ends it.
template <int N>
DEVICE void multiply(float (&d)[N / 2], u32 left, u32 right, bool accumulate) {
  const u64 a = tile_descriptor(left), b = tile_descriptor(right);
  keep_order(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<IS_FP8, N>::run(d, a + 2 * k, b + 2 * k, accumulate || k > 0);
  wgmma_commit();
  keep_order(d);
}

struct Output {
  const bf16* bias;      // [N] or null
  const bf16* residual;  // [M, N], its rows `residual_stride` apart, or null
  void* out;             // [M, N]
  float* scales;         // [N / 128, scale_stride], if quantised
  int num_rows, num_features, residual_stride, scale_stride;

  // Leaves the rows of one CTA: `most` from `first` on.
  DEVICE void keep_rows(int first, int most) {
    const i64 skipped = static_cast<i64>(first) * num_features;
    num_rows = min(num_rows - first, most);
    out = static_cast<u8*>(out) + skipped * (kQuantises ? 1 : 2);
    if (residual != nullptr) residual += static_cast<i64>(first) * residual_stride;
    if (kQuantises) scales += first;
  }
};

// Two conversions at once run on the ordinary pipe; one alone takes its turn at the special functions,
// of which SwiGLU has enough.
DEVICE float bf16_round(float value) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(0.f, value);
  return __uint_as_float(reinterpret_cast<const u32&>(pair));
}

DEVICE float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float approximate_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// silu(gate) * up with the roundings of the two ops on bf16 tensors; what is approximate is so by 2^-21.
DEVICE float swiglu(float gate, float up) {
  gate = bf16_round(gate);
  const float decay = approximate_exp2(gate * -1.4426950408889634f);
  return bf16_round(bf16_round(gate * approximate_inverse(1.f + decay)) * bf16_round(up));
}

}  // namespace
