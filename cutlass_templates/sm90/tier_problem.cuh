// Parameters of the forward kernel with tiers, and which keys a row of queries reads in which tier.
//
// A row is the query rows of one thread block: of one tile, since the launch has windows of one tile. A key block is up to
// kKeys keys of one tile. Every block of every row has a tier: its keys are read in 16 bits, in e4m3, or as their means.
#pragma once

#include "sm90/key_bytes.cuh"
#include "sm90/key_rows.cuh"

namespace sta {

constexpr int kTiers = 2;  // of keys; means are what is left

struct TierParameters {
  TensorMap q;            // boxes of kAtomColumns columns by kGroup tokens
  KeyMaps keys;
  TensorMap mean_k, mean_v;  // [batch, key heads, key blocks, columns], boxes as of k and v
  TensorMap slope;           // [batch, key heads, columns of v, columns of q], a box as of k
  TensorMap q_bytes;      // boxes of kHeadDim columns by kGroup tokens
  ByteMaps byte_keys;
  Output out;
  float* lse;             // [batch, heads, queries]
  float const* q_scale;   // of the bytes, as in forward_problem_fp8.cuh
  float const* k_scale;
  float const* v_scale;
  float const* shift;
  float const* bias;      // [batch, heads, rows, mean_blocks * kKeys]: what scores of means get, -infinity where they don't count
  int const* order;       // [batch, heads, rows, key_blocks]: key blocks in 16 bits, then those in e4m3
  int const* counts;      // [batch, heads, rows, kTiers]
  Run const* blocks;      // [key_blocks], tokens of the video
  Run const* byte_blocks;  // [key_blocks], tokens of the bytes, which are of the video alone
  int kv_heads, key_blocks, mean_blocks;
  Problem problem;
};

// A row of the lists. Rows that see the whole video, and those of contexts, have none.
struct TierRow {
  bool listed;
  long long index;  // in [batch, heads, rows]

  __device__ __forceinline__ TierRow(Problem const& p, Work const& work) : listed(!work.whole), index(0) {
    // Thread blocks of the video come after those of contexts, head by head, each head with as many.
    static_assert(!kHeadWindows);
    if (listed) index = blockIdx.x - p.batch_heads * p.context_blocks;
  }
};

// tier 0: in 16 bits, and the contexts; tier 1: in e4m3.
template <int kTier>
struct ListedKeys : Keys<kTier == 1> {
  using Base = Keys<kTier == 1>;
  int const* list = nullptr;
  Run const* blocks;

  __device__ __forceinline__ ListedKeys(TierParameters const& p, Work const& work) : Base(p.problem, work), blocks(kTier == 1 ? p.byte_blocks : p.blocks) {
    TierRow const row(p.problem, work);
    if (!row.listed) return;
    int const* const counts = p.counts + row.index * kTiers;
    list = p.order + row.index * p.key_blocks + (kTier == 1 ? counts[0] : 0);
    this->of_video = counts[kTier];
    this->count = this->of_video + (kTier == 0 ? p.problem.contexts : 0);
  }

  __device__ __forceinline__ Run at(int index) const {
    if (list == nullptr || (kTier == 0 && index >= this->of_video)) return Base::at(index);
    if (index >= this->of_video) return {0, 0};
    Run run = blocks[list[index]];
    if constexpr (kTier == 0) run.start += this->p.video_key;
    return run;
  }
};

}  // namespace sta
