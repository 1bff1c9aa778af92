// The consumers of e4m3: online softmax over blocks of keys, and the output.
//
// Tensor cores add 8-bit products with about 14 bits, so each block's output starts at zero and is added to a float32 sum.
// That costs as much with a factor as without: each block has a maximum of its own, weights of a block fill the range
// of e4m3 whatever the other blocks hold, and the sum keeps its base until a maximum rises far above it. The sum of
// weights is that of the rounded ones, by columns of ones beside the values: equal values come out as they are.
#pragma once

#include "sm90/key_bytes.cuh"
#include "sm90/shared_rows.cuh"

namespace sta {

constexpr float kLargestWeight = 8;  // its logarithm; e4m3 has up to 448
constexpr float kFarAbove = 32;      // weights of the sum stay below 2^kFarAbove

// Four values as e4m3, the first in the low byte.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned packed;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Shared has q, stages and keys.
template <class Shared>
struct ByteConsumer {
  Shared& s;
  int const id, lane;  // warpgroup, thread in it
  float scale[2];      // of scores, times log2(e)
  float scores[kScores], output[kOutputs] = {};
  unsigned weights[kKeys / 8];
  float base[2] = {-kInfinity, -kInfinity}, total[2] = {0, 0};

  // rows: the warpgroup whose rows they are.
  __device__ __forceinline__ void multiply_keys(int rows, int stage) {
    pin(scores);
    begin_products();
    multiply_rows<Bytes, ByteScoresMma, kRows, kKeys>(s.q[rows], s.stages.k[stage], scores);
    finish_products();
    pin(scores);
  }

