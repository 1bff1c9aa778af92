// How rows of kHeadDim elements lie in shared memory.
#pragma once

#include "include/wgmma.cuh"

namespace sta {

// Blocks of kAtomColumns columns, one behind the other, of elements of kElementBytes.
template <int kElementBytes>
struct RowLayout {
  static constexpr int kBytes = kElementBytes, kAtomColumns = kSwizzle / kBytes, kDepth = kDepthBytes / kBytes;
  static constexpr int kColumnBlocks = (kHeadDim + kAtomColumns - 1) / kAtomColumns, kRowBytes = kColumnBlocks * kSwizzle;
};
using Halves = RowLayout<2>;
using Bytes = RowLayout<1>;
static_assert(kHeadDim % 8 == 0);

// Of rows of 16 bits, which all kernels have.
constexpr int kAtomColumns = Halves::kAtomColumns, kColumnBlocks = Halves::kColumnBlocks, kRowBytes = Halves::kRowBytes;

}  // namespace sta
