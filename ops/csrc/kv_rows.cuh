// Rows of keys and values in memory: bf16, or e4m3 with a scale per row in bf16.
#pragma once

#include "heads.cuh"

// What is not finite becomes 0: some kernels multiply values by the weights of several streams' queries, which
// are 0 where a value is not for them, and 0 times NaN is NaN.
DEVICE uint4 finite(uint4 values) {
  const auto kept = [](u32 pair) {
    const __nv_bfloat162 both = *reinterpret_cast<const __nv_bfloat162*>(&pair);
    const __nv_bfloat16 largest = __ushort_as_bfloat16(0x7f7f);
    return pair & __hle2_mask(__habs2(both), {largest, largest});
  };
  return make_uint4(kept(values.x), kept(values.y), kept(values.z), kept(values.w));
}

template <int D>
struct Bf16Rows {
  using Element = bf16;
  using Eight = uint4;  // what one of D / 8 lanes has of a row
  bf16* data;           // [rows, D]
  bf16* scales;         // null

  static DEVICE Eight eight(uint4 values) { return finite(values); }
  DEVICE void store(i64 row, int offset, const Eight& eight) const {
    *reinterpret_cast<uint4*>(data + row * D + offset) = eight;
  }
};

template <int D>
struct Fp8Rows {
  using Element = u8;
  struct Eight {
    uint2 values;
    bf16 scale;  // the same in all lanes of the row
  };
  u8* data;      // [rows, D]: value = data * scale
  bf16* scales;  // [rows]

  // Of eight bf16; all lanes of the warp must call it. The definition's operations, one rounding each.
  static DEVICE Eight eight(uint4 values) {
    values = finite(values);
    float x[8], top = 1e-10f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpacked(word(values, i));
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int lanes = HeadLanes<D>::COUNT / 2; lanes > 0; lanes /= 2)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    const bf16 scale = __float2bfloat16_rn(__fdiv_rn(top, 448.f));
    const float factor = __frcp_rn(__bfloat162float(scale));
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = __nv_cvt_float2_to_fp8x2({x[2 * i] * factor, x[2 * i + 1] * factor}, __NV_SATFINITE,
                                          __NV_E4M3);
    return {{pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16}, scale};
  }

  DEVICE void store(i64 row, int offset, const Eight& eight) const {
    *reinterpret_cast<uint2*>(data + row * D + offset) = eight.values;
    if (offset == 0) scales[row] = eight.scale;
  }
};
