// The few PTX instructions that the kernels use and that have no C++ name: barriers in shared memory,
// tensor loads, conversions. See the PTX ISA, chapters "mbarrier" and "cp.async.bulk.tensor".
#pragma once

namespace sta {

// cuTensorMapEncodeTiled fills it on the host; the TMA unit reads it from kernel parameters.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

using Barrier = unsigned long long;
constexpr float kInfinity = 1.f / 0.f;

__device__ __forceinline__ unsigned shared_address(void const* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the TMA unit.
__device__ __forceinline__ void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// The phase ends only after `bytes` more have been written by the TMA unit.
__device__ __forceinline__ void expect(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Returns once the phase of this parity is over.
__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\nbra.uni again;\nover:\n}"
      ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// Loads a box of a [batch, head, token, column] tensor; what lies outside of the tensor reads as zero.
__device__ __forceinline__ void load_box(void* to, TensorMap const& map, Barrier& barrier, int column,
                                         int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(token), "r"(head),
        "r"(batch) : "memory");
}

// Loads consecutive bytes, a multiple of 16; both start at 16 bytes.
__device__ __forceinline__ void load_bytes(void* to, void const* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}

// Adds float values in shared memory to those in global memory, asynchronously; both start at 16 bytes.
__device__ __forceinline__ void add_to_global(float* to, void const* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_additions() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the shared memory of this thread's additions has been read, but for the kLeft last groups of them.
template <int kLeft>
__device__ __forceinline__ void finish_reading() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(void* row, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Ordinary writes to shared memory become visible to the tensor cores and to bulk copies.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Warpgroup `id` agrees on a predicate: true for all if it is true for any of the 128 threads.
__device__ __forceinline__ bool any_of_warpgroup(bool mine, int id) {
  int any;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\nbar.red.or.pred out, %2, 128, in;\nselp.b32 %0, 1, 0, out;\n}"
      : "=r"(any) : "r"(static_cast<int>(mine)), "r"(id + 1) : "memory");
  return any;
}

__device__ __forceinline__ void sync_warpgroup(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id + 1) : "memory");
}

// All that compute.
template <int kCount>
__device__ __forceinline__ void sync_warpgroups() {
  asm volatile("bar.sync %0, %1;" ::"n"(kCount + 1), "n"(kCount * 128) : "memory");
}

// All threads of a block of kThreads, from any place in the code. The second one counts those whose predicate is true.
template <int kThreads>
__device__ __forceinline__ void sync_block() {
  asm volatile("bar.sync 8, %0;" ::"n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ int count_of_block(bool mine) {
  int count;
  asm volatile("{\n.reg .pred in;\nsetp.ne.b32 in, %1, 0;\nbar.red.popc.u32 %0, 8, %2, in;\n}"
               : "=r"(count) : "r"(static_cast<int>(mine)), "n"(kThreads) : "memory");
  return count;
}

// Of a warpgroup, from those that a launch gives to all.
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <bool kBfloat16>
__device__ __forceinline__ float2 unpack(unsigned packed) {
  if constexpr (kBfloat16) return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000)};
  float2 values;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(values.x), "=f"(values.y) : "r"(packed));
  return values;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values as 16-bit ones, the first in the low half.
template <bool kBfloat16>
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned packed;
  if constexpr (kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace sta
