// Sliding tile attention, forward, for Hopper. The preamble that includes this file defines, in namespace sta:
//   Element, kBfloat16       16 bits; bfloat16 or float16
//   kHeadDim                 a multiple of 8, at most 256
//   kKeys                    keys of a block, a multiple of 16
//   kWarpgroups, kStages     consumer warpgroups of 64 query rows each; blocks of K and of V in flight
//   ScoresMma, OutputMma     CuTe's 64 x kKeys x 16 (both operands in shared memory) and 64 x kHeadDim x 16 (left
//                            operand in registers, right one transposed) products of Element
//
// One block of threads is up to 64 * kWarpgroups query rows of tiles with one window (or of one context segment), head
// and sample. A producer warp walks the keys that these rows see and loads them with the TMA unit: first the blocks of
// kKeys keys that lie wholly in a run, then the rest of all runs, packed in groups of 16 keys. Consumers know two
// counts and no pattern; only the second loop has masks.
//
// The online softmax subtracts a maximum only to keep exp2 in range, and any value near the maximum does. So the
// loop over whole blocks keeps the maximum of the first one, and takes a row sum that gets too large as the sign
// that a score rose far above it: then the scores are computed again and the maximum is renewed. That saves a maximum
// over all scores and a rescaling of the output in each step, and exp2 need not wait for the maximum.
#pragma once

#include "sm90/forward_problem.cuh"
#include "sm90/online_softmax.cuh"

namespace sta {

using Shared = SharedRows<Halves, KeyStages, kStages>;
static_assert(offsetof(Shared, first) + sizeof(Shared::first) <= kSharedBytes);

}  // namespace sta

extern "C" __global__ void __launch_bounds__(128 * (sta::kWarpgroups + 1), 1)
    sta_attention_forward(__grid_constant__ sta::Parameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  auto const load_queries = [&](int active, Work const& work) { load_rows<Halves>(s.q, p.q, s.first, active, s.q_full, work); };
  auto const compute = [&](Work const& work, WarpRows const& rows, int id, bool shared, int blocks, int all) {
    Consumer<Shared> consumer{s, id, static_cast<int>(threadIdx.x) % 128, p.problem.scale};
    wait(s.q_full, 0);
    if (shared) {
      consumer.walk<Part::kWhole, true>(0, blocks);
      consumer.walk<Part::kRest, true>(blocks, all);
      if (!consumer.collect()) return;
    } else {
      consumer.walk<Part::kWhole, false>(0, blocks);
      consumer.walk<Part::kRest, false>(blocks, all);
    }
    consumer.store(p.out.row(work.batch, work.head, rows.first), p.out.token, p.lse + first_row(p.problem, work) + rows.first, rows.count);
  };
  constexpr bool kMany = kWarpgroups > 2;
  run_block<KeyLoader<false, KeyRows>, true, kMany ? 32 : 40, kMany ? 160 : 232>(p.problem, KeyRows{p.keys, s.stages}, s, load_queries, compute);
}
