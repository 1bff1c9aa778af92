// What all kernels of attention for Hopper have in common: their problem, and how rows lie in shared memory.
#pragma once

#include "include/strided.cuh"
#include "sm90/fragments.cuh"
#include "sm90/work.cuh"

namespace sta {

constexpr int kColumnBlocks = (kHeadDim + kAtomColumns - 1) / kAtomColumns;
constexpr int kRowBytes = kColumnBlocks * kSwizzle;
static_assert(kHeadDim % 8 == 0);

}  // namespace sta
