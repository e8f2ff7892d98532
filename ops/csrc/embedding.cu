// Input of the slow AR: token embedding, plus the codebooks' sum at semantic positions.
//   NUM_CODEBOOKS (K).
#include "heads.cuh"

// Grid: (M).
//   rows i32 [R, 1 + K]; slots i64 [M] or null (row m is m); embeddings [V, dim];
//   codebook_embeddings [K * codebook_size, dim]; out [M, dim].
// Rounds to bf16 after the sum over codebooks, after the token is added, after the division.
extern "C" __global__ void __launch_bounds__(256)
    embed_rows(const i32* rows, const i64* slots, const bf16* embeddings,
               const bf16* codebook_embeddings, bf16* out, int codebook_size, int first_semantic,
               int last_semantic, float divisor, int dim) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const i64 row = slots == nullptr ? blockIdx.x : slots[blockIdx.x];
  i32 fields[1 + NUM_CODEBOOKS];
#pragma unroll
  for (int i = 0; i <= NUM_CODEBOOKS; i++) fields[i] = rows[row * (1 + NUM_CODEBOOKS) + i];
  const bool is_semantic = first_semantic <= fields[0] && fields[0] <= last_semantic;
  for (int at = threadIdx.x * 8; at < dim; at += 256 * 8) {
    const uint4 text = *reinterpret_cast<const uint4*>(embeddings + static_cast<i64>(fields[0]) * dim + at);
    uint4 result = text;
    if (is_semantic) {
      uint4 parts[NUM_CODEBOOKS];
#pragma unroll
      for (int i = 0; i < NUM_CODEBOOKS; i++)
        parts[i] = *reinterpret_cast<const uint4*>(
            codebook_embeddings + (static_cast<i64>(i) * codebook_size + fields[1 + i]) * dim + at);
      u32 pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        float2 sum = {0, 0};
#pragma unroll
        for (int i = 0; i < NUM_CODEBOOKS; i++) {
          const float2 part = unpacked(word(parts[i], pair));
          sum.x += part.x, sum.y += part.y;
        }
        const float2 audio = unpacked(packed(sum.x, sum.y)), token = unpacked(word(text, pair));
        const float2 both = unpacked(packed(token.x + audio.x, token.y + audio.y));
        pairs[pair] = packed(both.x / divisor, both.y / divisor);
      }
      result = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    *reinterpret_cast<uint4*>(out + static_cast<i64>(blockIdx.x) * dim + at) = result;
  }
}
