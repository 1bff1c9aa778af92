// Attention with tiers, forward, for Hopper: each block of keys in 16 bits, in e4m3, or as its means (docs/tiers.md). One
// online softmax for all three, in this order. The preamble defines what it does in attention_forward.cuh and in
// attention_forward_fp8.cuh.
//
// The sums in e4m3 are 2^kLargestWeight times what they stand for, of values over the scale of their column, and scores that
// lack what smoothing took off; so are those of 16 bits made to be before they go on.
#pragma once

#include "sm90/online_softmax.cuh"
#include "sm90/online_softmax_fp8.cuh"
#include "sm90/tier_loader.cuh"

namespace sta {

struct Shared {
  alignas(1024) unsigned char q[kWarpgroups][kRows * Halves::kRowBytes], q_bytes[kWarpgroups][kRows * Bytes::kRowBytes];
  union {
    KeyStages rows;
    ByteStages bytes;
  } stages;
  TierState keys;
  Barrier q_full;
  int first[4 * kWarpgroups];  // query row of each warp, -1 without one
};
static_assert(offsetof(Shared, first) + sizeof(Shared::first) <= kSharedBytes);

// What a consumer of one kind of keys reads.
template <class Layout, class Stages, class State>
struct SharedOf {
  unsigned char (&q)[kWarpgroups][kRows * Layout::kRowBytes];
  Stages& stages;
  State& keys;
};
using SharedRowsOfKeys = SharedOf<Halves, KeyStages, TierState>;
using SharedBytesOfKeys = SharedOf<Bytes, ByteStages, KeyState<kByteStages>>;

// Goes on where the consumer of 16 bits ended. shift: of this warp's first row.
__device__ __forceinline__ void take_over(ByteConsumer<SharedBytesOfKeys>& bytes, Consumer<SharedRowsOfKeys>& rows, float const (&shift)[2],
                                          float const* channel) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = rows.total[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    bytes.total[r] = total;
    bytes.base[r] = rows.top[r] + kLargestWeight - shift[r] * 1.4426950408889634f;
  }
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    float2 const of_columns = *reinterpret_cast<float2 const*>(channel + i * 2 + rows.lane % 4 * 2);
    float const inverse[2] = {of_columns.x == 0.f ? 0.f : 1.f / of_columns.x, of_columns.y == 0.f ? 0.f : 1.f / of_columns.y};
#pragma unroll
    for (int e = 0; e < 4; e++) bytes.output[i + e] = rows.output[i + e] * inverse[e % 2];
  }
}

}  // namespace sta

extern "C" __global__ void __launch_bounds__(128 * (sta::kWarpgroups + 1), 1)
    sta_attention_forward_tiers(__grid_constant__ sta::TierParameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  TierSource const source{p, KeyRows{p.keys, s.stages.rows}, KeyBytes{p.byte_keys, s.stages.bytes}};
  auto const load_queries = [&](int active, Work const& work) {
    load_rows<Halves>(s.q, p.q, s.first, active, s.q_full, work);
    if (work.whole) return;
    load_rows<Bytes>(s.q_bytes, p.q_bytes, s.first, active, s.keys.q_bytes_full, work);
    if (threadIdx.x == 0) arrive(s.keys.q_bytes_full);
  };
  auto const compute = [&](Work const& work, WarpRows const& rows, int id, bool, int blocks, int all) {
    int const lane = threadIdx.x % 128;
    long long const first = first_row(p.problem, work) + rows.first;
    Element* const out = p.out.row(work.batch, work.head, rows.first);
    SharedRowsOfKeys of_rows{s.q, s.stages.rows, s.keys};
    Consumer<SharedRowsOfKeys> consumer{of_rows, id, lane, p.problem.scale};
    wait(s.q_full, 0);
    consumer.walk<Part::kWhole, false>(0, blocks);
    consumer.walk<Part::kRest, false>(blocks, all);
    if (work.whole) return consumer.store(out, p.out.token, p.lse + first, rows.count);
    consumer.walk_means(all, all + p.mean_blocks);

    int const kv_head = work.batch * p.kv_heads + p.problem.by_share.divide(work.head);
    SharedBytesOfKeys of_bytes{s.q_bytes, s.stages.bytes, s.keys.bytes};
    ByteConsumer<SharedBytesOfKeys> bytes{of_bytes, id, lane};
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // Rows that don't exist have those of others.
      int const row = min(max(s.first[id * 4 + lane / 32], 0) + lane % 32 / 4 + 8 * r, p.problem.queries - 1);
      long long const at = first_row(p.problem, work) + row;
      bytes.scale[r] = fmaxf(p.q_scale[at] * p.k_scale[kv_head] * p.problem.scale, 1e-30f);
      shift[r] = p.shift[at];
    }
    float const* const channel = p.v_scale + kv_head * kHeadDim;
    take_over(bytes, consumer, shift, channel);
    int const of_whole = __shfl_sync(~0u, s.keys.bytes.blocks, 0), of_all = of_whole + __shfl_sync(~0u, s.keys.bytes.rest_blocks, 0);
    wait(s.keys.q_bytes_full, 0);
    bytes.walk<false, false>(0, of_whole);
    bytes.walk<true, false>(of_whole, of_all);
    bytes.store(out, p.out.token, channel, p.lse + first, p.shift + first, rows.count);
  };
  run_block<TierLoader, false, 32, 160>(p.problem, source, s, load_queries, compute);
}
