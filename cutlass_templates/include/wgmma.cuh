// Warpgroup matrix products on operands in 128-byte swizzled shared memory, on top of CuTe's instruction structs.
#pragma once

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"

namespace sta {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// 0 .. N - 1 as a parameter pack: the instruction structs take each register by itself.
template <int... I>
struct Indices {};
template <int N, int... I>
struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I>
struct UpTo<0, I...> {
  using Type = Indices<I...>;
};

constexpr int kSwizzle = 128;              // bytes of a row of an atom
constexpr int kDepthBytes = 32;            // of columns of both operands that an instruction multiplies

// The matrix descriptor of the PTX ISA ("Matrix descriptor format"). A matrix is stored as blocks of kSwizzle
// bytes of each row; eight rows of a block are one swizzle atom. leading_bytes: from block to block, where columns are
// the contiguous dimension of a transposed operand; it is not used otherwise.
__device__ __forceinline__ unsigned long long describe(void const* matrix, int leading_bytes) {
  unsigned long long const swizzle_128 = 1ull << 62, atom_bytes = 8 * kSwizzle;
  unsigned const address = static_cast<unsigned>(__cvta_generic_to_shared(matrix));
  return swizzle_128 | (atom_bytes >> 4) << 32 | static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         (address & 0x3FFFF) >> 4;
}

// Of boxes of 16 bytes of each row, one box behind the other, without a swizzle: eight rows of one are 128 bytes. pitch: bytes
// from box to box.
__device__ __forceinline__ unsigned long long describe_groups(void const* matrix, int pitch) {
  unsigned long long const eight_rows = 8 * 16;
  unsigned const address = static_cast<unsigned>(__cvta_generic_to_shared(matrix));
  return (eight_rows >> 4) << 32 | static_cast<unsigned long long>(pitch >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

// Keeps the compiler from moving reads and writes of these registers across this point.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(unsigned (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(registers[i])::"memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kLeft of the committed groups run.
template <int kLeft = 0>
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Both operands in shared memory.
template <class Mma, int N, int... I>
__device__ __forceinline__ void product(unsigned long long a, unsigned long long b, float (&sum)[N], ScaleOut scale,
                                        Indices<I...>) {
  Mma::fma(a, b, sum[I]..., scale);
}

// The left one in registers.
template <class Mma, int N, int... I>
__device__ __forceinline__ void product(unsigned const* a, unsigned long long b, float (&sum)[N],
                                        Indices<I...>, ScaleOut scale = ScaleOut::One) {
  Mma::fma(a[0], a[1], a[2], a[3], b, sum[I]..., scale);
}

}  // namespace sta
