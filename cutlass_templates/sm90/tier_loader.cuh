// The producer of the forward kernel with tiers: keys in 16 bits, then blocks of means in the same stages, then keys in
// e4m3, whose stages take the place of the others.
#pragma once

#include "sm90/tier_problem.cuh"

namespace sta {

// What the loader and the consumers share; as a KeyState it is that of the keys in 16 bits and of means.
struct TierState : KeyState<kStages> {
  KeyState<kByteStages> bytes;
  Barrier q_bytes_full;
  alignas(16) float bias[kStages][kKeys];  // of scores of means

  __device__ __forceinline__ void init_loads() {
    KeyState<kStages>::init_loads();
    bytes.init_loads();
    init(q_bytes_full, 1);
  }
  __device__ __forceinline__ void init_releases(int readers) {
    KeyState<kStages>::init_releases(readers);
    bytes.init_releases(readers);
  }
  __device__ __forceinline__ void init_list() {
    KeyState<kStages>::init_list();
    bytes.init_list();
  }
};

struct TierSource {
  TierParameters const& p;
  KeyRows rows;
  KeyBytes bytes;
};

// One warp.
struct TierLoader {
  using Runs = ListedKeys<0>;
  using RowLoader = KeyLoader<false, KeyRows, Runs>;
  using ByteLoader = KeyLoader<false, KeyBytes, ListedKeys<1>>;

  TierSource const& source;
  TierState& s;
  Work const& work;
  RowLoader rows;
  Walk<kKeys, Runs>& walk;

  __device__ __forceinline__ static Runs runs(Problem const&, TierSource const& source, Work const& work) { return Runs(source.p, work); }

  __device__ __forceinline__ TierLoader(Problem const& p, TierSource const& source, TierState& s, Work const& work, Runs const& keys)
      : source(source), s(s), work(work), rows(p, source.rows, s, work, keys), walk(rows.walk) {}

  // One warp, beside the one that loads.
  __device__ __forceinline__ static void list(TierState& s, Runs const& keys, TierSource const& source, Work const& work) {
    RowLoader::list(s, keys, source.rows, work);
    if (TierRow(source.p.problem, work).listed) ByteLoader::list(s.bytes, ListedKeys<1>(source.p, work), source.bytes, work);
  }

  __device__ __forceinline__ void start() { rows.start(); }
  __device__ __forceinline__ void abandon() { rows.abandon(); }

  __device__ __forceinline__ void load_all() {
    rows.load_all();
    TierRow const row(source.p.problem, work);
    if (!row.listed) return;
    ListedKeys<1> const keys(source.p, work);
    ByteLoader bytes(source.p.problem, source.bytes, s.bytes, work, keys);
    bytes.tell_counts();  // before the means come, for which all wait
    int const before = walk.blocks + walk.rest_blocks, all = before + source.p.mean_blocks;
    load_means(row, before);
    if (bytes.walk.blocks + bytes.walk.rest_blocks == 0) return;
    for (int i = 0; i < kStages; i++) {  // of all that was loaded, with the slope as one more block of keys
      int const keys = (all + 1 - i + kStages - 1) / kStages, values = (all - i + kStages - 1) / kStages;
      if (keys > 0) wait(s.k_empty[i], (keys - 1) % 2);
      if (values > 0) wait(s.v_empty[i], (values - 1) % 2);
    }
    source.bytes.start();
    bytes.load_all();
  }

  // And the slope. before: blocks before them.
  __device__ __forceinline__ void load_means(TierRow const& row, int before) const {
    if (rows.leader) {
      float const* const bias = source.p.bias + row.index * source.p.mean_blocks * kKeys;
#pragma unroll 1
      for (int i = 0; i < source.p.mean_blocks; i++) {
        int const j = before + i, stage = j % kStages, parity = j / kStages % 2 ^ 1;
        wait(s.k_empty[stage], parity);
        expect(s.k_full[stage], KeyRows::kKeyBytes + sizeof(s.bias[0]));
        load_bytes(s.bias[stage], bias + i * kKeys, sizeof(s.bias[0]), s.k_full[stage]);
        source.rows.load(source.rows.stages.k[stage], source.p.mean_k, s.k_full[stage], i * kKeys, rows.kv_head, work.batch);
        arrive(s.k_full[stage]);
        wait(s.v_empty[stage], parity);
        expect(s.v_full[stage], KeyRows::kValueBytes);
        source.rows.load(source.rows.stages.v[stage], source.p.mean_v, s.v_full[stage], i * kKeys, rows.kv_head, work.batch);
        arrive(s.v_full[stage]);
      }
      int const j = before + source.p.mean_blocks, stage = j % kStages;
      wait(s.k_empty[stage], j / kStages % 2 ^ 1);
      expect(s.k_full[stage], KeyRows::kKeyBytes);
      source.rows.load(source.rows.stages.k[stage], source.p.slope, s.k_full[stage], 0, rows.kv_head, work.batch);
      arrive(s.k_full[stage]);
    }
    __syncwarp();
  }
};

}  // namespace sta
