// What a codec's stream does between its convolutions: codes to latents, norms, attention within a
// window, depthwise convolution, the last convolution to samples. One CTA makes one row, or one row
// of one head, and every sum has the same order whatever the batch and the frames per call.
#include <cuda_fp16.h>

#include "common.cuh"

// Defined by the caller: STEPS, the frames per call (attention); CHANNELS (output).
#ifndef STEPS
#define STEPS 1
#endif
#ifndef CHANNELS
#define CHANNELS 96
#endif

constexpr int kThreads = 128;

DEVICE float clamped(float value) { return fminf(fmaxf(value, -65504.f), 65504.f); }
DEVICE __half rounded(float value) { return __float2half_rn(clamped(value)); }

// The sum over the CTA's threads, for all of them.
template <int kCount>
DEVICE float block_sum(float value) {
  __shared__ float parts[kCount / 32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount / 32; i++) sum += parts[i];
  return sum;
}

// latents[b, t] = the sum of every codebook's row; turns[b, t] = (cos, sin) of the position's angles
// as bf16 numbers. The codes of (b, t) are row b * T + t of `codes`. A CTA makes kThreads channels of
// one row, the last CTA of a row its angles.
extern "C" __global__ void __launch_bounds__(kThreads)
    codec_begin(const int* codes, const int* last_codes, const int* offsets, const float* table,
                const float* frequencies, const i64* positions, const i64* slots, float* latents,
                float2* turns, int num_codebooks, int dim, int num_steps, int num_frequencies) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int row = blockIdx.y;
  if (blockIdx.x == gridDim.x - 1) {
    for (int i = threadIdx.x; i < num_frequencies; i += kThreads) {
      i64 position = positions[slots[row / num_steps]] + row % num_steps;
      // Through double, so that the rounding to bf16 is that of every other device.
      double angle = float(position) * frequencies[i];
      turns[i64(row) * num_frequencies + i] =
          make_float2(__bfloat162float(__double2bfloat16(cos(angle))),
                      __bfloat162float(__double2bfloat16(sin(angle))));
    }
    return;
  }
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= dim) return;
  float sum = 0;
#pragma unroll 10
  for (int k = 0; k < num_codebooks; k++) {
    int code = min(max(codes[i64(row) * num_codebooks + k], 0), last_codes[k]);
    sum += table[i64(offsets[k] + code) * dim + c];
  }
  latents[i64(row) * dim + c] = sum;
}

extern "C" __global__ void codec_rms_norm(const float* x, const float* weight, __half* out, int dim,
                                          float eps) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const float* row = x + i64(blockIdx.x) * dim;
  float squares = 0;
  for (int c = threadIdx.x; c < dim; c += kThreads) squares += row[c] * row[c];
  float scale = rsqrtf(block_sum<kThreads>(squares) / dim + eps);
  for (int c = threadIdx.x; c < dim; c += kThreads)
    out[i64(blockIdx.x) * dim + c] = rounded(row[c] * scale * weight[c]);
}

// Attention of STEPS new positions over themselves and what the ring holds, in the order of the
// ring's places: position p lies in place p % kWindow, and a new key takes the place of the one
// kWindow before it. qkv [B, STEPS, 3, heads, D]; ring [slots, layers, kWindow, heads, D]; out
// [B, STEPS, heads, D]. A thread scores one place; for the sum a lane takes 8 dims of every fourth
// place of its warp's.
constexpr int kWindow = kThreads, kHeadDim = 64, kWarps = kThreads / 32;

