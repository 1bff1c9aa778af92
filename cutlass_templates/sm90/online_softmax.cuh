// The consumers: online softmax over blocks of keys, and the output.
#pragma once

#include "sm90/key_loader.cuh"

namespace sta {

// bfloat16 reaches as far as float; float16 holds twice this.
constexpr float kLargestSum = kBfloat16 ? 16777216.f : 32768.f;

// A thread's part of 64 rows: elements 0, 1 of each four are of row `lane / 4` of its warp's 16, elements 2, 3 of
// the row eight below (PTX ISA, "Register fragments for wgmma").
struct Consumer {
  Shared& s;
  int const id, lane;  // warpgroup, thread in it
  float const scale;
  float scores[kScores], output[kOutputs] = {};
  unsigned weights[kKeys / 4];
  float top[2] = {-kInfinity, -kInfinity}, total[2] = {0, 0};

  __device__ __forceinline__ void multiply_keys(int stage) {
    pin(scores);
    begin_products();
    auto const q = describe(s.q[id], 0), k = describe(s.k[stage], 0);
#pragma unroll
    for (int i = 0; i < (kHeadDim + 15) / 16; i++) {
      int const block = i * 16 / kAtomColumns, offset = i * 16 % kAtomColumns * 2;
      product<ScoresMma>(q + (block * kRows * kSwizzle + offset) / 16, k + (block * kKeys * kSwizzle + offset) / 16, scores,
                         i == 0 ? ScaleOut::Zero : ScaleOut::One, typename UpTo<kScores>::Type());
    }
    commit_products();
    finish_products();
    pin(scores);
  }

  __device__ __forceinline__ void add_values(int stage) {
    pin(weights);
    pin(output);
    begin_products();
    auto const v = describe(s.v[stage], kKeys * kSwizzle);
#pragma unroll
    for (int i = 0; i < kKeys / 16; i++)
      product<OutputMma>(weights + 4 * i, v + i * 16 * kSwizzle / 16, output, typename UpTo<kOutputs>::Type());
    commit_products();
    finish_products();
    pin(weights);
    pin(output);
  }

  __device__ __forceinline__ void renew_top() {
    float best[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < kScores; i++) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], scores[i]);
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
      float const renewed = fmaxf(top[r], best[r] * scale);
      decay[r] = renewed == -kInfinity ? 1.f : exp2_approx(top[r] - renewed);
      top[r] = renewed;
      total[r] *= decay[r];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i++) output[i] *= decay[i / 2 % 2];
  }

  // Scores to weights; the sums of this thread's weights.
  __device__ __forceinline__ float2 exponentiate() {
    float const shift[2] = {top[0] == -kInfinity ? 0.f : -top[0], top[1] == -kInfinity ? 0.f : -top[1]};
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      scores[i] = exp2_approx(fmaf(scores[i], scale, shift[i / 2 % 2]));
      sum[i % 4] += scores[i];
    }
    return {sum[0] + sum[1], sum[2] + sum[3]};
  }

  __device__ __forceinline__ void take_weights(float2 sums) {
    total[0] += sums.x;
    total[1] += sums.y;
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) weights[i] = pack<kBfloat16>(scores[2 * i], scores[2 * i + 1]);
  }

  // Does exp2 of these scores need another maximum? Not (sum < limit), so that NaN counts.
  __device__ __forceinline__ bool out_of_range(float2 sums) const {
    return !(sums.x < kLargestSum && sums.y < kLargestSum) || top[0] == -kInfinity || top[1] == -kInfinity;
  }

  __device__ __forceinline__ void release(Barrier& empty) const {
    if (lane == 0) arrive(empty);
  }

  __device__ __forceinline__ void hide_unseen(int stage) {
#pragma unroll
    for (int g = 0; g < kKeys / kGroup; g++) {
      unsigned const seen = s.seen[stage][g];
      if (seen == (1u << kGroup) - 1) continue;
      unsigned const mine = seen >> lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int const key = i / 4 * 8 + i % 2;
        if (!(mine >> key & 1)) scores[8 * g + i] = -kInfinity;
      }
    }
  }

  template <bool kRest>
  __device__ __forceinline__ void walk(int first, int end) {
#pragma unroll 1
    for (int j = first; j < end; j++) {
      int const stage = j % kStages, parity = j / kStages % 2;
      wait(s.k_full[stage], parity);
      multiply_keys(stage);
      if constexpr (kRest) hide_unseen(stage);
      float2 sums;
      if (j > 0) sums = exponentiate();
      if (j == 0 || any_of_warpgroup(out_of_range(sums), id)) {
        if (j > 0) {
          multiply_keys(stage);
          if constexpr (kRest) hide_unseen(stage);
        }
        renew_top();
        sums = exponentiate();
      }
      // All four warps have read which keys count.
      if constexpr (kRest) sync_warpgroup(id);
      release(s.k_empty[stage]);
      take_weights(sums);
      wait(s.v_full[stage], parity);
      add_values(stage);
      release(s.v_empty[stage]);
    }
  }

  // rows: that exist, from this warpgroup's first one on. out, lse: of that row.
  __device__ __forceinline__ void store(Element* out, long long stride, float* lse, int rows) {
    int const row = lane / 32 * 16 + lane % 32 / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      inverse[r] = total[r] == 0.f ? 0.f : 1.f / total[r];
      if (lane % 4 == 0 && row + 8 * r < rows) lse[row + 8 * r] = (top[r] + log2f(total[r])) * 0.6931471805599453f;
    }
    // Through shared memory, over this warp's own rows of Q, so that whole rows leave in pieces of 16 bytes.
    unsigned char* const own = s.q[id];
    auto const place = [&](int row, int column) {
      int const piece = column % kAtomColumns / 8 ^ row % 8;
      return own + column / kAtomColumns * kRows * kSwizzle + row * kSwizzle + piece * 16 + column % 8 * 2;
    };
#pragma unroll
    for (int i = 0; i < kOutputs; i += 2) {
      int const r = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<unsigned*>(place(row + 8 * r, column)) = pack<kBfloat16>(output[i] * inverse[r], output[i + 1] * inverse[r]);
    }
    __syncwarp();
    constexpr int kPieces = kHeadDim / 8;
    for (int i = lane % 32; i < 16 * kPieces; i += 32) {
      int const from = lane / 32 * 16 + i / kPieces, column = i % kPieces * 8;
      uint4 const piece = *reinterpret_cast<uint4 const*>(place(from, column));
      if (from < rows) *reinterpret_cast<uint4*>(out + from * stride + column) = piece;
    }
  }
};

}  // namespace sta
