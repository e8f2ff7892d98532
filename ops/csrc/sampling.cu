// One draw per row from filtered logits, by one CTA, without sorting: bounds that at least top_k logits
// reach leave few candidates, and each of those finds its rank, and the probability up to it, by
// looking at the others.
//   NUM_TOKENS (V), LOGIT (float or bf16), IS_SEMANTIC: two draws, the second for repeated tokens.
//   IS_CHAINED: sampling parameters are read before the kernel before this one has ended.
//   THREADS of a CTA: more load at once, but what a warp does once takes issue slots from the others.
#include "common.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int PER_THREAD = (NUM_TOKENS + THREADS - 1) / THREADS;
constexpr int MAX_CANDIDATES = 256, MAX_RANKS = 128;
constexpr int INDEX_BITS = 13;
constexpr int DRAWS = IS_SEMANTIC ? 2 : 1;
constexpr float MIN_TEMPERATURE = 1e-5f, RAS_TOP_P = 0.9f, LOG2_E = 1.4426950408889634f;
constexpr float NARROWER = 0.2f;  // the second bound, from the first to the best logit
static_assert(NUM_TOKENS <= 1 << INDEX_BITS && MAX_CANDIDATES <= THREADS && PER_THREAD <= 32);

struct Shared {
  // Key and weight of what reaches the first bound, and of what reaches the second.
  __align__(16) ulonglong2 wide[MAX_CANDIDATES];
  __align__(16) ulonglong2 narrow[MAX_CANDIDATES];
  float top[WARPS], low[WARPS], sum[WARPS];
  u32 counts;  // of the first list, and from bit 16 on of the second
  int round_counts[3];
  u64 kept[DRAWS][MAX_RANKS];  // keys that a draw may choose, by rank; 0: none
  int chosen[DRAWS], code[DRAWS];
  bool is_recent;
};

DEVICE float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

DEVICE u32 ordered(float value) {
  const u32 bits = __float_as_uint(value + 0.f);  // no negative zero
  return bits ^ (static_cast<i32>(bits) >> 31 | 0x80000000u);
}

// Orders like the logit, and among equal ones the lower index first.
DEVICE u64 sort_key(float logit, int idx) {
  return static_cast<u64>(ordered(logit)) << INDEX_BITS | ((1 << INDEX_BITS) - 1 - idx);
}

DEVICE float logit_of(u64 key) {
  const u32 bits = static_cast<u32>(key >> INDEX_BITS);
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

DEVICE int index_of(u64 key) {
  return (1 << INDEX_BITS) - 1 - static_cast<int>(key & ((1 << INDEX_BITS) - 1));
}

DEVICE i64 mix(i64 x) {
  return static_cast<i64>(static_cast<u64>(x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull);
}

DEVICE i64 added(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b)); }

// `reference.gumbel_noise`: a function of (seed, frame, draw, token) alone.
DEVICE i64 noise_key(i64 seed, i64 frame, i64 draw) {
  const i64 stream = mix(added(mix(added(seed, 0x9E3779B97F4A7C15ull)), frame));
  return mix(mix(added(stream, draw)));
}

DEVICE float gumbel_noise(i64 key, int token) {
  const int bits = static_cast<int>(mix(mix(added(key, token))) >> 41 & 0x7fffff);
  const float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-23f;
  return -logf(-logf(uniform));
}

// Probability over that of the best logit.
DEVICE float odds(float logit, float top) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((logit - top) * LOG2_E));
  return power;
}

// What a candidate adds to those it beats: one rank (from bit 48 on), and its odds in units of 2^-31.
// Whole numbers, so that sums do not depend on an order.
DEVICE ulonglong2 candidate_of(float logit, int idx, float top) {
  return make_ulonglong2(sort_key(logit, idx),
                         1ull << 48 | __float2uint_rn(odds(logit, top) * 0x1p31f));
}