  // Scores to weights; logarithms of what a weight of 1 stands for.
  __device__ __forceinline__ float2 weigh() {
    float best[2] = {scores[0], scores[2]}, shift[2];
#pragma unroll
    for (int i = 0; i < kScores; i++) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], scores[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2)) * scale[r];
      shift[r] = best[r] == -kInfinity ? 0.f : kLargestWeight - best[r];
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      float p[8];
#pragma unroll
      for (int e = 0; e < 8; e++) p[e] = exp2_approx(fmaf(scores[i + e], scale[e / 2 % 2], shift[e / 2 % 2]));
      weights[i / 4] = pack_e4m3(p[0], p[1], p[4], p[5]);
      weights[i / 4 + 1] = pack_e4m3(p[2], p[3], p[6], p[7]);
    }
    return {best[0], best[1]};
  }

  // Where the sum's base is far below: another one.
  __device__ __forceinline__ void raise(float2 best) {
    float const tops[2] = {best.x, best.y};
    if (!__any_sync(~0u, best.x > base[0] + kFarAbove || best.y > base[1] + kFarAbove)) return;
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float const raised = fmaxf(base[r], tops[r]);
      decay[r] = raised == -kInfinity ? 1.f : exp2_approx(base[r] - raised);
      base[r] = raised;
      total[r] *= decay[r];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i++) output[i] *= decay[i / 2 % 2];
  }

  // Adds weights times columns kFrom .. of a block's values, and times a column of ones if the count says so.
  template <class Mma, int kFrom, bool kRest, int kCount>
  __device__ __forceinline__ void multiply_values(int stage, float (&sum)[kCount]) {
    unsigned char const* const values = s.stages.v[stage] + kFrom * (kRest ? kGroup : kKeys);
    auto const b = kRest ? describe_groups(values, kGroupPitch) : describe(values, 0);
    constexpr int kStep = kRest ? 2 * kGroupPitch : 32;
    pin(sum);
    begin_products();
#pragma unroll
    for (int i = 0; i < kKeys / 32; i++)
      product<Mma>(weights + 4 * i, b + i * kStep / 16, sum, typename UpTo<kCount>::Type(), i == 0 ? ScaleOut::Zero : ScaleOut::One);
    commit_products();
  }

  template <int kFrom, int kCount, int kColumns>
  __device__ __forceinline__ void add(float (&sum)[kColumns], float const (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) output[kFrom / 2 + i] = fmaf(sum[i], factor[i / 2 % 2], output[kFrom / 2 + i]);
  }

  __device__ __forceinline__ void release(Barrier& empty) const {
    if (lane == 0) arrive(empty);
  }

  // kShared: blocks are given to the warpgroups in turn.
  template <bool kRest, bool kShared>
  __device__ __forceinline__ void walk(int first, int end) {
#pragma unroll 1
    for (int j = first; j < end; j++) {
      int const stage = j % kByteStages, parity = j / kByteStages % 2;
      if constexpr (kShared) {
        if (j % kWarpgroups != id) {
          pass_block<kRest>(s.keys, id, lane, j - first, stage, parity);
          continue;
        }
      }
      wait(s.keys.k_full[stage], parity);
      multiply_keys(kShared ? 0 : id, stage);
      if constexpr (kRest) {
        hide_unseen<Bytes>(s.keys.seen[stage], lane, scores);
        arrive(s.keys.seen_empty[(j - first) % kByteStages]);
      }
      release(s.keys.k_empty[stage]);
      float2 const best = weigh();
      raise(best);
      float const factor[2] = {best.x == -kInfinity ? 0.f : exp2_approx(best.x - base[0]),
                               best.y == -kInfinity ? 0.f : exp2_approx(best.y - base[1])};
      pin(weights);
      wait(s.keys.v_full[stage], parity);
      {
        float sum[kFirst / 2];
        multiply_values<FirstMma, 0, kRest>(stage, sum);
        finish_products();
        pin(sum);
        add<0, kFirst / 2>(sum, factor);
      }
      constexpr int kLast = (kHeadDim - kFirst) / 2;
      float sum[kLast + kOnes / 2];
      multiply_values<LastMma, kFirst, kRest>(stage, sum);
      finish_products();
      pin(sum);
      pin(weights);
      release(s.keys.v_empty[stage]);
      add<kFirst, kLast>(sum, factor);
      total[0] = fmaf(sum[kLast], factor[0], total[0]);
      total[1] = fmaf(sum[kLast + 2], factor[1], total[1]);
    }
  }

  __device__ __forceinline__ bool collect() { return add_parts(s, id, lane, output, base, total); }

  // out, lse, shift: of this warp's first row, of `rows` that exist. channel: scales of the columns of v.
  __device__ __forceinline__ void store(Element* out, long long stride, float const* channel, float* lse, float const* shift, int rows) {
    int const row = lane % 32 / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      inverse[r] = total[r] == 0.f ? 0.f : 1.f / total[r];
      if (lane % 4 == 0 && row + 8 * r < rows)
        lse[row + 8 * r] = (base[r] + log2f(total[r]) - kLargestWeight) * 0.6931471805599453f + shift[row + 8 * r];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i += 4) {
      float2 const of_columns = *reinterpret_cast<float2 const*>(channel + i * 2 + lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; e++) output[i + e] *= e % 2 == 0 ? of_columns.x : of_columns.y;
    }
    // A block of 16-bit columns has as many bytes as the queries.
    constexpr int kBlock = kHeadDim < 64 ? kHeadDim : 64, kOther = kHeadDim - kBlock;
    store_columns<0, kBlock>(out, stride, inverse, rows);
    if constexpr (kOther > 0) {
      __syncwarp();
      store_columns<kBlock, kOther>(out, stride, inverse, rows);
    }
  }

  template <int kFrom, int kColumns>
  __device__ __forceinline__ void store_columns(Element* out, long long stride, float const (&inverse)[2], int rows) {
    float values[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) values[i] = output[kFrom / 2 + i];
    store_rows<kRows>(s.q[id], lane, values, inverse, rows, out + kFrom, stride);
  }
};

}  // namespace sta
