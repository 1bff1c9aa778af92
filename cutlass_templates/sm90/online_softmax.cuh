// The consumers: online softmax over blocks of keys, and the output.
#pragma once

#include "sm90/key_rows.cuh"
#include "sm90/shared_rows.cuh"

namespace sta {

// bfloat16 reaches as far as float; float16 holds twice this.
constexpr float kLargestSum = kBfloat16 ? 16777216.f : 32768.f;

// Blocks that lie wholly in a run, those of the packed rest, and blocks of means, whose scores get a bias.
enum class Part { kWhole, kRest, kMeans };

// Shared has q, stages and keys; for means, keys have a bias.
template <class Shared>
struct Consumer {
  Shared& s;
  int const id, lane;  // warpgroup, thread in it
  float const scale;
  float scores[kScores], output[kOutputs] = {};
  unsigned weights[kKeys / 4];
  float top[2] = {-kInfinity, -kInfinity}, total[2] = {0, 0};

  // rows: the warpgroup whose rows they are.
  __device__ __forceinline__ void multiply_keys(int rows, int stage) {
    pin(scores);
    begin_products();
    multiply_rows<Halves, ScoresMma, kRows, kKeys>(s.q[rows], s.stages.k[stage], scores);
    finish_products();
    pin(scores);
  }

  __device__ __forceinline__ void add_values(int stage) {
    pin(weights);
    pin(output);
    begin_products();
    add_rows<OutputMma, kKeys>(weights, s.stages.v[stage], output);
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

  template <Part kPart>
  __device__ __forceinline__ void correct_scores(int stage) {
    if constexpr (kPart == Part::kRest) hide_unseen<Halves>(s.keys.seen[stage], lane, scores);
    if constexpr (kPart == Part::kMeans) {
      float const* const bias = s.keys.bias[stage] + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        float2 const of_keys = *reinterpret_cast<float2 const*>(bias + 2 * i);
#pragma unroll
        for (int e = 0; e < 4; e++) scores[i + e] += e % 2 == 0 ? of_keys.x : of_keys.y;
      }
    }
  }

  // kShared: blocks are given to the warpgroups in turn.
  template <Part kPart, bool kShared>
  __device__ __forceinline__ void walk(int first, int end) {
    constexpr bool kRest = kPart == Part::kRest;
    int const rows = kShared ? 0 : id;
#pragma unroll 1
    for (int j = first; j < end; j++) {
      int const stage = j % kStages, parity = j / kStages % 2;
      if constexpr (kShared) {
        if (j % kWarpgroups != id) {
          pass_block<kRest>(s.keys, id, lane, j - first, stage, parity);
          continue;
        }
      }
      bool const fresh = j < (kShared ? kWarpgroups : 1);  // there is no maximum yet
      wait(s.keys.k_full[stage], parity);
      multiply_keys(rows, stage);
      correct_scores<kPart>(stage);
      float2 sums;
      if (!fresh) sums = exponentiate();
      if (fresh || any_of_warpgroup(out_of_range(sums), id)) {
        if (!fresh) {
          multiply_keys(rows, stage);
          correct_scores<kPart>(stage);
        }
        renew_top();
        sums = exponentiate();
      }
      if constexpr (kRest) arrive(s.keys.seen_empty[(j - first) % kStages]);
      release(s.keys.k_empty[stage]);
      take_weights(sums);
      wait(s.keys.v_full[stage], parity);
      add_values(stage);
      release(s.keys.v_empty[stage]);
    }
  }

  // Blocks of means, and then block `end`, a matrix of slopes: values of skipped keys lean with the query, by its product
  // with the slopes for a weight of 1.
  __device__ __forceinline__ void walk_means(int first, int end) {
    float const above[2] = {top[0], top[1]}, before[2] = {total[0], total[1]};
    walk<Part::kMeans, false>(first, end);
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      weight[r] = total[r] - (before[r] == 0.f ? 0.f : before[r] * exp2_approx(above[r] - top[r]));
      weight[r] += __shfl_xor_sync(~0u, weight[r], 1);
      weight[r] += __shfl_xor_sync(~0u, weight[r], 2);
    }
    int const stage = end % kStages;
    wait(s.keys.k_full[stage], end / kStages % 2);
    multiply_keys(id, stage);
    release(s.keys.k_empty[stage]);
#pragma unroll
    for (int i = 0; i < kOutputs; i++) output[i] = fmaf(weight[i / 2 % 2], scores[i], output[i]);
  }

  __device__ __forceinline__ bool collect() { return add_parts(s, id, lane, output, top, total); }

  // out, lse: of this warp's first row, of `rows` that exist.
  __device__ __forceinline__ void store(Element* out, long long stride, float* lse, int rows) {
    int const row = lane % 32 / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      inverse[r] = total[r] == 0.f ? 0.f : 1.f / total[r];
      if (lane % 4 == 0 && row + 8 * r < rows) lse[row + 8 * r] = (top[r] + log2f(total[r])) * 0.6931471805599453f;
    }
    store_rows<kRows>(s.q[id], lane, output, inverse, rows, out, stride);
  }
};

}  // namespace sta