DEVICE void unpack(float (&v)[8], uint4 bits) {
  const __half2* halves = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 pair = __half22float2(halves[j]);
    v[2 * j] = pair.x, v[2 * j + 1] = pair.y;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_attention(const __half* qkv, __half* ring_keys, __half* ring_values, const float2* turns,
                    const i64* positions, const i64* slots, __half* out, int num_heads, int num_layers,
                    int layer) {
  constexpr int kPlacesPerWarp = kWindow / kWarps, kLoads = kPlacesPerWarp / 4;
  __shared__ __align__(16) float queries[STEPS][kHeadDim];
  __shared__ __align__(16) __half keys[STEPS][kHeadDim], values[STEPS][kHeadDim];
  __shared__ float scores[STEPS][kWindow];
  __shared__ float sums[kWarps][STEPS][kHeadDim];
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int head = blockIdx.x, stream = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const i64 slot = slots[stream], first = positions[slot];
  const int first_place = first % kWindow;
  const int stride = num_heads * kHeadDim;  // of a ring's place
  const i64 at = ((slot * num_layers + layer) * kWindow * num_heads + head) * kHeadDim;

  // All of the ring is asked for at once, as far as it was ever written.
  uint4 old_keys[kHeadDim / 8], old_values[kLoads];
  const int my_step = (tid - first_place + kWindow) % kWindow;  // whose key takes this place
  const bool has_old_key = first - kWindow + my_step >= 0;
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; i++)
    if (has_old_key)
      old_keys[i] = reinterpret_cast<const uint4*>(ring_keys + at + tid * stride)[i];
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    int place = warp * kPlacesPerWarp + i * 4 + lane / 8;
    int step = (place - first_place + kWindow) % kWindow;
    old_values[i] = make_uint4(0, 0, 0, 0);
    if (first - kWindow + step >= 0)
      old_values[i] = reinterpret_cast<const uint4*>(ring_values + at + place * stride)[lane % 8];
  }
  for (int i = tid; i < STEPS * (kHeadDim / 2); i += kThreads) {
    int t = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    i64 row = i64(stream) * STEPS + t;
    float2 turn = turns[row * (kHeadDim / 2) + pair];
    const __half2* source =
        reinterpret_cast<const __half2*>(qkv + (row * 3 * num_heads + head) * kHeadDim) + pair;
    float2 q = __half22float2(source[0]), k = __half22float2(source[stride / 2]);
    queries[t][2 * pair] = __half2float(rounded(q.x * turn.x - q.y * turn.y));
    queries[t][2 * pair + 1] = __half2float(rounded(q.y * turn.x + q.x * turn.y));
    keys[t][2 * pair] = rounded(k.x * turn.x - k.y * turn.y);
    keys[t][2 * pair + 1] = rounded(k.y * turn.x + k.x * turn.y);
    reinterpret_cast<__half2*>(values[t])[pair] = source[stride];
  }
  __syncthreads();

  for (int t = 0; t < STEPS; t++) {
    float score = 0;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; i++) {
      float key[8];
      unpack(key, t < my_step ? old_keys[i] : reinterpret_cast<const uint4*>(keys[my_step % STEPS])[i]);
      float4 low = reinterpret_cast<const float4*>(queries[t])[2 * i];
      float4 high = reinterpret_cast<const float4*>(queries[t])[2 * i + 1];
      score += low.x * key[0] + low.y * key[1] + low.z * key[2] + low.w * key[3];
      score += high.x * key[4] + high.y * key[5] + high.z * key[6] + high.w * key[7];
    }
    bool is_there = t >= my_step || has_old_key;
    scores[t][tid] = is_there ? score * 0.125f : -__int_as_float(0x7f800000);
  }
  __syncthreads();
  for (int t = warp; t < STEPS; t += kWarps) {
    float v[kWindow / 32], top = -__int_as_float(0x7f800000), sum = 0;
#pragma unroll
    for (int i = 0; i < kWindow / 32; i++) top = fmaxf(top, v[i] = scores[t][lane + 32 * i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kWindow / 32; i++) sum += v[i] = __expf(v[i] - top);
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kWindow / 32; i++) scores[t][lane + 32 * i] = v[i] / sum;
  }
  __syncthreads();

  for (int t = 0; t < STEPS; t++) {
    float mine[8] = {};
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      int place = warp * kPlacesPerWarp + i * 4 + lane / 8;
      int step = (place - first_place + kWindow) % kWindow;
      float value[8], weight = scores[t][place];
      unpack(value, t < step ? old_values[i]
                             : reinterpret_cast<const uint4*>(values[step % STEPS])[lane % 8]);
#pragma unroll
      for (int e = 0; e < 8; e++) mine[e] += weight * value[e];
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
      mine[e] += __shfl_xor_sync(~0u, mine[e], 8);
      mine[e] += __shfl_xor_sync(~0u, mine[e], 16);
    }
    if (lane < 8) {
#pragma unroll
      for (int e = 0; e < 8; e++) sums[warp][t][lane * 8 + e] = mine[e];
    }
  }
  __syncthreads();
  for (int i = tid; i < STEPS * kHeadDim; i += kThreads) {
    int t = i / kHeadDim, d = i % kHeadDim;
    float sum = sums[0][t][d] + sums[1][t][d] + sums[2][t][d] + sums[3][t][d];
    out[((i64(stream) * STEPS + t) * num_heads + head) * kHeadDim + d] = rounded(sum);
  }
  for (int i = tid; i < STEPS * (kHeadDim / 8); i += kThreads) {
    int t = i / (kHeadDim / 8), chunk = i % (kHeadDim / 8);
    i64 place = at + i64((first + t) % kWindow) * stride + chunk * 8;
    *reinterpret_cast<uint4*>(ring_keys + place) = reinterpret_cast<const uint4*>(keys[t])[chunk];
    *reinterpret_cast<uint4*>(ring_values + place) = reinterpret_cast<const uint4*>(values[t])[chunk];
  }
}

