// The gradients of keys and values, for Hopper, and what each block of keys adds to dQ. The preamble says which:
//   kKeyGradient, kValueGradient   dK, dV: one at a time where registers do not hold both (head dims over 128)
//   kQuerySum                      dQ, summed in global memory in any order; needs kKeyGradient
//
// One block of threads is up to 128 keys of one tile (or of one context), key head and sample, for all query heads that share
// it. A producer warp walks the queries that see these keys; two warpgroups of 64 keys each compute scores and dP,
// transposed, so that weights and dS are operands in registers for dV and dK. A third one multiplies dS, from shared
// memory, by the keys, so that the other two never wait for each other (the form of FlashAttention-3 but for that:
// Shah et al. 2024, algorithm 3).
#pragma once

#include "sm90/query_loader.cuh"

namespace sta {

constexpr int kScores = kBlockQueries / 2, kGradients = kHeadDim / 2;  // registers of a thread

// Everything is transposed: a warpgroup has 64 keys as rows, and the queries of a step as columns.
struct KeyConsumer {
  BackwardShared& s;
  int const id, lane;  // warpgroup, thread in it
  float const scale;   // softmax scale * log2(e)
  float scores[kScores], dscores[kScores];  // then weights, and dP
  float dk[kGradients] = {}, dv[kGradients] = {};
  unsigned weights[kScores / 2], packed[kScores / 2];
  bool hidden[2], any_hidden;

  // This warpgroup's keys or values by q or dout.
  __device__ __forceinline__ void multiply(unsigned char const* keys, unsigned char const* queries, float (&sum)[kScores]) {
    multiply_rows<Halves, ScoresMma, kBlockKeys, kBlockQueries>(keys + id * kRows * kSwizzle, queries, sum);
  }

