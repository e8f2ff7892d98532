// What a codec's stream does between its convolutions: codes to latents, norms, attention within a
// window, depthwise convolution, the last convolution to samples. One CTA makes one row, or one row
// of one head, and every sum has the same order whatever the batch and the frames per call.
#include <cuda_fp16.h>

#include "common.cuh"

#ifndef WINDOW
#define WINDOW 128
#define HEAD_DIM 64
#define MAX_STEPS 16
#endif

constexpr int kThreads = 128;

DEVICE float clamped(float value) { return fminf(fmaxf(value, -65504.f), 65504.f); }
DEVICE __half rounded(float value) { return __float2half_rn(clamped(value)); }

// The sum over the CTA's threads, for all of them.
DEVICE float block_sum(float value) {
  __shared__ float parts[kThreads / 32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; i++) sum += parts[i];
  return sum;
}

// latents[b, t] = the sum of every codebook's row; turns[b, t] = (cos, sin) of the position's angles
// as bf16 numbers. The codes of (b, t) are row `index[b, t]` of `codes`, or row b * T + t.
extern "C" __global__ void codec_begin(const int* codes, const i64* index, const int* last_codes,
                                       const int* offsets, const float* table, const float* frequencies,
                                       const i64* positions, const i64* slots, float* latents,
                                       float2* turns, int num_codebooks, int dim, int num_steps,
                                       int num_frequencies) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int row = blockIdx.x;
  const int* mine = codes + (index ? index[row] : row) * num_codebooks;
  for (int c = threadIdx.x; c < dim; c += kThreads) {
    float sum = 0;
    for (int k = 0; k < num_codebooks; k++) {
      int code = min(max(mine[k], 0), last_codes[k]);
      sum += table[i64(offsets[k] + code) * dim + c];
    }
    latents[i64(row) * dim + c] = sum;
  }
  for (int i = threadIdx.x; i < num_frequencies; i += kThreads) {
    i64 position = positions[slots[row / num_steps]] + row % num_steps;
    float angle = float(position) * frequencies[i];
    // Through double, so that the rounding to bf16 is that of every other device.
    turns[i64(row) * num_frequencies + i] = make_float2(__bfloat162float(__double2bfloat16(cos(double(angle)))),
                                                        __bfloat162float(__double2bfloat16(sin(double(angle)))));
  }
}

extern "C" __global__ void codec_rms_norm(const float* x, const float* weight, __half* out, int dim,
                                          float eps) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const float* row = x + i64(blockIdx.x) * dim;
  float squares = 0;
  for (int c = threadIdx.x; c < dim; c += kThreads) squares += row[c] * row[c];
  float scale = rsqrtf(block_sum(squares) / dim + eps);
  for (int c = threadIdx.x; c < dim; c += kThreads)
    out[i64(blockIdx.x) * dim + c] = rounded(row[c] * scale * weight[c]);
}

// Attention of T new positions over themselves and what the ring holds, in the order of the ring's
// places: position p lies in place p % WINDOW, and a new key takes the place of the one WINDOW
// before it. qkv [B, T, 3, heads, D]; ring [slots, layers, WINDOW, heads, D]; out [B, T, heads, D].
extern "C" __global__ void __launch_bounds__(kThreads)
    codec_attention(const __half* qkv, __half* ring_keys, __half* ring_values, const float2* turns,
                    const i64* positions, const i64* slots, __half* out, int num_heads, int num_layers,
                    int layer, int num_steps) {
  static_assert(WINDOW == kThreads && HEAD_DIM == 64, "a thread per place, a lane per two dims");
  __shared__ float queries[MAX_STEPS][HEAD_DIM];
  __shared__ __half keys[MAX_STEPS][HEAD_DIM], values[MAX_STEPS][HEAD_DIM];
  __shared__ float scores[MAX_STEPS][WINDOW];
  __shared__ float sums[kThreads / 32][MAX_STEPS][HEAD_DIM];
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int head = blockIdx.x, stream = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const i64 slot = slots[stream], first = positions[slot];
  const int first_place = first % WINDOW;
  const int stride = num_heads * HEAD_DIM;  // of a ring's place
  const i64 at = ((slot * num_layers + layer) * WINDOW * num_heads + head) * HEAD_DIM;

  for (int i = tid; i < num_steps * (HEAD_DIM / 2); i += kThreads) {
    int t = i / (HEAD_DIM / 2), pair = i % (HEAD_DIM / 2);
    i64 row = i64(stream) * num_steps + t;
    float2 turn = turns[row * (HEAD_DIM / 2) + pair];
    const __half2* source = reinterpret_cast<const __half2*>(qkv + (row * 3 * num_heads + head) * HEAD_DIM) + pair;
    float2 q = __half22float2(source[0]), k = __half22float2(source[stride / 2]);
    queries[t][2 * pair] = __half2float(rounded(q.x * turn.x - q.y * turn.y));
    queries[t][2 * pair + 1] = __half2float(rounded(q.y * turn.x + q.x * turn.y));
    keys[t][2 * pair] = rounded(k.x * turn.x - k.y * turn.y);
    keys[t][2 * pair + 1] = rounded(k.y * turn.x + k.x * turn.y);
    reinterpret_cast<__half2*>(values[t])[pair] = source[stride];
  }
  __syncthreads();

  // Scores of this thread's place for every new position.
  float key[HEAD_DIM];
  const __half* old_key = ring_keys + at + tid * stride;
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += 8) {
    uint4 bits = *reinterpret_cast<const uint4*>(old_key + i);
    const __half2* halves = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 pair = __half22float2(halves[j]);
      key[i + 2 * j] = pair.x, key[i + 2 * j + 1] = pair.y;
    }
  }
  const int new_step = (tid - first_place + WINDOW) % WINDOW;  // whose key takes this place
  for (int t = 0; t < num_steps; t++) {
    if (t == new_step) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM; i++) key[i] = __half2float(keys[t][i]);
    }
    float score = 0;
