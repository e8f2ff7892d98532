// The right operand of linear.cu from the fast AR's attention: norm, rotation, append and attention of up
// to two rows, which every CTA does for the heads that its part of K holds. It saves a launch, and what
// stands between two.
//   GROUP query heads per key/value head, KV_HEADS of a CTA, POSITIONS (1 or 2) of a stream; heads of 128.
#pragma once

#include "linear_shape.cuh"
#include "quantize.cuh"
#include "attention.cuh"

namespace {

struct RowInput {
  const bf16* qkv;      // [num_rows, H + 2 H_kv, D]
  const bf16* qk_norm;  // [H + H_kv, D] or null
  const float2* rope;   // [n, D / 2]
  bf16* memory;         // [2, capacity, H_kv, num_held, D]: keys, then values; positions start.. are written
  float eps, scale_log2;
  int start, capacity, num_held, num_kv_heads;
};

constexpr int D = 128, kLanes = HeadLanes<D>::COUNT, kHeads = GROUP + 2;  // of a row and key/value head
constexpr int kTasks = OWN_ROWS * KV_HEADS;  // (row, key/value head)
constexpr int kRounds = (kTasks * kHeads * kLanes + kConsumers - 1) / kConsumers;
static_assert(kTasks * 32 <= kConsumers && OWN_ROWS % POSITIONS == 0 && GROUP <= COLUMNS);
using FrameTile = Bf16Tile<D>;

struct Heads {
  bf16 queries[kTasks][GROUP][FrameTile::QUERY_STRIDE];
  bf16 keys[kTasks][D], values[kTasks][D];  // task: (stream, key/value head, position)
};

// A warp's queries, quantised or not, where the products read them.
DEVICE void store_operand(Accumulator<FrameTile>& acc, u8* operand, float* scales, int row, int first_head,
                          int lane) {
  acc.reduce_totals();
#pragma unroll
  for (int column = 0; column < 2; column++) {
    const int query = lane % 4 * 2 + column, head = first_head + query;
    const float inverse = 1.f / acc.total[column];
    float v[D / 64][8], top = 0;
#pragma unroll
    for (int j = 0; j < D / 64; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        v[j][i] = ::rounded(acc.sum(column, j, i) * inverse);
        top = fmaxf(top, fabsf(v[j][i]));
      }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    if (query >= GROUP) continue;
    const float factor = e4m3_factor(top);
#pragma unroll
    for (int j = 0; j < D / 64; j++) {
      const int byte = FrameTile::dimension(j, lane) * (IS_FP8 ? 1 : 2);  // of the head
      u8* block = operand + (IS_FP8 ? head : 2 * head + byte / 128) * kActBytes + row * 128;
      u8* target = block + (byte % 128 / 16 ^ row) * 16 + byte % 16;
      if (IS_FP8)
        *reinterpret_cast<uint2*>(target) =
            make_uint2(four_e4m3(v[j][0], v[j][1], v[j][2], v[j][3], factor),
                       four_e4m3(v[j][4], v[j][5], v[j][6], v[j][7], factor));
      else
        *reinterpret_cast<uint4*>(target) =
            make_uint4(packed(v[j][0], v[j][1]), packed(v[j][2], v[j][3]), packed(v[j][4], v[j][5]),
                       packed(v[j][6], v[j][7]));
    }
    if (IS_FP8 && lane / 4 == 0) scales[head * COLS + row] = 1.f / factor;
  }
}

// See linear_norm.cuh. Blocks [begin, end) are those of KV_HEADS * GROUP heads. `scratch` has room for `Heads`
// and what aligns it to 16 bytes. The first tile's CTAs write the new positions.
DEVICE void make_rows(u8* operand, float* scales, float* scratch, const RowInput& in, int begin, int,
                           int thread) {
  Heads& heads = *reinterpret_cast<Heads*>((reinterpret_cast<u64>(scratch) + 15) / 16 * 16);
  const int warp = thread / 32, lane = thread % 32;
  const int first_kv = begin / (IS_FP8 ? 1 : 2) / GROUP, num_heads = in.num_kv_heads * GROUP;
  const i64 values_offset = static_cast<i64>(in.capacity) * in.num_kv_heads * in.num_held * D;
  const auto keys_of = [&](int task) {
    const int stream = task / POSITIONS / KV_HEADS, kv_head = first_kv + task / POSITIONS % KV_HEADS;
    return in.memory + (static_cast<i64>(stream) * in.num_kv_heads + kv_head) * in.num_held * D;
  };
  FrameTile tile;
  if (warp < kTasks) {  // rows from `start` on are patched below
    const bf16* keys = keys_of(warp);
    tile.keys.load(keys, max(in.start - 1, 0), lane);
    tile.load_values(keys + values_offset, max(in.start - 1, 0), lane);
  }
  HeadTables tables[kRounds];
  int head_of[kRounds];
  const int offset = thread % kLanes * 8;
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const int at = min((round * kConsumers + thread) / kLanes, kTasks * kHeads - 1);
    const int task = at / kHeads, part = at % kHeads, kv_head = first_kv + task / POSITIONS % KV_HEADS;
    head_of[round] = part < GROUP ? kv_head * GROUP + part
                                  : num_heads + kv_head + (part == GROUP ? 0 : in.num_kv_heads);
    const bf16* weight = in.qk_norm == nullptr ? nullptr : in.qk_norm + (part > GROUP ? 0 : head_of[round]) * D;
    tables[round] = load_tables(weight, in.rope + (in.start + task % POSITIONS) * (D / 2), offset);
  }
  wait_for_previous_kernels();
  uint4 values[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const int task = min((round * kConsumers + thread) / kLanes, kTasks * kHeads - 1) / kHeads;
    const int row = task / POSITIONS / KV_HEADS * POSITIONS + task % POSITIONS;
    const int all_heads = num_heads + 2 * in.num_kv_heads;
    values[round] = *reinterpret_cast<const uint4*>(in.qkv + (row * all_heads + head_of[round]) * D + offset);
  }
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const int at = (round * kConsumers + thread) / kLanes, task = at / kHeads, part = at % kHeads;
    const uint4 turned = rotated_head<D>(values[round], tables[round], in.qk_norm != nullptr, in.eps);
    if (task >= kTasks) continue;
    if (part < GROUP) {
      *reinterpret_cast<uint4*>(&heads.queries[task][part][offset]) = turned;
      continue;
    }
    const bool is_key = part == GROUP;
    const uint4 own = is_key ? turned : values[round];
    *reinterpret_cast<uint4*>(&(is_key ? heads.keys : heads.values)[task][offset]) = own;
    if (blockIdx.x / SPLIT != 0) continue;
    bf16* target = keys_of(task) + (is_key ? 0 : values_offset) + (in.start + task % POSITIONS) * D + offset;
    *reinterpret_cast<uint4*>(target) = own;
  }
  consumers_sync();
  if (warp < kTasks) {
    const int position = in.start + warp % POSITIONS, first = warp / POSITIONS * POSITIONS;
    const int row = warp / POSITIONS / KV_HEADS * POSITIONS + warp % POSITIONS;
    tile.patch({heads.keys[first], nullptr}, {heads.values[first], nullptr}, in.start, position, lane);
    Accumulator<FrameTile> acc;
    acc.init(heads.queries[warp][lane / 4 % GROUP]);
    acc.add_keys(tile, in.scale_log2, {position, position}, lane);
    acc.add_values(tile);
    store_operand(acc, operand, scales, row, warp / POSITIONS % KV_HEADS * GROUP, lane);
  }
  fence_async_proxy();
}

}  // namespace