  __device__ __forceinline__ void exponentiate(int stage) {
    if (any_hidden) {
#pragma unroll
      for (int i = 0; i < kScores; i++)
        if (hidden[i / 2 % 2]) scores[i] = -kInfinity;
    }
#pragma unroll
    for (int n = 0; n < kScores / 4; n++) {
      float2 const lse = *reinterpret_cast<float2 const*>(&s.lse[stage][n * 8 + lane % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 4; i++) scores[4 * n + i] = exp2_approx(fmaf(scores[4 * n + i], scale, i % 2 ? -lse.y : -lse.x));
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; i++) weights[i] = pack<kBfloat16>(scores[2 * i], scores[2 * i + 1]);
  }

  // dP to dS. Weights are those that were rounded, which leaves the registers of the scores free.
  __device__ __forceinline__ void differentiate(int stage) {
#pragma unroll
    for (int n = 0; n < kScores / 4; n++) {
      float2 const delta = *reinterpret_cast<float2 const*>(&s.delta[stage][n * 8 + lane % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float2 const weight = unpack<kBfloat16>(weights[2 * n + i]);
        packed[2 * n + i] = pack<kBfloat16>(weight.x * (dscores[4 * n + 2 * i] - delta.x), weight.y * (dscores[4 * n + 2 * i + 1] - delta.y));
      }
    }
  }

  // packed: for eight queries each, two registers: of key row lane / 4, and of the one eight below.
  __device__ __forceinline__ void publish(int buffer) {
    // Lane i names row i % 8 of matrix i / 8: matrices are keys 0..7 and 8..15 of eight queries, then of the next eight.
    int const key = id * kRows + lane / 32 * 16 + lane % 16, piece = lane % 32 / 16;
    unsigned char* const row = s.dscores[buffer] + key * kSwizzle;
#pragma unroll
    for (int n = 0; n < kScores / 4; n += 2)
      store_matrices(row + ((n + piece ^ key % 8) * 16), packed[2 * n], packed[2 * n + 1], packed[2 * n + 2], packed[2 * n + 3]);
    fence_shared_writes();
  }

  __device__ __forceinline__ void release(Barrier& empty) const {
    if (lane == 0) arrive(empty);
  }

  // Nothing runs from one step to the next: the compiler serialises products that do where their results are read.
  __device__ __forceinline__ void walk(int steps) {
    // Where dQ has a warpgroup of its own, this one has too few registers for scores and dP at a time.
    constexpr bool kTogether = kKeyGradient && !kQuerySum;
#pragma unroll 1
    for (int j = 0; j < steps; j++) {
      int const stage = j % kStages, parity = j / kStages % 2;
      wait(s.q_full[stage], parity);
      pin(scores);
      begin_products();
      multiply(s.k, s.q[stage], scores);
      if constexpr (kTogether) {
        wait(s.dout_full[stage], parity);
        pin(dscores);
        multiply(s.v, s.dout[stage], dscores);
      }
      finish_products<kTogether>();
      pin(scores);
      exponentiate(stage);
      if constexpr (!kTogether) wait(s.dout_full[stage], parity);
      pin(weights);
      begin_products();
      if constexpr (kKeyGradient && !kTogether) {
        pin(dscores);
        multiply(s.v, s.dout[stage], dscores);
      }
      if constexpr (kValueGradient) {
        pin(dv);
        add_rows<GradientMma, kBlockQueries>(weights, s.dout[stage], dv);
      }
      if constexpr (kKeyGradient) {
        finish_products<kValueGradient>();
        pin(dscores);
        differentiate(stage);
        if constexpr (kQuerySum) {
          wait(s.ds_empty[j % 2], j / 2 % 2 ^ 1);
          publish(j % 2);
          __syncwarp();
          if (lane % 32 == 0) arrive(s.ds_full[j % 2]);
        }
        pin(packed);
        pin(dk);
        begin_products();
        add_rows<GradientMma, kBlockQueries>(packed, s.q[stage], dk);
        finish_products<1>();
        release(s.dout_empty[stage]);
      }
      finish_products();
      pin(weights);
      if constexpr (kValueGradient) pin(dv);
      if constexpr (kKeyGradient) {
        pin(packed);
        pin(dk);
      } else {
        release(s.dout_empty[stage]);
      }
      arrive(s.q_empty[stage]);
    }
  }

  // Through this warp's own rows of V.
  __device__ __forceinline__ void store(Output const& out, KeyWork const& work, float const (&sum)[kGradients], float factor) {
    int const key = id * kRows, own = key + lane / 32 * 16;
    float const factors[2] = {factor, factor};
    store_rows<kBlockKeys>(s.v + key * kSwizzle, lane, sum, factors, work.length - own,
                           out.row(work.batch, work.kv_head, work.first + own), out.token);
    __syncwarp();
  }
};

// A third warpgroup: dQ, which is dS x K, kPart columns at a time, and its sum in global memory.
struct QuerySummer {
  BackwardParameters const& p;
  BackwardShared& s;
  int const lane;
  float dq[kPart / 2];

  __device__ __forceinline__ void multiply(int buffer, int column) {
    auto const a = describe(s.dscores[buffer], 0);
    auto const b = describe(s.k + column / kAtomColumns * kBlockKeys * kSwizzle + column % kAtomColumns * 2, 0);
    pin(dq);
    begin_products();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; i++)
      product<QueryMma>(a + i * 16 * kSwizzle / 16, b + i * 16 * kSwizzle / 16, dq, i == 0 ? ScaleOut::Zero : ScaleOut::One,
                        typename UpTo<kPart / 2>::Type());
    commit_products();
    finish_products();
    pin(dq);
  }

  __device__ __forceinline__ void walk(int steps) {
    int const warp = lane / 32, local = lane % 32 / 4;
    bool const adds = lane < kGroups;
#pragma unroll 1
    for (int j = 0; j < steps; j++) {
      wait(s.ds_full[j % 2], j / 2 % 2);
      long long const row = s.row[j % kNoted][warp] + local;
#pragma unroll 1
      for (int part = 0; part < kParts; part++) {
        multiply(j % 2, part * kPart);
        if (part == kParts - 1) arrive(s.ds_empty[j % 2]);
        // The other parts' additions may still read theirs.
        if (adds) finish_reading<kParts - 1>();
        sync_warpgroup(2);
        float* const to = s.dq[part] + (warp * kGroup + local) * kPart;
#pragma unroll
        for (int i = 0; i < kPart / 2; i += 2)
          *reinterpret_cast<float2*>(to + i / 2 % 2 * 8 * kPart + swizzle_sum(row, i / 4 * 8 + lane % 4 * 2)) = {dq[i], dq[i + 1]};
        fence_shared_writes();
        sync_warpgroup(2);
        if (adds) {
          int const from = s.from[j % kNoted][lane], count = s.to[j % kNoted][lane] - from;
          if (count > 0)
            add_to_global(p.dq_sum + part * p.part_rows * kPart + (s.row[j % kNoted][lane] + from) * kPart,
                          s.dq[part] + (lane * kGroup + from) * kPart, count * kPart * static_cast<int>(sizeof(float)));
          commit_additions();
        }
      }
    }
  }
};

// One warp: rows of keys and values that do not count, of the 16 that are this warp's.
__device__ __forceinline__ void clear_hidden(BackwardShared& s, int first, unsigned hidden) {
  constexpr int kPieces = kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < 16 * kPieces; i += 32) {
    int const row = i / kPieces, piece = i % kPieces;
    int const at = piece / 8 * kBlockKeys * kSwizzle + (first + row) * kSwizzle + piece % 8 * 16;
    if (hidden >> row & 1) *reinterpret_cast<uint4*>(s.k + at) = *reinterpret_cast<uint4*>(s.v + at) = uint4{};
  }
}

}  // namespace sta