#pragma unroll
    for (int i = 0; i < HEAD_DIM; i++) score += queries[t][i] * key[i];
    // The newest position that lies in this place is there if it is not before the beginning.
    bool is_there = t >= new_step || first - WINDOW + new_step >= 0;
    scores[t][tid] = is_there ? score * 0.125f : -__int_as_float(0x7f800000);
  }
  __syncthreads();
  for (int t = warp; t < num_steps; t += kThreads / 32) {
    float v[WINDOW / 32], top = -__int_as_float(0x7f800000), sum = 0;
#pragma unroll
    for (int i = 0; i < WINDOW / 32; i++) top = fmaxf(top, v[i] = scores[t][lane + 32 * i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < WINDOW / 32; i++) sum += v[i] = __expf(v[i] - top);
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < WINDOW / 32; i++) scores[t][lane + 32 * i] = v[i] / sum;
  }
  __syncthreads();

  // A warp sums up its quarter of the places, a lane two dimensions.
  float2 mine[MAX_STEPS];
#pragma unroll
  for (int t = 0; t < MAX_STEPS; t++) mine[t] = make_float2(0, 0);
  const int first_of_warp = warp * (WINDOW / 4);
#pragma unroll 4
  for (int place = first_of_warp; place < first_of_warp + WINDOW / 4; place++) {
    int step = (place - first_place + WINDOW) % WINDOW;
    float2 old_value = make_float2(0, 0), new_value = make_float2(0, 0);
    // What was never written has no weight, but it may be anything: it must not be read.
    if (first - WINDOW + step >= 0)
      old_value = __half22float2(reinterpret_cast<const __half2*>(ring_values + at + place * stride)[lane]);
    if (step < num_steps) new_value = __half22float2(reinterpret_cast<const __half2*>(values[step])[lane]);
#pragma unroll
    for (int t = 0; t < MAX_STEPS; t++) {
      if (t >= num_steps) break;
      float2 value = t >= step ? new_value : old_value;
      float weight = scores[t][place];
      mine[t].x += weight * value.x, mine[t].y += weight * value.y;
    }
  }
#pragma unroll
  for (int t = 0; t < MAX_STEPS; t++)
    if (t < num_steps) *reinterpret_cast<float2*>(&sums[warp][t][2 * lane]) = mine[t];
  __syncthreads();
  for (int i = tid; i < num_steps * HEAD_DIM; i += kThreads) {
    int t = i / HEAD_DIM, d = i % HEAD_DIM;
    float sum = sums[0][t][d] + sums[1][t][d] + sums[2][t][d] + sums[3][t][d];
    out[((i64(stream) * num_steps + t) * num_heads + head) * HEAD_DIM + d] = rounded(sum);
  }
  for (int i = tid; i < num_steps * (HEAD_DIM / 8); i += kThreads) {
    int t = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
    i64 place = at + i64((first + t) % WINDOW) * stride + chunk * 8;
    *reinterpret_cast<uint4*>(ring_keys + place) = reinterpret_cast<const uint4*>(keys[t])[chunk];
    *reinterpret_cast<uint4*>(ring_values + place) = reinterpret_cast<const uint4*>(values[t])[chunk];
  }
}

