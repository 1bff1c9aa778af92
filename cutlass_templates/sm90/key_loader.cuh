// The producer: which keys does a thread block read, and their loads.
#pragma once

#include "sm90/forward_problem.cuh"

namespace sta {

struct Shared {
  alignas(1024) unsigned char q[kWarpgroups][kRows * kRowBytes];
  alignas(1024) unsigned char k[kStages][kKeys * kRowBytes];
  alignas(1024) unsigned char v[kStages][kKeys * kRowBytes];
  Barrier q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], v_loaded;
  int first[kWarpgroups];  // query row
  int blocks, rest_blocks;
  unsigned short seen[kStages][kKeys / kGroup];  // bit i: key i of the group counts
};
static_assert(offsetof(Shared, seen) + sizeof(Shared::seen) + 1023 <= kSharedBytes,
              "the host asks for kSharedBytes, of which up to 1023 align the struct");

// Runs of keys: of the video's window, then one for each context.
struct Keys {
  Parameters const& p;
  int batch;
  Runs video;
  int of_video, count;
  bool masked;  // the video

  __device__ __forceinline__ Keys(Parameters const& p, Work const& work)
      : p(p), batch(work.batch), video(box_of<false>(p, work)), masked(work.masked) {
    of_video = video.count_t * video.count_h;
    count = of_video + p.contexts;
  }

  __device__ __forceinline__ Run at(int index) const {
    if (index < of_video) {
      Run run = video.at(index / video.count_h, index % video.count_h);
      run.start += p.video_key;
      return run;
    }
    index -= of_video;
    if (index >= p.contexts) return {0, 0};
    int valid = p.context_length[index];
    if (p.lengths != nullptr) {
      int const at = batch * p.contexts + index;
      long long const given = p.length_bytes == 8 ? static_cast<long long const*>(p.lengths)[at]
                                                  : static_cast<int const*>(p.lengths)[at];
      valid = static_cast<int>(max(0ll, min(given, static_cast<long long>(valid))));
    }
    return {p.context_key[index], valid};
  }

  // Keys of a run that are walked in whole blocks: none where each key may be hidden.
  __device__ __forceinline__ int in_blocks(int index, Run const& run) const {
    bool const picky = index < of_video ? masked : p.key_mask != nullptr;
    return picky ? 0 : run.length / kKeys * kKeys;
  }

  // Flags of a run by token, or null.
  __device__ __forceinline__ unsigned char const* flags(int index) const {
    if (index < of_video) {
      long long const tokens = p.axis[0].length * p.axis[1].length * p.axis[2].length;
      return masked ? p.video_mask + batch * tokens - p.video_key : nullptr;
    }
    index -= of_video;
    if (p.key_mask == nullptr) return nullptr;
    return p.key_mask + static_cast<long long>(batch) * p.context_keys + p.context_column[index] - p.context_key[index];
  }
};

// One warp. A weight of zero is not enough for values: 0 * NaN is NaN, and keys of other runs must have no effect.
__device__ __forceinline__ void clear_unseen(Shared& s, int stage) {
  constexpr int kPieces = kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kKeys * kPieces; i += 32) {
    int const key = i / kPieces, piece = i % kPieces;
    if (!(s.seen[stage][key / kGroup] >> key % kGroup & 1))
      *reinterpret_cast<uint4*>(s.v[stage] + piece / 8 * kKeys * kSwizzle + key * kSwizzle + piece % 8 * 16) = {};
  }
  fence_shared_writes();
  __syncwarp();
}

