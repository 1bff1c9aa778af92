// The gradient of queries, for Hopper: thread blocks own queries, as in the forward kernel, and add to nothing in global
// memory, so that the result is the same in every run. It computes scores and dP a second time.
#pragma once

#include "sm90/key_rows.cuh"

namespace sta {

struct QueryGradientParameters {
  TensorMap q, dout;  // boxes of kAtomColumns columns by kGroup tokens
  KeyMaps keys;
  float2 const* statistics;  // [batch, heads, queries] of (lse * log2(e), dout . out)
  Output dq;
  float softmax_scale;
  Problem problem;
};

struct QueryShared {
  alignas(1024) unsigned char q[kWarpgroups][kRows * kRowBytes], dout[kWarpgroups][kRows * kRowBytes];
  KeyStages stages;
  KeyState<kStages> keys;
  Barrier q_full;
  int first[4 * kWarpgroups];  // query row of each warp, -1 without one
};
static_assert(offsetof(QueryShared, first) + sizeof(QueryShared::first) <= kSharedBytes);

struct QueryConsumer {
  QueryShared& s;
  int const id, lane;  // warpgroup, thread in it
  float const scale;   // softmax scale * log2(e)
  float2 statistics[2];  // of row lane / 4 of this warp's 16, and of the row eight below
  float scores[kScores], dscores[kScores];
  float dq[kOutputs] = {};
  unsigned packed[kKeys / 4];

  __device__ __forceinline__ void release(Barrier& empty) const {
    if (lane == 0) arrive(empty);
  }

  template <bool kRest>
  __device__ __forceinline__ void walk(int first, int end) {
#pragma unroll 1
    for (int j = first; j < end; j++) {
      int const stage = j % kStages, parity = j / kStages % 2;
      wait(s.keys.k_full[stage], parity);
      pin(scores);
      begin_products();
      multiply_rows<Halves, ScoresMma, kRows, kKeys>(s.q[id], s.stages.k[stage], scores);
      wait(s.keys.v_full[stage], parity);
      pin(dscores);
      multiply_rows<Halves, ScoresMma, kRows, kKeys>(s.dout[id], s.stages.v[stage], dscores);
      finish_products<1>();
      pin(scores);
      if constexpr (kRest) {
        hide_unseen<Halves>(s.keys.seen[stage], lane, scores);
        arrive(s.keys.seen_empty[(j - first) % kStages]);
      }
#pragma unroll
      for (int i = 0; i < kScores; i++) scores[i] = exp2_approx(fmaf(scores[i], scale, -statistics[i / 2 % 2].x));
      finish_products();
      pin(dscores);
      release(s.keys.v_empty[stage]);
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        float const delta = statistics[i / 2 % 2].y;
        packed[i / 2] = pack<kBfloat16>(scores[i] * (dscores[i] - delta), scores[i + 1] * (dscores[i + 1] - delta));
      }
      pin(packed);
      pin(dq);
      begin_products();
      add_rows<OutputMma, kKeys>(packed, s.stages.k[stage], dq);
      finish_products();
      pin(packed);
      pin(dq);
      release(s.keys.k_empty[stage]);
    }
  }
};

}  // namespace sta

extern "C" __global__ void __launch_bounds__(128 * (sta::kWarpgroups + 1), 1)
    sta_query_gradients(__grid_constant__ sta::QueryGradientParameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  QueryShared& s = *reinterpret_cast<QueryShared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  auto const load_queries = [&](int active, Work const& work) {
    load_rows<Halves>(s.q, p.q, s.first, active, s.q_full, work);
    load_rows<Halves>(s.dout, p.dout, s.first, active, s.q_full, work);
  };
  auto const compute = [&](Work const& work, WarpRows const& rows, int id, bool, int blocks, int all) {
    QueryConsumer consumer{s, id, static_cast<int>(threadIdx.x) % 128, p.problem.scale};
    int const row = consumer.lane % 32 / 4;
    long long const first = first_row(p.problem, work) + rows.first;
#pragma unroll
    for (int r = 0; r < 2; r++)
      consumer.statistics[r] = row + 8 * r < rows.count ? p.statistics[first + row + 8 * r] : make_float2(kInfinity, 0.f);
    wait(s.q_full, 0);
    consumer.walk<false>(0, blocks);
    consumer.walk<true>(blocks, all);
    float const factor[2] = {p.softmax_scale, p.softmax_scale};
    sync_warpgroup(id);
    store_rows<kRows>(s.q[id], consumer.lane, consumer.dq, factor, rows.count, p.dq.row(work.batch, work.head, rows.first), p.dq.token);
  };
  constexpr bool kMany = kWarpgroups > 2;
  run_block<KeyLoader<true, KeyRows>, false, kMany ? 32 : 24, kMany ? 160 : 240>(p.problem, KeyRows{p.keys, s.stages}, s, load_queries, compute);
}