// Lists what reaches `low`, and what reaches `narrow`, as far as there is room; counts all.
DEVICE void collect(Shared& shared, const LOGIT* logits, const float (&values)[PER_THREAD], float low,
                    float narrow, float top, int lane) {
  u32 reaches_low = 0, reaches_narrow = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    reaches_low |= values[i] >= low ? 1u << i : 0;
    reaches_narrow |= values[i] >= narrow ? 1u << i : 0;
  }
  const u32 mine = __popc(reaches_low) + __popc(reaches_narrow) * 0x10000u;
  u32 before = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const u32 below = __shfl_up_sync(~0u, before, lanes);
    if (lane >= lanes) before += below;
  }
  u32 start = 0;
  if (lane == 31) start = atomicAdd(&shared.counts, before);
  before += __shfl_sync(~0u, start, 31) - mine;
  int wide = before & 0xffff, narrower = before >> 16;
#pragma unroll 1
  for (; reaches_low != 0; reaches_low &= reaches_low - 1) {  // few: read again, to be short
    const int i = __ffs(reaches_low) - 1, idx = i * THREADS + threadIdx.x;
    const ulonglong2 candidate = candidate_of(static_cast<float>(logits[idx]), idx, top);
    if (wide < MAX_CANDIDATES) shared.wide[wide] = candidate;
    wide++;
    if (reaches_narrow >> i & 1 && narrower < MAX_CANDIDATES) shared.narrow[narrower++] = candidate;
  }
  __syncwarp();
}

// For the rare row whose bounds leave too many: finds a key that at least `num_ranks` and at most
// MAX_CANDIDATES logits reach, between one that many do and one that none does, and lists those.
// Keys differ, so there is such a key. Reads the logits again, to be short. Returns the count.
DEVICE int search(Shared& shared, const LOGIT* logits, u64 low, u64 high, float top, int num_ranks,
                  int lane) {
  for (int round = 0; high - low > 1; round++) {
    const u64 middle = low + (high - low) / 2;
    int mine = 0;
    for (int idx = threadIdx.x; idx < NUM_TOKENS; idx += THREADS)
      mine += sort_key(static_cast<float>(logits[idx]), idx) >= middle;
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) atomicAdd(&shared.round_counts[round % 3], mine);
    __syncthreads();
    const int total = shared.round_counts[round % 3];
    if (threadIdx.x == 0) shared.round_counts[(round + 2) % 3] = 0;
    if (total < num_ranks) {
      high = middle;
    } else {
      low = middle;
      if (total <= MAX_CANDIDATES) break;
    }
  }
  if (threadIdx.x == 0) shared.counts = 0;
  __syncthreads();
  for (int idx = threadIdx.x; idx < NUM_TOKENS; idx += THREADS) {
    const float logit = static_cast<float>(logits[idx]);
    if (sort_key(logit, idx) < low) continue;
    const u32 at = atomicAdd(&shared.counts, 1);
    if (at < MAX_CANDIDATES) shared.wide[at] = candidate_of(logit, idx, top);
  }
  __syncthreads();
  return min(shared.counts, MAX_CANDIDATES);
}

// Every candidate finds its rank. Ranks from num_ranks on, and those whose cumulative un-tempered
// probability exceeds a draw's top_p, are removed, the best never; the others are put into `kept`.
DEVICE void keep(Shared& shared, const ulonglong2* candidates, int num_candidates,
                 const float (&top_p)[DRAWS], int num_ranks, int warp) {
  // `parts` threads per candidate share the others.
  const int parts = num_candidates * 4 <= THREADS ? 4 : num_candidates * 2 <= THREADS ? 2 : 1;
  const int candidate = threadIdx.x / parts, part = threadIdx.x % parts;
  if (warp * 32 / parts >= num_candidates) return;
  const ulonglong2 own = candidates[min(candidate, num_candidates - 1)];
  u64 above = 0;
#pragma unroll 4
  for (int i = part; i < num_candidates; i += parts) {
    const ulonglong2 other = candidates[i];
    if (other.x > own.x) above += other.y;
  }
  __syncwarp();
  for (int lanes = 1; lanes < parts; lanes *= 2) above += __shfl_xor_sync(~0u, above, lanes);
  const int rank = static_cast<int>(above >> 48);
  if (candidate >= num_candidates || part > 0 || rank >= num_ranks) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += shared.sum[i];
  const u64 cumulative = (above + own.y) & ((1ull << 48) - 1);
  const float reached = static_cast<float>(cumulative) * 0x1p-31f / sum;
#pragma unroll
  for (int d = 0; d < DRAWS; d++)
    if (rank == 0 || reached <= top_p[d]) shared.kept[d][rank] = own.x;
}

