// What every kernel here shares: programmatic dependent launch, barriers, bulk copies, clusters.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

using bf16 = __nv_bfloat16;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u8 = unsigned char;

#define DEVICE __device__ __forceinline__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Waits until the kernels before this one have finished and their writes are visible. Before it, nothing
// is written, and read is what no kernel writes, or what was written before the last kernel that waits
// first and then lets its successor start (embed_rows, rope_append, samplers, advance): a fence in the
// chain, which IS_CHAINED says lies there.
DEVICE void wait_for_previous_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start to fill its pipeline; it still waits for this one's end before it
// reads what this one writes.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for bytes that other CTAs of the cluster send.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Contiguous copy global -> shared by the copy engine: 16-byte aligned, a multiple of 16 bytes.
DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for weights, which are read once per sweep: they should leave the L2 first.
DEVICE void bulk_copy_streamed(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], policy;\n"
      "}" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Eight bytes global -> shared, while the thread goes on; `wait_for_copies` waits for its own.
DEVICE void copy8(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same bytes into the L2 alone.
DEVICE void bulk_prefetch(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Ordinary stores to shared memory -> visible to the tensor cores and the copy engine.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of the cluster arrive, then wait: orders their shared-memory accesses, before against
// after. A CTA's shared memory may be accessed by others between the first such barrier and the last.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() { cluster_arrive(), cluster_wait(); }

// The same without order of memory, where only barriers were initialised before: the other arrival is a
// fence that waits for all a thread has asked of memory (MEMBAR.ALL.GPU).
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// Address of the same variable in the shared memory of CTA `rank` of the cluster.
DEVICE u32 cluster_address(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

DEVICE float4 cluster_load4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void cluster_store2(u32 address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

DEVICE void cluster_store4(u32 address, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}

// Stores into a CTA of the cluster, whose `barrier` counts the bytes: it needs no fence, and who waits
// there (`barrier_wait_cluster`) sees them.
DEVICE void cluster_send2(u32 address, float x, float y, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "f"(x), "f"(y), "r"(barrier)
      : "memory");
}

DEVICE void cluster_send4(u32 address, float x, float y, float z, float w, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}

#endif  // sm_90 and newer

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}