extern "C" __global__ void __launch_bounds__(sta::kQuerySum ? 512 : 384, 1) sta_key_gradients(__grid_constant__ sta::BackwardParameters const p) {
  using namespace sta;
  extern __shared__ __align__(1024) unsigned char memory[];
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();  // swizzled boxes need it, and the declaration asks for it
  KeyWork const work = key_work_of(p, blockIdx.x);
  if (work.length <= 0) return;  // a smaller tile
  int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    init(s.keys_full, 1);
    init(s.loaded, 1);
    init(s.counted, 1);
    s.list.init_barriers();
    for (int i = 0; i < 2; i++) {
      init(s.ds_full[i], 8);
      init(s.ds_empty[i], 128);  // every thread has read the rows of the step before
    }
    for (int i = 0; i < kStages; i++) {
      init(s.q_full[i], 33);  // the loads, and each lane's part of the statistics
      init(s.dout_full[i], 1);
      init(s.q_empty[i], 256);  // every thread that has read its statistics
      init(s.dout_empty[i], 2);
    }
    fence_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<24>();
    if (threadIdx.x < 32) produce_queries(p, s, work);
    else if (threadIdx.x < 64) list_queries(p, s, work);
    return;
  }
  int const thread = static_cast<int>(threadIdx.x) % 128;
  if (kQuerySum && warpgroup == 3) {
    give_registers<72>();
    wait(s.counted, 0);
    int const steps = __shfl_sync(~0u, s.steps, 0);
    QuerySummer{p, s, thread}.walk(steps);
    if (thread < kGroups) finish_reading<0>();
    return;
  }
  take_registers<kQuerySum ? 208 : 240>();
  KeyConsumer consumer{s, warpgroup - 1, thread, p.problem.scale};
  int const warp_row = consumer.id * kRows + consumer.lane / 32 * 16, lane = consumer.lane % 32;
  unsigned const hidden = ~__ballot_sync(~0u, lane < 16 && counts(p.problem, work, warp_row + lane)) & 0xFFFF;
  consumer.hidden[0] = hidden >> lane / 4 & 1;
  consumer.hidden[1] = hidden >> (lane / 4 + 8) & 1;
  consumer.any_hidden = any_of_warpgroup(hidden != 0, consumer.id);
  wait(s.counted, 0);
  int const steps = __shfl_sync(~0u, s.steps, 0);
  wait(s.keys_full, 0);
  if (consumer.any_hidden) {
    clear_hidden(s, warp_row, hidden);
    fence_shared_writes();
    sync_warpgroup(consumer.id);
  }
  consumer.walk(steps);
  sync_warpgroup(consumer.id);
  if constexpr (kValueGradient) consumer.store(p.dv, work, consumer.dv, 1.f);
  if constexpr (kKeyGradient) consumer.store(p.dk, work, consumer.dk, p.softmax_scale);
}
