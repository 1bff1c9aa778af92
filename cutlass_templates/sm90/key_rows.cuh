// Keys and values of 16 bits, as rows of tokens, and their loads.
#pragma once

#include "sm90/key_loader.cuh"

namespace sta {

static_assert(kKeys / kGroup * kColumnBlocks <= 32, "a lane loads one box of the rest");

struct KeyMaps {
  TensorMap k, v;              // boxes of kAtomColumns columns by kKeys tokens
  TensorMap k_group, v_group;  // by kGroup tokens
};

struct KeyStages {
  alignas(1024) unsigned char k[kStages][kKeys * kRowBytes];
  alignas(1024) unsigned char v[kStages][kKeys * kRowBytes];
};

// One warp. A weight of zero is not enough for values: 0 * NaN is NaN, and keys of other runs must have no effect.
__device__ __forceinline__ void clear_unseen(unsigned char* rows, unsigned const* seen) {
  constexpr int kPieces = kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kKeys * kPieces; i += 32) {
    int const key = i / kPieces, piece = i % kPieces;
    if (!(seen[key / (2 * kGroup)] >> key % (2 * kGroup) & 1))
      *reinterpret_cast<uint4*>(rows + piece / 8 * kKeys * kSwizzle + key * kSwizzle + piece % 8 * 16) = {};
  }
  fence_shared_writes();
  __syncwarp();
}

struct KeyRows {
  KeyMaps const& maps;
  KeyStages& stages;
  static constexpr int kKeyBytes = kKeys * kRowBytes, kValueBytes = kKeyBytes;  // of a block
  static constexpr bool kClears = true, kAligned = false;
  static constexpr int kInFlight = kStages;

  // One thread: whole blocks.
  __device__ __forceinline__ void load_keys(int stage, Barrier& full, int token, int head, int batch) const {
    load(stages.k[stage], maps.k, full, token, head, batch);
  }
  __device__ __forceinline__ void load_values(int stage, Barrier& full, int token, int head, int batch) const {
    load(stages.v[stage], maps.v, full, token, head, batch);
  }
  __device__ __forceinline__ void load(unsigned char* to, TensorMap const& map, Barrier& full, int token, int head, int batch) const {
    for (int c = 0; c < kColumnBlocks; c++)
      load_box(to + c * kKeys * kSwizzle, map, full, c * kAtomColumns, token, head, batch);
  }

  // A warp's lanes, each with the token of its group: column block lane % kColumnBlocks of group_of(lane).
  __device__ __forceinline__ static int group_of(int lane) { return lane / kColumnBlocks; }
  __device__ __forceinline__ void load_key_group(int stage, Barrier& full, int token, int head, int batch) const {
    load_group(stages.k[stage], maps.k_group, full, token, head, batch);
  }
  __device__ __forceinline__ void load_value_group(int stage, Barrier& full, int token, int head, int batch) const {
    load_group(stages.v[stage], maps.v_group, full, token, head, batch);
  }
  __device__ __forceinline__ void load_group(unsigned char* to, TensorMap const& map, Barrier& full, int token, int head, int batch) const {
    int const lane = threadIdx.x % 32, c = lane % kColumnBlocks, g = group_of(lane);
    if (g < kKeys / kGroup)
      load_box(to + c * kKeys * kSwizzle + g * kGroup * kSwizzle, map, full, c * kAtomColumns, token, head, batch);
  }

  __device__ __forceinline__ void clear_keys(int stage, unsigned const* seen) const { clear_unseen(stages.k[stage], seen); }
  __device__ __forceinline__ void clear_values(int stage, unsigned const* seen) const { clear_unseen(stages.v[stage], seen); }
};

}  // namespace sta