// out = layer_norm(depthwise convolution of 7 taps), a CTA per step; the inputs are rounded as the
// history keeps them.
constexpr int kPast = 6, kDepthwiseThreads = 512;

extern "C" __global__ void __launch_bounds__(kDepthwiseThreads)
    codec_depthwise_norm(const float* x, const __half* history, __half* new_history, const i64* slots,
                         const float* taps, const float* bias, const float* norm_weight,
                         const float* norm_bias, __half* out, int dim, int num_steps,
                         int history_values, int history_start, float eps) {
  constexpr int kPerThread = 2;  // dim is at most twice the threads
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int stream = blockIdx.x / num_steps, t = blockIdx.x % num_steps;
  const __half* past = history + slots[stream] * history_values + history_start;
  __half* next = new_history + i64(stream) * history_values + history_start;
  const float* row = x + i64(blockIdx.x) * dim;
  float y[kPerThread] = {}, sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    int c = threadIdx.x + i * kDepthwiseThreads;
    if (c >= dim) break;
    float in[kPast + 1];
#pragma unroll
    for (int tap = 0; tap <= kPast; tap++) {
      int from = t + tap - kPast;
      in[tap] = __half2float(from >= 0 ? rounded(row[i64(tap - kPast) * dim + c])
                                       : past[(kPast + from) * dim + c]);
    }
    y[i] = bias[c];
#pragma unroll
    for (int tap = 0; tap <= kPast; tap++) y[i] += in[tap] * taps[tap * dim + c];
    sum += y[i];
    int place = t - num_steps + kPast;
    if (place >= 0) next[place * dim + c] = rounded(in[kPast]);
    if (t == 0)
      for (int p = 0; p < kPast - num_steps; p++) next[p * dim + c] = past[(p + num_steps) * dim + c];
  }
  float mean = block_sum<kDepthwiseThreads>(sum) / dim, squares = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; i++)
    if (threadIdx.x + i * kDepthwiseThreads < dim) squares += (y[i] - mean) * (y[i] - mean);
  float scale = rsqrtf(block_sum<kDepthwiseThreads>(squares) / dim + eps);
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    int c = threadIdx.x + i * kDepthwiseThreads;
    if (c < dim)
      out[i64(blockIdx.x) * dim + c] = rounded((y[i] - mean) * scale * norm_weight[c] + norm_bias[c]);
  }
}

// The end of a call: each stream's new history takes the old one's place, its position moves on. A CTA
// copies kKeptPerThread chunks a thread of one stream's row; a slot may be named many times.
constexpr int kKeptPerThread = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_keep(const uint4* new_history, uint4* history, unsigned long long* positions,
               const i64* slots, int row_chunks, int num_steps) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const i64 stream = blockIdx.y, slot = slots[stream];
  const int first = blockIdx.x * kThreads * kKeptPerThread + threadIdx.x;
  uint4 held[kKeptPerThread];
