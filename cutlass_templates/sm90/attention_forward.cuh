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

#include "sm90/online_softmax.cuh"

extern "C" __global__ void __launch_bounds__(128 * (sta::kWarpgroups + 1), 1)
    sta_attention_forward(__grid_constant__ sta::Parameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  Problem const& problem = p.problem;
  Work const work = work_of(problem, blockIdx.x);
  // The shuffle tells the compiler that it is the same in a warp, which keeps descriptors in uniform registers.
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
    give_registers<kMany ? 32 : 40>();
    auto const load_queries = [&] {
      load_rows(s.q, p.q, s.first, active, s.q_full, work);
      if (threadIdx.x == 0) arrive(s.q_full);
    };
    if (threadIdx.x < 32) produce<false>(problem, p.keys, s.stages, s.keys, work, Keys(problem, work), load_queries);
    else if (threadIdx.x < 64) list_keys(s.keys, Keys(problem, work));
    return;
  }
  take_registers<kMany ? 160 : 232>();
  int const id = warpgroup - 1;
  if (id >= active) return;
  Consumer consumer{s, id, static_cast<int>(threadIdx.x) % 128, problem.scale};
  wait(s.keys.counted, 0);
  int const blocks = __shfl_sync(~0u, s.keys.blocks, 0), all = blocks + __shfl_sync(~0u, s.keys.rest_blocks, 0);
  wait(s.q_full, 0);
  consumer.walk<false>(0, blocks);
  consumer.walk<true>(blocks, all);
  consumer.store(p.out.row(work.batch, work.head, rows.first), p.out.token,
                 p.lse + (static_cast<long long>(work.batch) * problem.heads + work.head) * problem.queries + rows.first,
                 rows.count);
}
