// One draw per row from filtered logits, by one CTA, without sorting: a bound that at least top_k logits
// reach leaves few candidates, and each of those finds its rank, and the probability up to it, by
// looking at the others.
//   NUM_TOKENS (V), LOGIT (float or bf16), IS_SEMANTIC: two draws, the second for repeated tokens.
//   IS_CHAINED: sampling parameters are read before the kernel before this one has ended.
#include "common.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int PER_THREAD = (NUM_TOKENS + THREADS - 1) / THREADS;
constexpr int MAX_CANDIDATES = 256, MAX_RANKS = 128;
constexpr int INDEX_BITS = 13;
constexpr int DRAWS = IS_SEMANTIC ? 2 : 1;
constexpr float MIN_TEMPERATURE = 1e-5f, RAS_TOP_P = 0.9f;
static_assert(NUM_TOKENS <= 1 << INDEX_BITS && MAX_CANDIDATES * 2 <= THREADS && WARPS <= 32);

struct Shared {
  float top[WARPS], low[WARPS], sum[WARPS];
  int count[3];
  __align__(16) ulonglong2 candidates[MAX_CANDIDATES];  // key, weight
  u64 winners[DRAWS][WARPS];
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
  const u32 ordered = static_cast<u32>(key >> INDEX_BITS);
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
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
  const i64 bits = mix(mix(added(key, token))) >> 41 & 0x7fffff;
  const float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-23f;
  return -logf(-logf(uniform));
}

// Threads of the block that count, over all rounds of a loop: `round` 0, 1, 2, ...
DEVICE int block_count(Shared& shared, int mine, int round, int lane) {
  const int of_warp = __reduce_add_sync(~0u, mine);
  if (lane == 0) atomicAdd(&shared.count[round % 3], of_warp);
  __syncthreads();
  const int total = shared.count[round % 3];
  if (threadIdx.x == 0) shared.count[(round + 2) % 3] = 0;
  return total;
}

// A key that at least `num_ranks` and at most MAX_CANDIDATES keys reach, given one that too many do and
// one that too few do. Keys differ, so there is one; only among NaN, which beat every bound, the search
// may end without it.
DEVICE u64 raised_bound(Shared& shared, const u64 (&keys)[PER_THREAD], u64 low, u64 high, int num_ranks,
                        int lane) {
  if (threadIdx.x < 3) shared.count[threadIdx.x] = 0;
  __syncthreads();
  for (int round = 0; high - low > 1; round++) {
    const u64 middle = low + (high - low) / 2;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) mine += keys[i] >= middle;
    const int total = block_count(shared, mine, round, lane);
    if (total < num_ranks) {
      high = middle;
    } else {
      low = middle;
      if (total <= MAX_CANDIDATES) break;
    }
  }
  return low;
}

// What a candidate adds to those it beats: one rank (from bit 48 on), and its probability over that of
// the best logit, in units of 2^-31. Whole numbers, so that sums do not depend on an order.
DEVICE u64 weight_of(float logit, float top) {
  return 1ull << 48 | __float2uint_rn(expf(logit - top) * 0x1p31f);
}

// Appends what reaches `bound` to the candidates, as far as there is room; counts all.
DEVICE void collect(Shared& shared, const u64 (&keys)[PER_THREAD], u64 bound, float top, int lane) {
  int before = 0, in_warp = 0, at[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 who = __ballot_sync(~0u, keys[i] >= bound);
    at[i] = in_warp + __popc(who & ((1u << lane) - 1));
    in_warp += __popc(who);
  }
  if (lane == 0) before = atomicAdd(&shared.count[0], in_warp);
  before = __shfl_sync(~0u, before, 0);
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
    if (keys[i] >= bound && before + at[i] < MAX_CANDIDATES)
      shared.candidates[before + at[i]] = make_ulonglong2(keys[i], weight_of(logit_of(keys[i]), top));
}

