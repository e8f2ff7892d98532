// All layers of a stack for few rows in one launch of one CTA per SM.
//
// Every CTA owns rows of every matrix. Its copy warp streams their weights, layer after layer, through
// a ring of shared memory and waits for nothing but room there: memory is busy while the CTAs wait for
// each other. That they do once per phase (queries/keys/values, attention, output, gate and up, down), by
// looking at the values that they need until these bear the number of the layer: no flag, no fence and
// no second trip to memory, and nothing to reset. A buffer is written again a layer later, and on the way
// there every CTA has needed something from every other that comes after its last look.
//
// All CTAs must be resident at once, and no other launch of this kind may run at the same time.
//
// Defines: IS_FP8, ROWS (2, 4, 8: most rows of x), WARPGROUPS (consumers), STAGES, OPERAND_BYTES, NORM_ITEMS (8 values each of a row that a thread
// normalises), HEAD_DIM, GROUP (query heads per key/value head), PAGE, IS_FAST (short memory of the fast
// AR in place of pages), MOST_ASKED (missing words that a waiting thread asks for at once), SPIN_LIMIT (not 0: a wait of so many looks is an error).

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "persistent.cu is for sm_90a"
#endif

#include "persistent_attention.cuh"
#include "persistent_linear.cuh"
#include "persistent_rows.cuh"

static_assert(sizeof(Meeting) <= OPERAND_BYTES, "attention meets where the operand lies");

namespace {

DEVICE int pick(const int (&values)[kPhases], int phase) {
  int value = values[0];
#pragma unroll
  for (int i = 1; i < kPhases; ++i) value = phase == i ? values[i] : value;
  return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) persistent(const __grid_constant__ Stack s) {
  extern __shared__ __align__(1024) u8 ring[];
  u8* operand = ring + kStages * kStageBytes;
  float* row_scales = reinterpret_cast<float*>(operand + OPERAND_BYTES);
  float2* tile_scales = reinterpret_cast<float2*>(row_scales + (IS_FP8 ? OPERAND_BYTES / 128 : 0));
  float* partial = reinterpret_cast<float*>(tile_scales + (IS_FP8 ? kStages * kTilesPerStage : 0));
  float* sums = partial + 2 * kWarps * ROWS * kUnitRows;
  u64* barriers = reinterpret_cast<u64*>(sums + ROWS * kWarps);
  const bf16** layers = reinterpret_cast<const bf16**>(barriers + 2 * kStages);
  const Shared shared = {layers, operand, row_scales, tile_scales, partial, sums, shared_address(ring),
                         shared_address(barriers), shared_address(barriers + kStages)};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  let_next_kernel_start();
  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full + stage * 8, 1);
      barrier_init(shared.empty + stage * 8, 4);  // the warps of one warpgroup
    }
    barrier_init_fence();
    fence_async_proxy();
  }
  for (int i = threadIdx.x; i < s.num_layers * kSharedPointers; i += kThreads)
    layers[i] = reinterpret_cast<const bf16* const*>(
        s.layers + i / kSharedPointers)[kLayerPointers - kSharedPointers + i % kSharedPointers];
  int begins[kPhases], ends[kPhases];
#pragma unroll
  for (int phase = 0; phase < kPhases; ++phase) {
    const i32* begin = s.begins + phase * (gridDim.x + 1) + blockIdx.x;
    begins[phase] = begin[0], ends[phase] = begin[1];
  }
  __syncthreads();
  if (warp >= kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp < kWarps + WARPGROUPS && lane == 0) produce(shared, s, warp - kWarps);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
  wait_for_previous_kernels();
#if TRACE
  if (threadIdx.x == 0) trace_length = 0;
#endif
  const Task task(s, warp);
  const Part part(s, task, warp);
  u32 epoch = __ldcg(s.epochs + blockIdx.x);
  Stage stage(warp / 4);
  for (int layer = 0; layer < s.num_layers; ++layer) {
    const bf16* const* pointers = layers + layer * kSharedPointers;
    const bf16* x = layer == 0 ? s.x : nullptr;
    const u32 before = epoch++;
#pragma unroll 1  // the code of all phases at once does not stay in the cache
    for (int phase = 0; phase < kHead; ++phase) {
      const int begin = pick(begins, phase), end = pick(ends, phase);
      if (phase == kDown && layer + 1 < s.num_layers)
        prefetch(s, task, pointers[kSharedPointers + 3], warp, lane);
      Residual residual = {nullptr, nullptr, 0};
      if (phase == kWo) residual = {x, layer == 0 ? nullptr : s.last, before};
      if (phase == kDown) residual = {nullptr, s.middle, epoch};
      if (begin < end) {
        if (phase == kQkv || phase == kGateUp)
          stage_normed_rows<IS_FP8>(shared, s, pointers[phase == kQkv ? 0 : 1], phase == kQkv ? x : nullptr,
                                    phase == kQkv ? s.last : s.middle, phase == kQkv ? before : epoch,
                                    nullptr);
        else
          stage_rows(shared, s, phase == kWo ? s.attended : s.hidden, s.depth(phase), epoch);
        mark(s, phase * 2);
        Word* out = phase == kQkv ? s.qkv : phase == kWo ? s.middle : phase == kGateUp ? s.hidden : s.last;
        run_units<IS_FP8>(shared, s, phase, begin, end, residual, out, epoch, stage, warp, lane);
        mark(s, phase * 2 + 1);
        consumers_sync();  // nobody reads the operand or the partial sums any more
      }
      if (phase == kQkv && task.exists()) {
        attend(*reinterpret_cast<Meeting*>(operand), s, task, part, const_cast<bf16*>(pointers[3]), pointers[2],
               epoch, warp, lane);
      }
    }
  }
  if (threadIdx.x == 0) s.epochs[blockIdx.x] = epoch;
  if (begins[kHead] == ends[kHead]) return;
  stage_normed_rows<false>(shared, s, s.norm, nullptr, s.last, epoch, blockIdx.x == 0 ? s.normed : nullptr);
  run_units<false>(shared, s, kHead, begins[kHead], ends[kHead], {nullptr, nullptr, 0}, nullptr, epoch, stage,
                   warp, lane);
}
