// Sliding tile attention, forward, in e4m3, for Hopper: attention_forward.cuh with another arithmetic. The preamble defines
// what it does there, and
//   kFirst                   columns of the first of two products of weights and values
//   ByteScoresMma, FirstMma, LastMma   CuTe's 64 x kKeys, kFirst, and kHeadDim - kFirst + 8 products, 32 deep, of e4m3
#pragma once

#include "sm90/forward_problem_fp8.cuh"
#include "sm90/online_softmax_fp8.cuh"

namespace sta {

using Shared = SharedRows<Bytes, ByteStages, kByteStages>;
static_assert(offsetof(Shared, first) + sizeof(Shared::first) <= kSharedBytes);

}  // namespace sta

extern "C" __global__ void __launch_bounds__(128 * (sta::kWarpgroups + 1), 1)
    sta_attention_forward_fp8(__grid_constant__ sta::Parameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  KeyBytes const source{p.keys, s.stages};
  auto const load_queries = [&](int active, Work const& work) {
    load_rows<Bytes>(s.q, p.q, s.first, active, s.q_full, work);
    source.start();
  };
  auto const compute = [&](Work const& work, WarpRows const& rows, int id, bool shared, int blocks, int all) {
    int const kv_head = work.batch * p.kv_heads + p.problem.by_share.divide(work.head);
    int const lane = threadIdx.x % 128;
    long long const first = first_row(p.problem, work) + rows.first;
    ByteConsumer<Shared> consumer{s, id, lane};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // Those of the warpgroup whose rows they are; rows that don't exist have those of others.
      int const row = max(s.first[(shared ? 0 : id) * 4 + lane / 32], 0) + lane % 32 / 4 + 8 * r;
      float const scale = p.q_scale[first_row(p.problem, work) + min(row, p.problem.queries - 1)] * p.k_scale[kv_head] * p.problem.scale;
      consumer.scale[r] = fmaxf(scale, 1e-30f);  // a row of zeros has scale 0, and hidden keys have scores of -infinity
    }
    wait(s.q_full, 0);
    if (shared) {
      consumer.walk<false, true>(0, blocks);
      consumer.walk<true, true>(blocks, all);
      if (!consumer.collect()) return;
    } else {
      consumer.walk<false, false>(0, blocks);
      consumer.walk<true, false>(blocks, all);
    }
    consumer.store(p.out.row(work.batch, work.head, rows.first), p.out.token, p.v_scale + kv_head * kHeadDim, p.lse + first,
                   p.shift + first, rows.count);
  };
  run_block<KeyLoader<false, KeyBytes>, true, 32, 160>(p.problem, source, s, load_queries, compute);
}