struct Filter {
  float top_p, inverse_temperature;
  i64 noise_key;
};

// Best of the lanes: the highest score, then the lowest rank; 0 where no lane has one.
DEVICE u64 warp_best(u64 mine) {
  const u32 score = static_cast<u32>(mine >> 32), highest = __reduce_max_sync(~0u, score);
  const u32 rest = __reduce_max_sync(~0u, score == highest ? static_cast<u32>(mine) : 0);
  return static_cast<u64>(highest) << 32 | rest;
}

// Draws by all threads. Ranks from num_ranks on, and those whose cumulative un-tempered probability
// exceeds top_p, are removed, the best never; the others are tempered and drawn by Gumbel noise.
DEVICE void draw(int (&chosen)[DRAWS], Shared& shared, const Filter (&filters)[DRAWS],
                 int num_candidates, int num_ranks, int warp, int lane) {
  // `parts` threads per candidate share the others.
  const int parts = num_candidates * 8 <= THREADS ? 8 : num_candidates * 4 <= THREADS ? 4 : 2;
  const int candidate = threadIdx.x / parts, part = threadIdx.x % parts;
  u64 best[DRAWS] = {};
  if (warp * 32 / parts < num_candidates) {
    const ulonglong2 own = shared.candidates[min(candidate, num_candidates - 1)];
    u64 above = 0;
#pragma unroll 4
    for (int i = part; i < num_candidates; i += parts) {
      const ulonglong2 other = shared.candidates[i];
      if (other.x > own.x) above += other.y;
    }
    __syncwarp();
    for (int lanes = 1; lanes < parts; lanes *= 2) above += __shfl_xor_sync(~0u, above, lanes);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += shared.sum[i];
    const int rank = static_cast<int>(above >> 48);
    const u64 cumulative = (above + own.y) & ((1ull << 48) - 1);
    const float reached = static_cast<float>(cumulative) * 0x1p-31f / sum;
    if (candidate < num_candidates && part == 0 && rank < num_ranks) {
      const int token = index_of(own.x);
#pragma unroll
      for (int d = 0; d < DRAWS; d++) {
        if (rank > 0 && !(reached <= filters[d].top_p)) continue;
        const float score = __fadd_rn(gumbel_noise(filters[d].noise_key, token),
                                      __fmul_rn(logit_of(own.x), filters[d].inverse_temperature));
        best[d] = static_cast<u64>(ordered(score)) << 32 | (MAX_RANKS - rank) << INDEX_BITS | token;
      }
    }
  }
#pragma unroll
  for (int d = 0; d < DRAWS; d++) {
    best[d] = warp_best(best[d]);
    if (lane == 0) shared.winners[d][warp] = best[d];
  }
  __syncthreads();
#pragma unroll
  for (int d = 0; d < DRAWS; d++) {
    const u64 winner = warp_best(lane < WARPS ? shared.winners[d][lane] : 0);
    const int token = static_cast<int>(winner & ((1 << INDEX_BITS) - 1));
    chosen[d] = min(token, NUM_TOKENS - 1);  // whatever garbage logits lead to
  }
}

DEVICE void copy_row(bf16* target, const bf16* source, int dim) {
  for (int at = threadIdx.x * 8; at < dim; at += THREADS * 8)
    *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(source + at);
}