// out = layer_norm(depthwise convolution of 7 taps), a CTA per step; the inputs are rounded as the
// history keeps them.
extern "C" __global__ void __launch_bounds__(kThreads)
    codec_depthwise_norm(const float* x, const __half* history, __half* new_history, const i64* slots,
                         const float* taps, const float* bias, const float* norm_weight,
                         const float* norm_bias, __half* out, int dim, int num_steps,
                         int history_values, int history_start, float eps) {
  constexpr int kPast = 6, kMaxPerThread = 8;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int stream = blockIdx.x / num_steps, t = blockIdx.x % num_steps;
  const __half* past = history + slots[stream] * history_values + history_start;
  __half* next = new_history + i64(stream) * history_values + history_start;
  const float* row = x + i64(blockIdx.x) * dim;
  float y[kMaxPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxPerThread; i++) {
    int c = threadIdx.x + i * kThreads;
    if (c >= dim) break;
    float value = bias[c];
#pragma unroll
    for (int tap = 0; tap <= kPast; tap++) {
      int from = t + tap - kPast;
      float in = __half2float(from >= 0 ? rounded(row[i64(tap - kPast) * dim + c]) : past[(kPast + from) * dim + c]);
      value += in * taps[tap * dim + c];
    }
    y[i] = value;
    sum += value;
    int place = t - num_steps + kPast;
    if (place >= 0) next[place * dim + c] = rounded(row[c]);
    if (t == 0)
      for (int p = 0; p < kPast - num_steps; p++) next[p * dim + c] = past[(p + num_steps) * dim + c];
  }
  float mean = block_sum(sum) / dim, squares = 0;
#pragma unroll
  for (int i = 0; i < kMaxPerThread; i++)
    if (threadIdx.x + i * kThreads < dim) squares += (y[i] - mean) * (y[i] - mean);
  float scale = rsqrtf(block_sum(squares) / dim + eps);
#pragma unroll
  for (int i = 0; i < kMaxPerThread; i++) {
    int c = threadIdx.x + i * kThreads;
    if (c < dim)
      out[i64(blockIdx.x) * dim + c] = rounded((y[i] - mean) * scale * norm_weight[c] + norm_bias[c]);
  }
}

// The last convolution: channels to one sample, and tanh. A thread makes a sample; the CTA's input
// lies in shared memory.
extern "C" __global__ void __launch_bounds__(kThreads)
    codec_output(const __half* in, const __half* history, __half* new_history, const i64* slots,
                 const float* weight, float bias, float* samples, int channels, int num_steps,
                 int history_values, int history_start) {
  constexpr int kPast = 6;
  extern __shared__ unsigned char shared[];
  float* weights = reinterpret_cast<float*>(shared);                        // [7, channels]
  __half2* rows = reinterpret_cast<__half2*>(weights + (kPast + 1) * channels);  // [kThreads + 6, channels / 2 + 1]
  const int stride = channels / 2 + 1;
  for (int i = threadIdx.x; i < (kPast + 1) * channels; i += kThreads) weights[i] = weight[i];
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int stream = blockIdx.y, first = blockIdx.x * kThreads;
  const __half2* past = reinterpret_cast<const __half2*>(history + slots[stream] * history_values + history_start);
  __half2* next = reinterpret_cast<__half2*>(new_history + i64(stream) * history_values + history_start);
  const __half2* source = reinterpret_cast<const __half2*>(in) + i64(stream) * num_steps * (channels / 2);
  for (int i = threadIdx.x; i < (kThreads + kPast) * (channels / 2); i += kThreads) {
    int row = i / (channels / 2), c = i % (channels / 2), t = first + row - kPast;
    if (t >= num_steps) break;
    __half2 value = t >= 0 ? source[i64(t) * (channels / 2) + c] : past[(kPast + t) * (channels / 2) + c];
    rows[row * stride + c] = value;
    int place = t - num_steps + kPast;  // in the history of the next call
    if (place >= 0 && (row >= kPast || first == 0)) next[place * (channels / 2) + c] = value;
  }
  __syncthreads();
  int t = first + threadIdx.x;
  if (t >= num_steps) return;
  float sum = bias;
  for (int tap = 0; tap <= kPast; tap++)
    for (int c = 0; c < channels / 2; c++) {
      float2 value = __half22float2(rows[(threadIdx.x + tap) * stride + c]);
      sum += value.x * weights[tap * channels + 2 * c] + value.y * weights[tap * channels + 2 * c + 1];
    }
  samples[i64(stream) * num_steps + t] = tanhf(sum);
}
