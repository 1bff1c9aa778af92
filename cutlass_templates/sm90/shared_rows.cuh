// What forward kernels have in common: their shared memory, and warpgroups that take the same rows with different keys.
#pragma once

#include "sm90/key_loader.cuh"

namespace sta {

// Layout: of queries. KeyStages: of keys and values, with kInFlight blocks of each.
template <class Layout, class KeyStages, int kInFlight>
struct SharedRows {
  alignas(1024) unsigned char q[kWarpgroups][kRows * Layout::kRowBytes];
  KeyStages stages;
  KeyState<kInFlight> keys;
  Barrier q_full;
  int first[4 * kWarpgroups];  // query row of each warp, -1 without one
};

// A block of another warpgroup. All threads see each phase of a barrier: a wait can't tell one from the next but one. r: counts
// the blocks of the rest.
template <bool kRest, int kInFlight>
__device__ __forceinline__ void pass_block(KeyState<kInFlight>& keys, int id, int lane, int r, int stage, int parity) {
  wait(keys.k_full[stage], parity);
  wait(keys.v_full[stage], parity);
  if constexpr (kRest) arrive(keys.seen_empty[r % kInFlight]);
  sync_warpgroup(id);
  if (lane == 0) {
    arrive(keys.k_empty[stage]);
    arrive(keys.v_empty[stage]);
  }
}

// Warpgroup `id` has output and total relative to 2^top: the first one adds the others' to its own, and is told so.
template <class Shared>
__device__ __forceinline__ bool add_parts(Shared& s, int id, int lane, float (&output)[kOutputs], float (&top)[2], float (&total)[2]) {
  // Registers by thread. Nobody reads queries, keys or values any more, and all loads have come.
  constexpr int kPart = (kOutputs + 4) * 128;
  static_assert((kWarpgroups - 1) * kPart * sizeof(float) <= (kWarpgroups - 1) * sizeof(s.q[0]) + sizeof(s.stages));
  float* const parts = reinterpret_cast<float*>(s.q[1]) + lane;
  sync_warpgroups<kWarpgroups>();
  if (id > 0) {
    float* const mine = parts + (id - 1) * kPart;
#pragma unroll
    for (int i = 0; i < kOutputs; i++) mine[i * 128] = output[i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      mine[(kOutputs + r) * 128] = top[r];
      mine[(kOutputs + 2 + r) * 128] = total[r];
    }
  }
  sync_warpgroups<kWarpgroups>();
  if (id > 0) return false;
#pragma unroll 1
  for (int other = 0; other < kWarpgroups - 1; other++) {
    float const* const part = parts + other * kPart;
    float decay[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float const theirs = part[(kOutputs + r) * 128], renewed = fmaxf(top[r], theirs);
      decay[r] = renewed == -kInfinity ? 1.f : exp2_approx(top[r] - renewed);
      weight[r] = renewed == -kInfinity ? 1.f : exp2_approx(theirs - renewed);
      top[r] = renewed;
      total[r] = total[r] * decay[r] + part[(kOutputs + 2 + r) * 128] * weight[r];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i++) output[i] = output[i] * decay[i / 2 % 2] + part[i * 128] * weight[i / 2 % 2];
  }
  return true;
}

}  // namespace sta
