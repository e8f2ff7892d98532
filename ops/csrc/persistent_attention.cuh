// Attention inside persistent.cu: a CTA takes a split of the positions of one row and key/value head.
#pragma once

#include "attention.cuh"
#include "persistent_shape.cuh"

namespace {

constexpr int D = HEAD_DIM;
using Tile = Bf16Tile<D>;
constexpr int kNew = IS_FAST ? 2 : 1;  // most positions of a row that are not in memory yet
constexpr int kParts = GROUP + 2 * kNew;  // heads to norm and rotate: queries, then keys and values
constexpr int kTileWarps = kWarps < 8 ? kWarps : 8;  // that take tiles
constexpr int kTilesPerSplit = 4;  // more CTAs share a row than warps ask for: each has less to fetch
static_assert(GROUP <= COLUMNS && kParts * (D / 8) <= kConsumers);

// In the place of the right operand, which is not in use.
struct Meeting {
  bf16 queries[GROUP][Tile::QUERY_STRIDE];
  bf16 keys[kNew][D], values[kNew][D];
  float sums[kTileWarps][GROUP][D];
  float2 states[kTileWarps][GROUP];  // largest score, sum of weights
};

DEVICE i64 values_offset(const Stack& s) {
  return static_cast<i64>(s.num_kv_heads) * D * (IS_FAST ? static_cast<i64>(s.capacity) * s.num_held : PAGE);
}

// What this CTA has to do in every layer: a row, a key/value head and a part of the positions. Where
// they lie in a layer's memory is the same in all.
struct Task {
  int row, head, split, splits;
  int position, tiles;  // the row's, and how many tiles of 16 there are up to it
  int idx;              // of the row among the new positions of its stream
  i64 first_keys, own_keys;  // of this warp's first tile, and of the row's own position

  DEVICE Task(const Stack& s, int warp) {
    const int pairs = s.num_rows * s.num_kv_heads, pair = blockIdx.x % pairs;
    split = blockIdx.x / pairs;
    row = pair / s.num_kv_heads, head = pair % s.num_kv_heads;
    idx = IS_FAST ? row % s.num_positions : 0;
    position = IS_FAST ? s.start + idx : static_cast<int>(__ldcg(s.positions + row));
    tiles = position / TILE + 1;
    splits = min(s.max_splits, (tiles + kTilesPerSplit - 1) / kTilesPerSplit);
    first_keys = exists() && first_tile(warp) < tiles ? keys_at(s, first_tile(warp)) : 0;
    own_keys = exists() ? keys_at(s, last_tile()) + position % TILE * D : 0;
  }
  DEVICE bool exists() const { return split < splits; }
  DEVICE int first_tile(int warp) const { return warp < kTileWarps ? split + warp * splits : tiles; }
  DEVICE int stride() const { return splits * kTileWarps; }
  DEVICE int last_tile() const { return tiles - 1; }
  DEVICE bool is_owner() const { return last_tile() % splits == split; }  // of the last tile
  DEVICE int pair(const Stack& s) const { return row * s.num_kv_heads + head; }

