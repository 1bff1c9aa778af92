// A walk over runs of tokens, by one warp: first the blocks of kBlock tokens that lie wholly in a run, then the rest of all
// runs, packed in groups of kGroup tokens.
#pragma once

#include "include/key_runs.cuh"

namespace sta {

// Part of a block of the rest: tokens `first + from` to `first + to`. The box of kGroup tokens from `first` on holds
// others too where the run is shorter, or where it overlaps the group before.
struct Packed {
  int first, from, to, run;
};

// Side has `count` runs, at(index) -> Run, and in_blocks(index, run) -> tokens of the run that are walked in whole blocks.
// kAligned: blocks and groups start at multiples of kGroup, whatever their run does.
template <int kBlock, class Side>
struct Walk {
  static constexpr int kGroups = kBlock / kGroup;

  Side const& side;
  int const lane;
  // Lane i holds run i of each 32, so that a block does not wait for the arithmetic of its first loads.
  Run mine;
  int blocks, rest_blocks;
  bool shorter;  // is a run shorter than a group?

  __device__ __forceinline__ explicit Walk(Side const& side) : side(side), lane(threadIdx.x % 32) { start(); }

  // Reads the side anew.
  __device__ __forceinline__ void start() {
    mine = side.at(lane);
    blocks = 0;
    shorter = false;
    int groups = 0;
    auto const count = [&](int index, Run const& run) {
      int const before = before_blocks(run), in_blocks = in_blocks_of(index, run);
      blocks += in_blocks / kBlock;
      groups += (before > 0) + (run.length - before - in_blocks + kGroup - 1) / kGroup;
      shorter |= run.length > 0 && run.length < kGroup;
    };
    if (lane < side.count) count(lane, mine);
#pragma unroll 1
    for (int index = lane + 32; index < side.count; index += 32) count(index, side.at(index));
    shorter = __any_sync(~0u, shorter);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      blocks += __shfl_xor_sync(~0u, blocks, d);
      groups += __shfl_xor_sync(~0u, groups, d);
    }
    rest_blocks = (groups + kGroups - 1) / kGroups;
  }

  __device__ __forceinline__ Run run_at(int index) {
    if (side.count > 32 && index % 32 == 0) mine = side.at(index + lane);
    return Run{__shfl_sync(~0u, mine.start, index % 32), __shfl_sync(~0u, mine.length, index % 32)};
  }

  // Tokens of a run before its whole blocks.
  __device__ __forceinline__ static int before_blocks(Run const& run) {
    return Side::kAligned ? min(run.length, -run.start & (kGroup - 1)) : 0;
  }
  __device__ __forceinline__ int in_blocks_of(int index, Run const& run) const {
    int const before = before_blocks(run);
    return side.in_blocks(index, Run{run.start + before, run.length - before});
  }

  // Token of the first whole block; -1 if none of the first 32 runs has one.
  __device__ __forceinline__ int first_whole() const {
    unsigned const having = __ballot_sync(~0u, lane < side.count && in_blocks_of(lane, mine) >= kBlock);
    return having == 0 ? -1 : __shfl_sync(~0u, mine.start + before_blocks(mine), __ffs(having) - 1);
  }

  // block(token) for each whole block.
  template <class Block>
  __device__ __forceinline__ void whole(Block block) {
    for (int index = 0; index < side.count; index++) {
      Run const run = run_at(index);
      for (int i = 0; i < in_blocks_of(index, run) / kBlock; i++) block(run.start + before_blocks(run) + i * kBlock);
    }
  }

  // group(g, packed) for each of kGroups groups, and then block(), for each block of the rest. A group ends where the next
  // one starts or its run ends, and unless kAligned never starts before its run does. A block that is not full repeats its
  // last box.
  template <class Group, class Block>
  __device__ __forceinline__ void rest(Group group, Block block) {
    int index = 0, left = 0, rest = 0, at = 0;
    Run run = {0, 0};
    Packed packed = {0, 0, 0, 0};
    for (int r = 0; r < rest_blocks; r++) {
#pragma unroll 1
      for (int g = 0; g < kGroups; g++) {
        while (left == 0 && index < side.count) {
          run = run_at(index);
          int const before = before_blocks(run);
          rest = run.length - before - in_blocks_of(index, run);
          left = (before > 0) + (rest + kGroup - 1) / kGroup;
          at = before > 0 ? run.start : run.start + run.length - rest;
          packed.run = index++;
        }
        packed.from = packed.to = 0;
        if (left > 0) {
          int const end = run.start + run.length;
          left--;
          if constexpr (Side::kAligned) {
            packed.first = at & ~(kGroup - 1);
            packed.from = at - packed.first;
            packed.to = min(end - packed.first, kGroup);
            at = packed.from > 0 ? end - rest : at + kGroup;
          } else {
            packed.first = max(run.start, end - (left + 1) * kGroup);
            packed.from = max(end - rest - packed.first, 0);
            packed.to = min(end - left * kGroup - packed.first, kGroup);
          }
        }
        group(g, packed);
      }
      block();
    }
  }
};

}  // namespace sta