// One warp. Lane i holds run i of each 32, so that a block does not wait for the arithmetic of its first loads.
__device__ __forceinline__ void produce(Parameters const& p, Shared& s, Work const& work, Keys const& keys, int active) {
  int const lane = threadIdx.x % 32;
  int const kv_head = p.by_share.divide(work.head);
  Run mine = keys.at(lane);
  int blocks = 0, groups = 0;
  // Do boxes of the rest hold keys that their run does not have, or that are hidden?
  bool foreign = work.masked || p.key_mask != nullptr;
  auto const count = [&](int index, Run const& run) {
    int const in_blocks = keys.in_blocks(index, run);
    blocks += in_blocks / kKeys;
    groups += (run.length - in_blocks + kGroup - 1) / kGroup;
    foreign |= run.length > 0 && run.length < kGroup;
  };
  if (lane < keys.count) count(lane, mine);
#pragma unroll 1
  for (int index = lane + 32; index < keys.count; index += 32) count(index, keys.at(index));
  foreign = __any_sync(~0u, foreign);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    blocks += __shfl_xor_sync(~0u, blocks, d);
    groups += __shfl_xor_sync(~0u, groups, d);
  }
  constexpr int kGroups = kKeys / kGroup;
  int const rest_blocks = (groups + kGroups - 1) / kGroups;
  bool const leader = lane == 0;
  if (leader) {
    s.blocks = blocks;
    s.rest_blocks = rest_blocks;
    expect(s.q_full, active * kRows * kRowBytes);
    for (int w = 0; w < active; w++)
      for (int c = 0; c < kColumnBlocks; c++)
        load_box(s.q[w] + c * kRows * kSwizzle, p.q, s.q_full, c * kAtomColumns, s.first[w], work.head, work.batch);
    arrive(s.q_full);
  }
  auto const run_at = [&](int index) {
    if (index >= 32 && index % 32 == 0) mine = keys.at(index + lane);
    return Run{__shfl_sync(~0u, mine.start, index % 32), __shfl_sync(~0u, mine.length, index % 32)};
  };
  int j = 0;
  for (int index = 0; index < keys.count; index++) {
    Run const run = run_at(index);
    for (int i = 0; i < keys.in_blocks(index, run) / kKeys; i++, j++) {
      int const stage = j % kStages, parity = j / kStages % 2 ^ 1, token = run.start + i * kKeys;
      if (leader) {
        wait(s.k_empty[stage], parity);
        expect(s.k_full[stage], kKeys * kRowBytes);
        for (int c = 0; c < kColumnBlocks; c++)
          load_box(s.k[stage] + c * kKeys * kSwizzle, p.k, s.k_full[stage], c * kAtomColumns, token, kv_head, work.batch);
        arrive(s.k_full[stage]);
        wait(s.v_empty[stage], parity);
        expect(s.v_full[stage], kKeys * kRowBytes);
        for (int c = 0; c < kColumnBlocks; c++)
          load_box(s.v[stage] + c * kKeys * kSwizzle, p.v, s.v_full[stage], c * kAtomColumns, token, kv_head, work.batch);
        arrive(s.v_full[stage]);
      }
      __syncwarp();
    }
  }
  // The rest: groups of 16 keys. A group ends where the next one starts or its run ends, and never starts before
  // its run does. Lane i loads column block i % kColumnBlocks of group i / kColumnBlocks.
  if (keys.count > 32) mine = keys.at(lane);
  int index = 0, left = 0, rest = 0, at = 0;
  Run run = {0, 0};
  for (int first = j; j < blocks + rest_blocks; j++) {
    int const stage = j % kStages, parity = j / kStages % 2 ^ 1;
    int token = 0;
    unsigned seen = 0;
    unsigned char const* flags = nullptr;
#pragma unroll 1
    for (int g = 0; g < kGroups; g++) {
      while (left == 0 && index < keys.count) {
        run = run_at(index);
        rest = run.length - keys.in_blocks(index, run);
        left = (rest + kGroup - 1) / kGroup;
        index++;
      }
      int from = 0, to = 0;  // a block that is not full repeats its last group
      if (left > 0) {
        int const end = run.start + run.length;
        left--;
        at = max(run.start, end - (left + 1) * kGroup);
        from = max(end - rest - at, 0);
        to = min(end - left * kGroup - at, kGroup);
      }
      if (g == lane / kColumnBlocks) token = at;
      if (g == lane) {
        seen = (1u << to) - (1u << from);
        flags = keys.flags(index - 1);
        if (flags != nullptr) flags += at;
      }
    }
    if (flags != nullptr) {
#pragma unroll 1
      for (int i = 0; i < kGroup; i++)
        if ((seen >> i & 1) && !flags[i]) seen &= ~(1u << i);
    }
    int const c = lane % kColumnBlocks, g = lane / kColumnBlocks;
    int const to = c * kKeys * kSwizzle + g * kGroup * kSwizzle;
    Barrier& v_full = foreign ? s.v_loaded : s.v_full[stage];
    wait(s.k_empty[stage], parity);
    if (leader) expect(s.k_full[stage], kKeys * kRowBytes);
    __syncwarp();
    if (g < kGroups) load_box(s.k[stage] + to, p.k_group, s.k_full[stage], c * kAtomColumns, token, kv_head, work.batch);
    if (lane < kGroups) s.seen[stage][lane] = static_cast<unsigned short>(seen);
    __syncwarp();
    if (leader) arrive(s.k_full[stage]);
    wait(s.v_empty[stage], parity);
    if (leader) expect(v_full, kKeys * kRowBytes);
    __syncwarp();
    if (g < kGroups) load_box(s.v[stage] + to, p.v_group, v_full, c * kAtomColumns, token, kv_head, work.batch);
    __syncwarp();
    if (leader) arrive(v_full);
    if (foreign) {
      wait(s.v_loaded, (j - first) % 2);
      clear_unseen(s, stage);
      if (leader) arrive(s.v_full[stage]);
    }
  }
}

}  // namespace sta
