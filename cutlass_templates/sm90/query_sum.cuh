// The sum of dQ in global memory, which thread blocks that own keys add to.
#pragma once

namespace sta {

// It lies in parts of kPart columns, [parts, batch, heads, queries, kPart].
constexpr int kPart = 64, kParts = (kHeadDim + kPart - 1) / kPart;

// Pieces of 16 bytes of a row are swapped inside each 128 bytes, so that 8-byte writes of four rows at a time are in
// different banks of shared memory.
__device__ __forceinline__ int swizzle_sum(long long row, int column) {
  return column ^ (static_cast<int>(row & 3) << 3);
}

}  // namespace sta
