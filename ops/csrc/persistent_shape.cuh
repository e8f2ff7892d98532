// What the parts of persistent.cu share: sizes, the launch's argument, shared memory, counters.
#pragma once

#include "quantize.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kWarps = 4 * WARPGROUPS, kConsumers = 32 * kWarps;
constexpr int kThreads = kConsumers + 128;  // a warpgroup of its own for the copies: registers are dealt to those
constexpr int kStages = WARPGROUPS * STAGES;  // every warpgroup has a ring of its own
constexpr int kConsumerRegisters = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 152 : 104;
constexpr int kUnitRows = 16;      // of a weight: a quarter of a tile, 2048 contiguous bytes of it
constexpr int kSliceBytes = 2048;
constexpr int kTileBytes = 8192, kTilesPerStage = 4;
constexpr int kStageBytes = kTilesPerStage * kSliceBytes;
constexpr int kColumns = kTilesPerStage * ROWS;  // of the right operand: 4 K tiles of every row
constexpr int kGroupBytes = kColumns * 128;
template <bool kFp8>
constexpr int kPerTile = kFp8 ? 128 : 64;  // values of K
static_assert(ROWS == 2 || ROWS == 4 || ROWS == 8, "rows of a launch");

enum Phase { kQkv, kWo, kGateUp, kDown, kHead, kPhases };  // the head after the last layer

struct Layer {
  const u8* tiles[kHead];      // [N / 64, groups * 4, 8192]
  const float* scales[kHead];  // [N / 64, groups * 4, 2] of e4m3, else null
  const bf16 *attention_norm, *ffn_norm;  // [dim]
  const bf16* qk_norm;                    // [H + H_kv, D] or null
  bf16* memory;  // pages [P, 2, H_kv, PAGE, D]; of the fast AR [2, capacity, H_kv, num_held, D]
};

// Two neighbouring values of bf16, or one of fp32, and the epoch in which they were written, which is
// the layer, counted through all launches. A word is written and read whole, so who finds the epoch of
// its own layer has the values: nothing else orders what CTAs hand each other.
using Word = u64;

// One launch.
struct Stack {
  const Layer* layers;
  const i32* begins;  // [kPhases][gridDim.x + 1]: a CTA's units of 16 rows
  const bf16* x;      // [num_rows, dim]
  const bf16* norm;   // [dim], before the head
  const u8* head;     // of bf16, as `tiles`
  bf16* normed;       // [num_rows, dim], what the head reads, or null
  bf16* logits;       // [num_rows / num_positions, num_logits] of every stream's last position
  // What phases leave: [num_rows, features / 2]; x after attention, and after the layer.
  Word *qkv, *attended, *middle, *hidden, *last;
  Word* parts;        // of attention: [pairs of row and key/value head][max_splits][GROUP][D + 2]
  u32* epochs;        // [gridDim.x]: the last one before this launch, for every CTA its own
  const float2* rope;  // [positions, D / 2]
  const i32* page_table;  // [num_slots + 1, max_pages]
  const i64 *slots, *positions;  // [num_rows]
  int num_layers, num_rows, dim, ffn, num_heads, num_kv_heads, num_logits, max_splits, max_pages;
  int start, num_positions, capacity, num_held;  // of the fast AR
  float eps, scale_log2;

  DEVICE int head_columns() const { return num_heads * HEAD_DIM; }
  DEVICE int depth(int phase) const {
    return phase == kWo ? head_columns() : phase == kDown ? ffn : dim;
  }
  DEVICE int features(int phase) const {
    return phase == kQkv      ? (num_heads + 2 * num_kv_heads) * HEAD_DIM
           : phase == kGateUp ? 2 * ffn
           : phase == kHead   ? num_logits
                              : dim;
  }
  DEVICE bool is_fp8(int phase) const { return IS_FP8 && phase != kHead; }
  DEVICE int groups(int phase) const {
    return depth(phase) / (kTilesPerStage * (is_fp8(phase) ? kPerTile<true> : kPerTile<false>));
  }
};

struct Shared {
  const bf16** layers;  // [num_layers][4]: the last four pointers of `Layer`
  u8* operand;        // [groups][kColumns rows of 128 bytes, swizzled]
  float* row_scales;  // [K tiles][ROWS]
  float2* tile_scales;  // [kStages][kTilesPerStage]: of rows 0..7 and of rows 8..15
  float* partial;       // [2][kWarps][ROWS][16]
  float* sums;          // [ROWS][kWarps]
  u32 ring, full, empty;
};

constexpr int kLayerPointers = sizeof(Layer) / 8, kSharedPointers = 4;

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

DEVICE Word word_of(u32 values, u32 epoch) { return static_cast<u64>(epoch) << 32 | values; }

DEVICE void store_word(Word* at, Word word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

struct TwoWords {
  Word first, second;

  DEVICE bool is_of(u32 epoch) const { return first >> 32 == epoch && second >> 32 == epoch; }
};

DEVICE TwoWords load_two_words(const Word* at) {
  TwoWords words;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(at)
               : "memory");
  return words;
}

// Pairs of words once all are of the epoch; `at(i)`: where, null: nowhere. While many are missing it asks
// for one of them only, so that those who wait leave the memory to the weights.
template <int N, typename At>
DEVICE void wait_for_words(TwoWords (&out)[N], At at, u32 epoch) {
  u32 missing = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (at(i) != nullptr) missing |= 1u << i;
  u32 asked = missing;
  for (int looks = 0; missing != 0; ++looks) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (asked >> i & 1) out[i] = load_two_words(at(i));
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (SKIP_WAITS || out[i].is_of(epoch)) found |= asked & 1u << i;
    missing &= ~found;
    asked = found != 0 || __popc(missing) <= MOST_ASKED ? missing : missing & -missing;
    if (SPIN_LIMIT > 0 && looks > SPIN_LIMIT) __trap();
  }
}

DEVICE Bf16x8 values_of(const TwoWords& low, const TwoWords& high) {
  const uint4 v = {static_cast<u32>(low.first), static_cast<u32>(low.second),
                   static_cast<u32>(high.first), static_cast<u32>(high.second)};
  return *reinterpret_cast<const Bf16x8*>(&v);
}

#if TRACE
__shared__ int trace_length;
DEVICE void mark(const Stack& s, u64 code) {
  if (threadIdx.x != 0) return;
  u64* out = reinterpret_cast<u64*>(s.epochs + 132) + blockIdx.x * 256 + trace_length % 256;
  *out = code << 56 | (clock64() & 0xffffffffffffffull);
  ++trace_length;
}
#else
#define mark(...)
#endif

}  // namespace