// Draw `d` by one warp: what is kept is tempered and drawn by Gumbel noise.
//   head_tokens, head_codes: see `sample`; recent: one of the last tokens per lane, or -1.
DEVICE void draw(Shared& shared, int d, float inverse_temperature, i64 key_of_noise, int num_ranks,
                 const i32* head_tokens, const i64* head_codes, i32 recent, int lane) {
  float best = lowest();
  int best_rank = MAX_RANKS, choice = 0, code = 0;
  i32 token = -2;
  for (int rank = lane; rank < num_ranks; rank += 32) {
    const u64 key = shared.kept[d][rank];
    if (key == 0) break;
    const int idx = min(index_of(key), NUM_TOKENS - 1);
    const i32 token_here = IS_SEMANTIC ? head_tokens[idx] : 0;
    const int code_here = IS_SEMANTIC ? static_cast<int>(head_codes[idx]) : idx;
    const float score = __fadd_rn(gumbel_noise(key_of_noise, idx),
                                  __fmul_rn(logit_of(key), inverse_temperature));
    if (score > best || best_rank == MAX_RANKS)
      best = score, best_rank = rank, choice = idx, code = code_here, token = token_here;
  }
  const u32 score = best_rank < MAX_RANKS ? ordered(best) : 0;
  const u32 highest = __reduce_max_sync(~0u, score);
  const int winner = __reduce_min_sync(~0u, score == highest ? best_rank : MAX_RANKS);
  const int from = winner % 32;  // nobody has rank 128: garbage logits, lane 0
  token = __shfl_sync(~0u, token, from);
  const bool is_recent = __any_sync(~0u, recent == token);
  if (lane == from) {
    shared.chosen[d] = choice, shared.code[d] = code;
    if (d == 0) shared.is_recent = is_recent;
  }
}

DEVICE void copy_row(bf16* target, const bf16* source, int dim) {
  for (int at = threadIdx.x * 8; at < dim; at += THREADS * 8)
    *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(source + at);
}

// Rows of the table after a norm, as `BlockScaled` has them, and where the drawn ones go; or null.
struct Normed {
  const u8* table;
  const float* table_scales;
  u8* out;
  float* scales;
  int table_stride, stride;  // of scales, from a group of 128 columns to the next
};

// Threads copy_row leaves idle begin. Scales behind the last row are zeros.
DEVICE void copy_normed(const Normed& normed, int row, int code, int dim) {
  const int from_end = THREADS - 1 - threadIdx.x, groups = (dim + 127) / 128;
  for (int at = from_end * 16; at < dim; at += THREADS * 16)
    *reinterpret_cast<uint4*>(normed.out + static_cast<i64>(row) * dim + at) =
        *reinterpret_cast<const uint4*>(normed.table + static_cast<i64>(code) * dim + at);
  const int num_written = row == gridDim.x - 1 ? normed.stride - row : 1;
  for (int i = (threadIdx.x + THREADS / 3) % THREADS; i < groups * num_written; i += THREADS) {
    const int group = i / num_written, behind = i % num_written;
    normed.scales[static_cast<i64>(group) * normed.stride + row + behind] =
        behind == 0 ? normed.table_scales[static_cast<i64>(group) * normed.table_stride + code] : 0.f;
  }
}