// Grid: (B). Parameters are by slot [N], `slots` and `choice` i64 [B], logits [B, V].
//   first_draw: number of the (first) draw in the noise. num_ranks_limit: as if top_k were no more.
//   codes i32 [B, num_codebooks] or null, written at `codebook`.
//   Semantic: window i32 [N, window_len] (at most 32), head_tokens i32 [V], head_codes i64 [V] or null,
//   is_end bool [B] or null; x [2 B, dim] gets the hidden state and the code's embedding.
//   Else: x [B, dim] gets the code's embedding.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const LOGIT* logits, const i64* slots, const float* temperature, const float* top_p,
           const i32* top_k, const i64* seed, const i32* frame_idx, const i32* window,
           const i32* head_tokens, const i64* head_codes, i64* choice, bool* is_end, i32* codes,
           const bf16* table, const bf16* hidden, bf16* x, int first_draw, int num_ranks_limit,
           int window_len, int codebook, int num_codebooks, int dim) {
  __shared__ Shared shared;
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 3) shared.count[threadIdx.x] = 0;
  if (!IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();
  const i64 slot = slots[row];
  const float temperature_of = temperature[slot];
  const int limit = min(min(num_ranks_limit, MAX_RANKS), NUM_TOKENS);
  const int num_ranks = temperature_of > 0 ? max(min(top_k[slot], limit), 1) : 1;
  const i64 seed_of = seed[slot], frame = frame_idx[slot];
  Filter filters[DRAWS];
  filters[0] = {top_p[slot], 1.f / fmaxf(temperature_of, MIN_TEMPERATURE),
                noise_key(seed_of, frame, first_draw)};
  if (IS_SEMANTIC) filters[DRAWS - 1] = {RAS_TOP_P, 1.f, noise_key(seed_of, frame, first_draw + 1)};
  const i32 recent = IS_SEMANTIC && lane < window_len ? window[slot * window_len + lane] : -1;
  if (IS_CHAINED) wait_for_previous_kernels(), let_next_kernel_start();

  float values[PER_THREAD], low = lowest();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int idx = i * THREADS + threadIdx.x;
    values[i] = idx < NUM_TOKENS ? static_cast<float>(logits[static_cast<i64>(row) * NUM_TOKENS + idx])
                                 : lowest();
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

  u64 keys[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int idx = i * THREADS + threadIdx.x;
    keys[i] = idx < NUM_TOKENS ? sort_key(values[i], idx) : 0;
  }
  u64 bound = max(sort_key(low, (1 << INDEX_BITS) - 1), 1ull);
  collect(shared, keys, bound, top, lane);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
    sum += i * THREADS + threadIdx.x < NUM_TOKENS ? expf(values[i] - top) : 0.f;
  sum = warp_sum(sum);
  if (lane == 0) shared.sum[warp] = sum;
  __syncthreads();
  int num_candidates = shared.count[0];
  if (num_candidates > MAX_CANDIDATES) {
    __syncthreads();
    bound = raised_bound(shared, keys, bound, sort_key(top, 0) + 1, num_ranks, lane);
    __syncthreads();
    if (threadIdx.x == 0) shared.count[0] = 0;
    __syncthreads();
    collect(shared, keys, bound, top, lane);
    __syncthreads();
    num_candidates = min(shared.count[0], MAX_CANDIDATES);
  }

  int chosen[DRAWS];
  draw(chosen, shared, filters, num_candidates, num_ranks, warp, lane);
  int taken = chosen[0];
  if (IS_SEMANTIC) {  // a semantic token of the last ones gives way to its twin
    const bool is_recent = __any_sync(~0u, lane < window_len && recent == head_tokens[taken]);
    if (is_recent && taken < NUM_TOKENS - 1) taken = chosen[DRAWS - 1];
  }
  const int code = head_codes != nullptr ? static_cast<int>(head_codes[taken]) : taken;
  if (x != nullptr) {
    const i64 target = IS_SEMANTIC ? 2ll * row + 1 : row;
    copy_row(x + target * dim, table + static_cast<i64>(code) * dim, dim);
    if (IS_SEMANTIC) copy_row(x + 2ll * row * dim, hidden + static_cast<i64>(row) * dim, dim);
  }
  if (threadIdx.x == 0) {
    choice[row] = taken;
    if (is_end != nullptr) is_end[row] = taken == NUM_TOKENS - 1;
    if (codes != nullptr) codes[row * num_codebooks + codebook] = code;
  }
}