#pragma unroll
  for (int i = 0; i < kKeptPerThread; i++)
    if (first + i * kThreads < row_chunks)
      held[i] = new_history[stream * row_chunks + first + i * kThreads];
#pragma unroll
  for (int i = 0; i < kKeptPerThread; i++)
    if (first + i * kThreads < row_chunks) history[slot * row_chunks + first + i * kThreads] = held[i];
  if (first == 0) atomicAdd(positions + slot, static_cast<unsigned long long>(num_steps));
}

// The last convolution, CHANNELS to one sample, and tanh. A group of lanes shares the channels of a
// row and makes kRun samples one after another: a row is read once, and adds to the sums of the
// seven samples that it reaches.
constexpr int kChannelsPerLane = CHANNELS % 96 == 0 ? CHANNELS / 16 : CHANNELS / 8;
constexpr int kLanes = CHANNELS / kChannelsPerLane, kRun = 32, kGroups = kThreads / kLanes;
static_assert(kChannelsPerLane % 2 == 0 && CHANNELS % kChannelsPerLane == 0, "");

extern "C" __global__ void __launch_bounds__(kThreads)
    codec_output(const __half* in, const __half* history, __half* new_history, const i64* slots,
                 const float* weight, float bias, float* samples, int num_steps, int history_values,
                 int history_start) {
  constexpr int kPairs = kChannelsPerLane / 2;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, stream = blockIdx.y;
  const int first = (blockIdx.x * kGroups + group) * kRun;
  float weights[kPast + 1][kChannelsPerLane];
#pragma unroll
  for (int tap = 0; tap <= kPast; tap++)
#pragma unroll
    for (int c = 0; c < kChannelsPerLane; c++)
      weights[tap][c] = weight[tap * CHANNELS + lane * kChannelsPerLane + c];
  wait_for_previous_kernels();
  let_next_kernel_start();
  const __half2* past = reinterpret_cast<const __half2*>(
      history + slots[stream] * history_values + history_start);
  __half2* next =
      reinterpret_cast<__half2*>(new_history + i64(stream) * history_values + history_start);
  const __half2* source =
      reinterpret_cast<const __half2*>(in) + i64(stream) * num_steps * (CHANNELS / 2);
  float sums[kPast + 1] = {};  // of the samples from the row's on
#pragma unroll 1
  for (int begin = -kPast; begin < kRun; begin += kPast + 1) {
    __half2 rows[kPast + 1][kPairs];
#pragma unroll
    for (int i = 0; i <= kPast; i++) {
      int t = first + begin + i;
#pragma unroll
      for (int c = 0; c < kPairs; c++) {
        int column = lane * kPairs + c;
        rows[i][c] = __half2half2(__ushort_as_half(0));
        if (t < num_steps && begin + i < kRun)
          rows[i][c] = t >= 0 ? source[i64(t) * (CHANNELS / 2) + column]
                              : past[(kPast + t) * (CHANNELS / 2) + column];
      }
    }
#pragma unroll
    for (int i = 0; i <= kPast; i++) {
      int t = first + begin + i, place = t - num_steps + kPast;
#pragma unroll
      for (int c = 0; c < kPairs; c++) {
        float2 value = __half22float2(rows[i][c]);
        // Row t is tap kPast - j of sample t + j, whose sum is at (i + j) % 7.
#pragma unroll
        for (int j = 0; j <= kPast; j++) {
          float& sum = sums[(i + j) % (kPast + 1)];
          sum += value.x * weights[kPast - j][2 * c];
          sum += value.y * weights[kPast - j][2 * c + 1];
        }
        if (begin + i >= 0 && begin + i < kRun && place >= 0 && t < num_steps)
          next[place * (CHANNELS / 2) + lane * kPairs + c] = rows[i][c];
      }
      float sample = sums[i];  // complete: this row was its last tap
      sums[i] = 0;
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2)
        sample += __shfl_xor_sync(~0u, sample, offset);
      if (lane == 0 && begin + i >= 0 && begin + i < kRun && t < num_steps)
        samples[i64(stream) * num_steps + t] = tanhf(sample + bias);
    }
  }
}
