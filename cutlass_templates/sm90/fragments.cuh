// A thread's part of the 64 rows of a warpgroup: elements 0, 1 of each four are of row `lane / 4` of its warp's 16, elements
// 2, 3 of the row eight below (PTX ISA, "Register fragments for wgmma").
#pragma once

#include "include/packed_walk.cuh"
#include "include/ptx.cuh"
#include "sm90/row_layout.cuh"

namespace sta {

// left . right^T over columns: 64 rows of `left` by 2 * kCount rows of `right`. Both lie in blocks of columns as Layout says,
// by kLeftRows and kRightRows rows.
template <class Layout, class Mma, int kLeftRows, int kRightRows, int kCount>
__device__ __forceinline__ void multiply_rows(void const* left, void const* right, float (&sum)[kCount]) {
  auto const a = describe(left, 0), b = describe(right, 0);
#pragma unroll
  for (int i = 0; i < (kHeadDim + Layout::kDepth - 1) / Layout::kDepth; i++) {
    int const column = i * Layout::kDepth, block = column / Layout::kAtomColumns;
    int const offset = column % Layout::kAtomColumns * Layout::kBytes;
    product<Mma>(a + (block * kLeftRows * kSwizzle + offset) / 16, b + (block * kRightRows * kSwizzle + offset) / 16, sum,
                 i == 0 ? ScaleOut::Zero : ScaleOut::One, typename UpTo<kCount>::Type());
  }
  commit_products();
}

// Adds left . rows over kRows rows, in blocks of kAtomColumns columns. left: 64 rows of fragments, 16-bit elements.
template <class Mma, int kRows, int kCount>
__device__ __forceinline__ void add_rows(unsigned const (&left)[kRows / 4], void const* rows, float (&sum)[kCount]) {
  auto const b = describe(rows, kRows * kSwizzle);
#pragma unroll
  for (int i = 0; i < kRows / 16; i++)
    product<Mma>(left + 4 * i, b + i * 16 * kSwizzle / 16, sum, typename UpTo<kCount>::Type());
  commit_products();
}

// Scores of keys that do not count become -infinity. seen: for each two groups of kGroup keys, which do. Key `i` of a group
// is column i, or with 8-bit operands column i / 2 % 2 * 8 + i / 4 * 2 + i % 2: then a thread has four keys in a row.
template <class Layout, int kCount>
__device__ __forceinline__ void hide_unseen(unsigned const* seen, int lane, float (&scores)[kCount]) {
  constexpr int kGroups = kCount / 8, kWords = (kGroups + 1) / 2;
  unsigned words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = seen[i];
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    unsigned const of_group = words[g / 2] >> g % 2 * kGroup & 0xFFFF;
    if (of_group == 0xFFFF) continue;
    unsigned const mine = of_group >> lane % 4 * (4 / Layout::kBytes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int const key = i / 4 * (Layout::kBytes == 1 ? 2 : 8) + i % 2;
      if (!(mine >> key & 1)) scores[8 * g + i] = -kInfinity;
    }
  }
}

// The fragment times factor (of each of the thread's two rows) to global memory as 16-bit elements, through shared
// memory, so that whole rows leave in pieces of 16 bytes. Each warp uses its own rows of `own`, in blocks of kSwizzle bytes
// by kBlockRows rows. lane: thread of the warpgroup. out: this warp's first row, of `rows` that exist.
template <int kBlockRows, int kCount>
__device__ __forceinline__ void store_rows(unsigned char* own, int lane, float const (&values)[kCount], float const (&factor)[2],
                                           int rows, Element* out, long long stride) {
  constexpr int kBlockColumns = kSwizzle / sizeof(Element);
  int const row = lane / 32 * 16 + lane % 32 / 4;
  auto const place = [&](int row, int column) {
    int const piece = column % kBlockColumns / 8 ^ row % 8;
    return own + column / kBlockColumns * kBlockRows * kSwizzle + row * kSwizzle + piece * 16 + column % 8 * 2;
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    int const r = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2;
    *reinterpret_cast<unsigned*>(place(row + 8 * r, column)) = pack<kBfloat16>(values[i] * factor[r], values[i + 1] * factor[r]);
  }
  __syncwarp();
  constexpr int kPieces = kCount * 2 / 8;
  for (int i = lane % 32; i < 16 * kPieces; i += 32) {
    int const from = lane / 32 * 16 + i / kPieces, column = i % kPieces * 8;
    uint4 const piece = *reinterpret_cast<uint4 const*>(place(from, column));
    if (i / kPieces < rows) *reinterpret_cast<uint4*>(out + i / kPieces * stride + column) = piece;
  }
}

}  // namespace sta