  // Row 0 of the keys of a tile.
  DEVICE i64 keys_at(const Stack& s, int tile) const {
    if (IS_FAST)
      return (static_cast<i64>(row / s.num_positions) * s.num_kv_heads + head) * s.num_held * D;
    const int first = tile * TILE;
    const i64 page = __ldcg(s.page_table + __ldcg(s.slots + row) * s.max_pages + first / PAGE);
    return ((page * 2 * s.num_kv_heads + head) * PAGE + first % PAGE) * D;
  }
};

// Norms and rotates the queries, and the keys of the new positions up to the row's own.
DEVICE void project(Meeting& meeting, const Stack& s, const Task& task, const HeadTables& tables,
                    int part, int offset, bf16* own_keys, u32 epoch) {
  const int at = part < GROUP ? task.idx : min((part - GROUP) / 2, task.idx);
  const bool is_value = part >= GROUP && (part - GROUP) % 2 == 1;
  const int head = part < GROUP ? task.head * GROUP + part
                                : s.num_heads + (is_value ? s.num_kv_heads : 0) + task.head;
  const i64 from = static_cast<i64>(task.row - task.idx + at) * (s.num_heads + 2 * s.num_kv_heads) + head;
  TwoWords words[2];
  wait_for_words(words, [&](int i) { return s.qkv + (from * D + offset) / 2 + 2 * i; }, epoch);
  const Bf16x8 loaded = values_of(words[0], words[1]);
  const uint4 values = *reinterpret_cast<const uint4*>(&loaded);
  const uint4 rotated = rotated_head<D>(values, tables, true, s.eps);
  if (part < GROUP) {
    *reinterpret_cast<uint4*>(&meeting.queries[part][offset]) = rotated;
    return;
  }
  if ((part - GROUP) / 2 > task.idx) return;
  const uint4 result = is_value ? values : rotated;
  *reinterpret_cast<uint4*>(&(is_value ? meeting.values : meeting.keys)[at][offset]) = result;
  if (at == task.idx && own_keys != nullptr)
    *reinterpret_cast<uint4*>(own_keys + (is_value ? values_offset(s) : 0) + offset) = result;
}

// Two neighbouring values of a query over `ways` partial results.
struct Merged {
  float2 sum = {0.f, 0.f};
  float best = LOWEST, total = 0.f;

  DEVICE void scale_to(float top) {
    const float factor = exp2f(best - top);
    sum.x *= factor, sum.y *= factor, total *= factor;
    best = top;
  }
  DEVICE void add(float2 part, float2 state) {
    if (state.x > best) scale_to(state.x);
    const float weight = exp2f(state.x - best);
    sum.x += part.x * weight, sum.y += part.y * weight, total += state.y * weight;
  }
};

DEVICE void store_attended(const Stack& s, const Task& task, const Merged& merged, int query, int column,
                           u32 epoch) {
  const i64 at = static_cast<i64>(task.row) * s.head_columns() + (task.head * GROUP + query) * D + column;
  const float inverse = 1.f / merged.total;
  store_word(s.attended + at / 2,
             word_of(packed(merged.sum.x * inverse, merged.sum.y * inverse), epoch));
}

DEVICE float2 floats_of(const TwoWords& words) {
  return {__uint_as_float(static_cast<u32>(words.first)), __uint_as_float(static_cast<u32>(words.second))};
}

DEVICE void store_floats(Word* at, float first, float second, u32 epoch) {
  store_word(at, word_of(__float_as_uint(first), epoch));
  store_word(at + 1, word_of(__float_as_uint(second), epoch));
}

// Merges what the warps of this CTA have; the CTA of the first split then what the others have sent.
DEVICE void meet(const Meeting& meeting, const Stack& s, const Task& task, int pair, u32 epoch) {
  constexpr int kAtOnce = 4;
  const int ways = min((task.tiles - task.split + task.splits - 1) / task.splits, kTileWarps);
  for (int at = threadIdx.x * 2; at < GROUP * D; at += kConsumers * 2) {
    const int query = at / D, column = at % D;
    Merged merged;
    for (int warp = 0; warp < ways; ++warp)
      merged.add(*reinterpret_cast<const float2*>(&meeting.sums[warp][query][column]),
                 meeting.states[warp][query]);
    const auto place_of = [&](int split) {
      return s.parts + ((static_cast<i64>(pair) * s.max_splits + split) * GROUP + query) * (D + 2);
    };
    if (task.split > 0) {
      Word* place = place_of(task.split);
      store_floats(place + column, merged.sum.x, merged.sum.y, epoch);
      if (column == 0) store_floats(place + D, merged.best, merged.total, epoch);
      continue;
    }
    for (int first = 1; first < task.splits; first += kAtOnce) {
      TwoWords words[2 * kAtOnce];
      wait_for_words(
          words,
          [&](int i) {
            const int split = first + i / 2;
            return split < task.splits ? place_of(split) + (i % 2 == 0 ? column : D) : nullptr;
          },
          epoch);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < task.splits) merged.add(floats_of(words[2 * i]), floats_of(words[2 * i + 1]));
    }
    store_attended(s, task, merged, query, column, epoch);
  }
}