// Grid: (B). Parameters are by slot [N], `slots` and `choice` i64 [B], logits [B, V].
//   num_ranks_limit: as if top_k were no more. codes i32 [B, num_codebooks], written at `codebook`.
//   Semantic: window i32 [N, window_len] (at most 32), head_tokens i32 [V], head_codes i64 [V], is_end
//   bool [B]; x [2 B, dim] gets the hidden state and the code's embedding.
//   Else these are null, and x [B, dim] gets the code's embedding, and `normed` that after a norm.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(const LOGIT* logits, const i64* slots, const float* temperature, const float* top_p,
           const i32* top_k, const i64* seed, const i32* frame_idx, const i32* window,
           const i32* head_tokens, const i64* head_codes, i64* choice, bool* is_end, const bf16* hidden,
           i32* codes, const bf16* table, bf16* x, Normed normed, int num_ranks_limit, int window_len,
           int codebook, int num_codebooks, int dim) {
  __shared__ Shared shared;
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 3) shared.counts = shared.round_counts[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < DRAWS * MAX_RANKS; i += THREADS) shared.kept[i / MAX_RANKS][i % MAX_RANKS] = 0;
  if (!IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const i64 slot = slots[row];
  const float temperature_of = temperature[slot];
  const int limit = min(min(num_ranks_limit, MAX_RANKS), NUM_TOKENS);
  const int num_ranks = temperature_of > 0 ? max(min(top_k[slot], limit), 1) : 1;
  float tops[DRAWS] = {top_p[slot]};
  if (IS_SEMANTIC) tops[DRAWS - 1] = RAS_TOP_P;
  const int first_draw = IS_SEMANTIC ? 0 : codebook + 1;  // its number in the noise
  const i64 key_of_noise = noise_key(seed[slot], frame_idx[slot], first_draw + min(warp, DRAWS - 1));
  const float inverse_temperature = warp == 0 ? 1.f / fmaxf(temperature_of, MIN_TEMPERATURE) : 1.f;
  const i32 recent = IS_SEMANTIC && lane < window_len ? window[slot * window_len + lane] : -1;
  if (IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();

  const LOGIT* of_row = logits + static_cast<i64>(row) * NUM_TOKENS;
  float values[PER_THREAD], low = lowest();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int idx = i * THREADS + threadIdx.x;
    values[i] = idx < NUM_TOKENS ? static_cast<float>(of_row[idx]) : __uint_as_float(0x7fffffff);  // NaN
    low = fmaxf(low, values[i]);
  }
  // `low`: the smallest of num_ranks or more largest logits of disjoint groups; `top`: the largest.
  float top = low;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    if (THREADS / (2 * lanes) >= num_ranks) low = top;
  }
  low = -warp_max(-low);
  if (lane == 0) shared.top[warp] = top, shared.low[warp] = low;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) top = fmaxf(top, shared.top[i]), low = fminf(low, shared.low[i]);

  collect(shared, of_row, values, low, low + NARROWER * (top - low), top, lane);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) sum += values[i] >= lowest() ? odds(values[i], top) : 0.f;
  sum = warp_sum(sum);
  if (lane == 0) shared.sum[warp] = sum;
  __syncthreads();
  const ulonglong2* candidates = shared.narrow;
  int num_candidates = shared.counts >> 16;
  if (num_candidates < num_ranks || num_candidates > MAX_CANDIDATES) {
    candidates = shared.wide;
    num_candidates = shared.counts & 0xffff;
    if (num_candidates > MAX_CANDIDATES)
      num_candidates = search(shared, of_row, sort_key(low, (1 << INDEX_BITS) - 1),
                              sort_key(top, 0) + 1, top, num_ranks, lane);
  }
  keep(shared, candidates, num_candidates, tops, num_ranks, warp);
  __syncthreads();
  if (warp < DRAWS)
    draw(shared, warp, inverse_temperature, key_of_noise, num_ranks, head_tokens, head_codes, recent, lane);
  __syncthreads();
  const int taken_draw =
      IS_SEMANTIC && shared.is_recent && shared.chosen[0] < NUM_TOKENS - 1 ? DRAWS - 1 : 0;
  const int taken = shared.chosen[taken_draw], code = shared.code[taken_draw];
  if (threadIdx.x == 0) {
    if (IS_SEMANTIC) choice[row] = taken, is_end[row] = taken == NUM_TOKENS - 1;
    codes[row * num_codebooks + codebook] = code;
  }
  const i64 target = IS_SEMANTIC ? 2ll * row + 1 : row;
  copy_row(x + target * dim, table + static_cast<i64>(code) * dim, dim);
  if (!IS_SEMANTIC && normed.table != nullptr) copy_normed(normed, row, code, dim);
  if (IS_SEMANTIC) copy_row(x + 2ll * row * dim, hidden + static_cast<i64>(row) * dim, dim);
}
