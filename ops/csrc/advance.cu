// Makes the frame just sampled the next input of its streams. One warp per row of the batch.
#include "common.cuh"

// Grid: (B), 32 threads. By slot: rows i32 [N, 1 + K], position i64, window i32 [N, window_len] (at
// most 32), frame_idx i32. Of the batch: slots, choice i64 [B], codes i32 [B, K].
// history i32 [N, history_len, 1 + K], or null: the input that was read goes to its position there.
// The dummy slot, which may come several times, stays at its position.
extern "C" __global__ void __launch_bounds__(32)
    advance(i32* rows, i64* position, i32* window, i32* frame_idx, const i64* slots,
            const i64* choice, const i32* codes, const i32* head_tokens, i32* history,
            int num_codebooks, int window_len, int dummy_slot, int history_len) {
  const int row = blockIdx.x, lane = threadIdx.x;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const i64 slot = slots[row];
  const i32 token = head_tokens[choice[row]], frame = frame_idx[slot];
  if (history) {
    i32* place = history + (slot * history_len + position[slot]) * (1 + num_codebooks);
    for (int i = lane; i <= num_codebooks; i += 32) place[i] = rows[slot * (1 + num_codebooks) + i];
    __syncwarp();
  }
  for (int i = lane; i < num_codebooks; i += 32)
    rows[slot * (1 + num_codebooks) + 1 + i] = codes[row * num_codebooks + i];
  i32* tokens = window + slot * window_len;
  const i32 newest = frame > 0 ? token : 0;  // a stream's first token is not remembered
  const i32 shifted = lane < window_len - 1 ? tokens[lane + 1] : newest;
  __syncwarp();
  if (lane < window_len) tokens[lane] = shifted;
  if (lane == 0) {
    rows[slot * (1 + num_codebooks)] = token;
    position[slot] += slot != dummy_slot;
    frame_idx[slot] = frame + 1;
  }
}