// What a thread needs to norm and rotate its values of one of the heads.
struct Part {
  int index, offset, position;  // of the head among kParts, of the values in it, of the row it is from
  bool is_any;

  DEVICE Part(const Stack& s, const Task& task, int warp) {
    index = threadIdx.x / (D / 8), offset = threadIdx.x % (D / 8) * 8;
    is_any = task.exists() && warp * 32 / (D / 8) < kParts;
    const int at = index < GROUP ? task.idx : min((index - GROUP) / 2, task.idx);
    position = task.position - task.idx + at;
  }
  DEVICE HeadTables tables(const Stack& s, const Task& task, const bf16* qk_norm) const {
    const int head = index < GROUP ? task.head * GROUP + index : s.num_heads + task.head;
    return load_tables(qk_norm + head * D, s.rope + static_cast<i64>(position) * (D / 2), offset);
  }
};

// Asks for what `attend` will read in another layer first, to be in the L2.
DEVICE void prefetch(const Stack& s, const Task& task, const bf16* memory, int warp, int lane) {
  if (IS_FAST || task.first_tile(warp) >= task.tiles) return;
  const bf16* keys = memory + task.first_keys;
#pragma unroll
  for (int line = lane; line < TILE * D * 2 / 128; line += 32) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + line * 64));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + values_offset(s) + line * 64));
  }
}

// The last row of a tile that is in memory, or will be when it is read.
DEVICE int last_row_of(const Stack& s, const Task& task, int tile) {
  return IS_FAST ? max(s.start - 1, 0) : task.position - tile * TILE;
}

// What is in memory of the past is on its way before the words of the epoch are looked for.
DEVICE void attend(Meeting& meeting, const Stack& s, const Task& task, const Part& part, bf16* memory,
                   const bf16* qk_norm, u32 epoch, int warp, int lane) {
  Tile tile;
  int at = task.first_tile(warp);
  const bool has_tile = at < task.tiles;
  if (has_tile) {
    tile.load_keys(memory + task.first_keys, last_row_of(s, task, at), lane);
  }
  HeadTables tables;
  if (part.is_any) tables = part.tables(s, task, qk_norm);
  mark(s, 100);
  if (part.is_any)
    project(meeting, s, task, tables, part.index, part.offset,
            task.is_owner() ? memory + task.own_keys : nullptr, epoch);
  mark(s, 101);
  consumers_sync();
  mark(s, 102);
  Accumulator<Tile> acc;
  acc.init(meeting.queries[lane / 4 % GROUP]);
  const bf16* keys = memory + task.first_keys;
#pragma unroll 1
  while (at < task.tiles) {
    const int last_row = task.position - at * TILE;
    tile.load_values(keys + values_offset(s), last_row_of(s, task, at), lane);
    if (at == task.last_tile())
      tile.patch({meeting.keys[0], nullptr}, {meeting.values[0], nullptr},
                 task.position % TILE - task.idx, task.position % TILE, lane);
    acc.add_keys(tile, s.scale_log2, {last_row, last_row}, lane);
    acc.add_values(tile);
    at += task.stride();
    if (at >= task.tiles) break;
    keys = memory + task.keys_at(s, at);
    tile.load_keys(keys, last_row_of(s, task, at), lane);
  }
  mark(s, 103);
  if (has_tile)
    acc.store(lane, [](int query) { return query < GROUP; },
              [&](int query) {
                return make_uint2(shared_address(meeting.sums[warp][query]),
                                  shared_address(&meeting.states[warp][query]));
              });
  consumers_sync();
  meet(meeting, s, task, task.pair(s), epoch);
  mark(s, 105);
  consumers_sync();  // the operand takes the place of what was read here
}

}  // namespace
