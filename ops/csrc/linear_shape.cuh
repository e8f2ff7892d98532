// Sizes of one variant of linear.cu, from its defines.
#pragma once

#include "linear_common.cuh"

namespace {

constexpr int kRows = 64 * WARPGROUPS;  // of the weight, per CTA
constexpr int kConsumers = 128 * WARPGROUPS;
constexpr int kThreads = kConsumers + 32;
constexpr int kWeightBytes = kTileBytes * WARPGROUPS;
constexpr int kActBytes = COLS * 128;
constexpr int kStageBytes = kWeightBytes + (OWN_ROWS ? 0 : kActBytes);
constexpr int kFeatures = 32 * WARPGROUPS;  // of SwiGLU, per CTA
constexpr int kCluster = kQuantises ? 128 / kFeatures : SPLIT;
constexpr int kExchangeBytes = 4 * (kQuantises ? 17 * COLS : SPLIT > 1 ? kRows * COLS : 0);
// A large exchange lies in the ring, when all CTAs are done with theirs; behind the tile that is stored.
constexpr bool kExchangesInRing = kExchangeBytes > 8192;
constexpr int kExchangeOffset = kExchangesInRing && kQuantises ? 16384 : 0;
constexpr int kUnits = COLS / 8;            // 8 x 8 fragments in 8 rows
constexpr int kGroups = kRows / 8 / SPLIT;  // 8-row groups that a CTA of the cluster finishes

static_assert(!GATE_UP || SPLIT == 1, "SwiGLU needs whole sums");
static_assert(kRows / 8 % SPLIT == 0, "every rank finishes as many rows");
static_assert(!kExchangesInRing ||
                  kExchangeOffset + kExchangeBytes <= STAGES * kStageBytes,
              "the ring is too short");
// Blocks of K multiplied before their sums are taken. More would hide more of a product's latency, but
// their stages are refilled only then: a layer of one row 35.6 us with 2, 36.8 with 4 (H200).
constexpr int kBatch = STAGES < 4 ? 1 : 2;

// K tiles of weights under way at once, and tiles behind the ring that are asked into the L2 at the start.
// Where a CTA makes its rows of x itself (OWN_ROWS), it waits for what they are made of, and that comes late
// where more is under way: a layer of one row in 8 bits 32.6 us, with none behind the ring 34.0, with 3 33.3,
// with all of the ring under way 33.8; in bf16 59.7, with all of it 58.6. Of more rows, two tiles behind the
// ring: a frame of 16 streams in 8 bits 3.037 -> 3.019 ms, with four 3.056 (H200).
constexpr int kWindow = OWN_ROWS && IS_FP8 && STAGES > 3 ? 3 : STAGES;
constexpr int kAhead = OWN_ROWS ? 1 : IS_FP8 ? 2 : 0;

static_assert(OWN_ROWS <= COLS && COLS % 8 == 0, "rows to normalise");

// The CTAs of a cluster tell each other that their barriers are there, before all else.
constexpr bool kArrivesEarly = kCluster > 1 && !kExchangesInRing;

// The producer's warp has initialised the barriers, the consumers have written what their products read.
DEVICE void barriers_are_there() { asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory"); }
DEVICE void wait_for_barriers() { asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); }

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

}  // namespace
