// The gradient of queries, for Hopper: thread blocks own queries, as in the forward kernel, and add to nothing in global
// memory, so that the result is the same in every run. It computes scores and dP a second time.
#pragma once

#include "sm90/key_loader.cuh"

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
  KeyState keys;
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

  // rows x keys, over columns.
  __device__ __forceinline__ void multiply(unsigned char const* rows, unsigned char const* keys, float (&sum)[kScores]) {
    auto const a = describe(rows, 0), b = describe(keys, 0);
#pragma unroll
    for (int i = 0; i < (kHeadDim + 15) / 16; i++) {
      int const block = i * 16 / kAtomColumns, offset = i * 16 % kAtomColumns * 2;
      product<ScoresMma>(a + (block * kRows * kSwizzle + offset) / 16, b + (block * kKeys * kSwizzle + offset) / 16, sum,
                         i == 0 ? ScaleOut::Zero : ScaleOut::One, typename UpTo<kScores>::Type());
    }
    commit_products();
  }

  __device__ __forceinline__ void add_keys(int stage) {
    auto const k = describe(s.stages.k[stage], kKeys * kSwizzle);
#pragma unroll
    for (int i = 0; i < kKeys / 16; i++)
      product<OutputMma>(packed + 4 * i, k + i * 16 * kSwizzle / 16, dq, typename UpTo<kOutputs>::Type());
    commit_products();
  }

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
      multiply(s.q[id], s.stages.k[stage], scores);
      wait(s.keys.v_full[stage], parity);
      pin(dscores);
      multiply(s.dout[id], s.stages.v[stage], dscores);
      finish_products<1>();
      pin(scores);
      if constexpr (kRest) {
        hide_unseen(s.keys.seen[stage], lane, scores);
        sync_warpgroup(id);  // all four warps have read which keys count
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
      add_keys(stage);
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
  Problem const& problem = p.problem;
  Work const work = work_of(problem, blockIdx.x);
  int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  WarpRows const rows = take_rows(problem, work, s.first);
  int const active = __syncthreads_count(threadIdx.x % 128 == 0 && rows.count > 0);
  if (active == 0) return;  // a group of smaller tiles needs fewer blocks
  if (threadIdx.x == 0) {
    init(s.q_full, 1);
    s.keys.init_barriers(active);
    fence_init();
  }
  __syncthreads();
  constexpr bool kMany = kWarpgroups > 2;
  if (warpgroup == 0) {
    give_registers<kMany ? 32 : 24>();
    auto const load_queries = [&] {
      load_rows(s.q, p.q, s.first, active, s.q_full, work);
      load_rows(s.dout, p.dout, s.first, active, s.q_full, work);
      if (threadIdx.x == 0) arrive(s.q_full);
    };
    if (threadIdx.x < 32) produce<true>(problem, p.keys, s.stages, s.keys, work, Keys(problem, work), load_queries);
    else if (threadIdx.x < 64) list_keys(s.keys, Keys(problem, work));
    return;
  }
  take_registers<kMany ? 160 : 240>();
  int const id = warpgroup - 1;
  if (id >= active) return;
  QueryConsumer consumer{s, id, static_cast<int>(threadIdx.x) % 128, problem.scale};
  int const row = consumer.lane % 32 / 4;
  long long const first = (static_cast<long long>(work.batch) * problem.heads + work.head) * problem.queries + rows.first;
#pragma unroll
  for (int r = 0; r < 2; r++)
    consumer.statistics[r] = row + 8 * r < rows.count ? p.statistics[first + row + 8 * r] : make_float2(kInfinity, 0.f);
  wait(s.keys.counted, 0);
  int const blocks = __shfl_sync(~0u, s.keys.blocks, 0), all = blocks + __shfl_sync(~0u, s.keys.rest_blocks, 0);
  wait(s.q_full, 0);
  consumer.walk<false>(0, blocks);
  consumer.walk<true>(blocks, all);
  float const factor[2] = {p.softmax_scale, p.softmax_scale};
  sync_warpgroup(id);
  store_rows<kRows>(s.q[id], consumer.lane, consumer.dq, factor, rows.count,
                    p.dq.row(work.batch, work.head, rows.first), p.dq.token);
}
