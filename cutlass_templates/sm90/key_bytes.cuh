// Keys and values in e4m3, and their loads. Tensor cores multiply 8-bit operands only along contiguous bytes, so values are
// stored transposed: [batch, head, column, token]. The TMA unit reads from multiples of 16 bytes only, so that blocks and
// groups of keys start at multiples of 16 tokens; of those at the ends of a run some are not the run's.
//
// Weights take the place of scores in registers. In a thread, scores are of columns 8n + 2t + (0, 1) of each 16, t its lane % 4,
// but four weights in a row of the operand are of keys 4t + (0 .. 3) (PTX ISA, "wgmma.mma_async", fragments of .e4m3). So
// rows of keys are stored in the order in which row 8n + 2t + i of each 16 is key 4t + 2n + i.
#pragma once

#include "sm90/key_loader.cuh"

namespace sta {

static_assert(Bytes::kColumnBlocks == 1, "a row of keys is one block of columns");
static_assert(kKeys == kSwizzle, "a row of transposed values is one block of bytes");

struct ByteMaps {
  TensorMap k, v;              // boxes of kSwizzle columns by kKeys tokens, and of kKeys tokens by kHeadDim columns
  TensorMap k_group, v_group;  // of kGroup tokens; those of values without a swizzle
};

constexpr int kOnes = 8;  // columns of ones beside those of values, whose sums are those of weights
constexpr int kBlockValues = kKeys * kHeadDim;
// In the rest each group of kGroup keys is a box of its own: kGroup bytes of each column, and ones behind them.
constexpr int kGroupValues = kGroup * kHeadDim, kGroupPitch = kGroupValues + kGroup * kOnes;

struct ByteStages {
  alignas(1024) unsigned char k[kByteStages][kKeys * Bytes::kRowBytes];
  alignas(1024) unsigned char v[kByteStages][kKeys * (kHeadDim + kOnes)];
};

struct KeyBytes {
  ByteMaps const& maps;
  ByteStages& stages;
  static constexpr int kKeyBytes = kKeys * Bytes::kRowBytes, kValueBytes = kBlockValues;  // of a block
  static constexpr bool kClears = false;  // hidden keys have no values that are not finite
  static constexpr bool kAligned = true;  // transposed rows are loaded from multiples of 16 bytes
  static constexpr int kInFlight = kByteStages;

  // One thread: whole blocks.
  __device__ __forceinline__ void load_keys(int stage, Barrier& full, int token, int head, int batch) const {
    load_box(stages.k[stage], maps.k, full, 0, token, head, batch);
  }
  __device__ __forceinline__ void load_values(int stage, Barrier& full, int token, int head, int batch) const {
    load_box(stages.v[stage], maps.v, full, token, 0, head, batch);
  }

  // A warp's lanes, each with the token of its group.
  __device__ __forceinline__ static int group_of(int lane) { return lane; }
  __device__ __forceinline__ void load_key_group(int stage, Barrier& full, int token, int head, int batch) const {
    int const g = threadIdx.x % 32;
    if (g < kKeys / kGroup) load_box(stages.k[stage] + g * kGroup * kSwizzle, maps.k_group, full, 0, token, head, batch);
  }
  __device__ __forceinline__ void load_value_group(int stage, Barrier& full, int token, int head, int batch) const {
    unsigned char* const values = stages.v[stage];
    int const g = threadIdx.x % 32;
    if (g < kKeys / kGroup) {
      write_ones<kGroup * kOnes>(values + g * kGroupPitch + kGroupValues);
      fence_shared_writes();
      load_box(values + g * kGroupPitch, maps.v_group, full, token, 0, head, batch);
    }
  }

  // One warp: for whole blocks.
  __device__ __forceinline__ void start() const {
    for (int i = threadIdx.x % 32; i < kByteStages * kOnes; i += 32)
      write_ones<kKeys>(stages.v[i / kOnes] + kBlockValues + i % kOnes * kKeys);
    fence_shared_writes();
    __syncwarp();
  }

  template <int kCount>
  __device__ __forceinline__ static void write_ones(unsigned char* to) {
    unsigned constexpr kFour = 0x38383838;  // of e4m3
#pragma unroll
    for (int i = 0; i < kCount; i += 16) *reinterpret_cast<uint4*>(to + i) = {kFour, kFour, kFour, kFour};
  }

  __device__ __forceinline__ void clear_keys(int, unsigned const*) const {}
  __device__ __forceinline__ void clear_values(int, unsigned const*) const {}
};

}  // namespace sta
