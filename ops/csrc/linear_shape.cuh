// Sizes of one variant of linear.cu, from its defines.
#pragma once

#include "wgmma.cuh"

namespace {

constexpr int kTileBytes = 8192;
constexpr int kRows = 64 * WARPGROUPS;  // of the weight, per CTA
constexpr int kConsumers = 128 * WARPGROUPS;
constexpr int kThreads = kConsumers + 32;
constexpr int kWeightBytes = kTileBytes * WARPGROUPS;
constexpr int kActBytes = COLS * 128;
constexpr bool kIsResident = NORM || DIRECT;  // all of the CTA's part of x at once
constexpr int kStageBytes = kWeightBytes + (kIsResident ? 0 : kActBytes);
constexpr int kFeatures = 32 * WARPGROUPS;  // of SwiGLU, per CTA
constexpr bool kQuantises = GATE_UP && IS_FP8;
constexpr int kCluster = (kQuantises ? 128 / kFeatures : SHARE) * SPLIT;
constexpr int kExchangeBytes = 4 * (kQuantises ? 17 * COLS : SPLIT > 1 ? kRows * COLS : 0);
constexpr bool kExchangesInRing = kExchangeBytes > 16384;
constexpr int kUnits = COLS / 8;            // 8 x 8 fragments in 8 rows
constexpr int kGroups = kRows / 8 / SPLIT;  // 8-row groups that a CTA of the cluster finishes

static_assert(!GATE_UP || SPLIT == 1, "SwiGLU needs whole sums");
static_assert(kRows / 8 % SPLIT == 0, "every rank finishes as many rows");
static_assert(!kExchangesInRing || kExchangeBytes <= STAGES * kStageBytes, "the ring is too short");
constexpr int kPart = COLS > 64 && IS_FP8 ? 64 : COLS;  // columns summed apart, for want of registers
// Blocks of K multiplied before their sums are taken: hides the latency where a block is little work.
constexpr int kBatch = STAGES < 4 ? 1 : COLS <= 8 ? 4 : COLS <= 32 ? 2 : 1;

static_assert(SHARE == 1 || (!kIsResident && COLS / SHARE % 8 == 0), "whole 8-row groups are fetched");
static_assert(SHARE == 1 || !kQuantises || SHARE == kCluster, "who quantises together, shares");
static_assert(SHARE == 1 || !GATE_UP || kQuantises, "bf16 gate and up have no cluster");
static_assert(kBatch <= STAGES, "a batch waits for all its stages");
static_assert(NORM <= COLS && COLS % 8 == 0, "rows to normalise");

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

}  // namespace
