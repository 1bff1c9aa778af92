// The groups of the packed rest, listed by a warp of its own: the warp that loads them has no time for arithmetic.
#pragma once

#include "include/packed_walk.cuh"
#include "include/ptx.cuh"

namespace sta {

// kGroup tokens from `token` on; bit i of `seen`: token i counts.
struct ListedGroup {
  int token;
  unsigned seen;
};

template <int kGroups>
struct GroupList {
  static constexpr int kSlots = 4;  // blocks of the rest that are listed ahead

  ListedGroup groups[kSlots][kGroups];
  Barrier full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < kSlots; i++) {
      init(full[i], kGroups);
      init(empty[i], kGroups);
    }
  }

  // One warp. flags_of(run): flags of its tokens, or null. block: counts all blocks of the rest.
  template <class Walk, class Flags>
  __device__ __forceinline__ void fill(Walk& walk, Flags flags_of, int& block) {
    int const lane = threadIdx.x % 32;
    ListedGroup mine = {0, 0};
    unsigned char const* flags = nullptr;
    walk.rest(
        [&](int g, Packed const& packed) {
          if (g != lane) return;
          mine = {packed.first, (1u << packed.to) - (1u << packed.from)};
          flags = flags_of(packed.run);
        },
        [&] {
          if (flags != nullptr) {
#pragma unroll 1
            for (int i = 0; i < kGroup; i++)
              if ((mine.seen >> i & 1) && !flags[mine.token + i]) mine.seen &= ~(1u << i);
          }
          int const slot = block % kSlots;
          if (lane < kGroups) {
            wait(empty[slot], block / kSlots % 2 ^ 1);
            groups[slot][lane] = mine;
            arrive(full[slot]);
          }
          __syncwarp();
          block++;
        });
  }

  // One warp: group `lane` of a block of the rest.
  __device__ __forceinline__ ListedGroup take(int block) {
    int const lane = threadIdx.x % 32, slot = block % kSlots;
    ListedGroup mine = {0, 0};
    if (lane < kGroups) {
      wait(full[slot], block / kSlots % 2);
      mine = groups[slot][lane];
      arrive(empty[slot]);
    }
    __syncwarp();
    return mine;
  }
};

}  // namespace sta
