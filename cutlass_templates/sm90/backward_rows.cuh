// What the backward pass does to rows by themselves, before and after its products.
#pragma once

#include "include/ptx.cuh"
#include "include/strided.cuh"
#include "sm90/query_sum.cuh"

namespace sta {

constexpr int kPieces = kHeadDim / 8;     // of 16 bytes
constexpr int kLanes = 256 / kBlockRows;  // that share a row
static_assert(kPieces <= kLanes && 32 % kLanes == 0);

struct RowParameters {
  Input out, dout;
  float const* lse;    // [batch, heads, queries]
  float2* statistics;  // [batch, heads, queries] of (lse * log2(e), dout . out), then one of (infinity, 0)
  float const* dq_sum;
  Output dq;
  float softmax_scale;
  int batch_heads, heads, queries;
};

struct Row {
  int batch, head, token;
};

__device__ __forceinline__ Row row_of(RowParameters const& p, long long row) {
  int const batch_head = static_cast<int>(row / p.queries);
  return {batch_head / p.heads, batch_head % p.heads, static_cast<int>(row - static_cast<long long>(batch_head) * p.queries)};
}

__device__ __forceinline__ float widen(unsigned short bits) {
  if constexpr (kBfloat16) return __uint_as_float(static_cast<unsigned>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace sta

// Rows without a key have an lse of -infinity; +infinity gives their weights as zero.
extern "C" __global__ void __launch_bounds__(256) sta_row_statistics(__grid_constant__ sta::RowParameters const p) {
  using namespace sta;
  int const lane = threadIdx.x % kLanes;
  long long const row = static_cast<long long>(blockIdx.x) * kBlockRows + threadIdx.x / kLanes;
  long long const rows = static_cast<long long>(p.batch_heads) * p.queries;
  if (row == rows && lane == 0) p.statistics[row] = make_float2(kInfinity, 0.f);
  bool const exists = row < rows;
  float sum = 0.f;
  if (exists && lane < kPieces) {
    Row const at = row_of(p, row);
    auto const load = [&](Input const& x) {
      return *reinterpret_cast<uint4 const*>(x.row(at.batch, at.head, at.token) + lane * 8);
    };
    uint4 const a = load(p.out), b = load(p.dout);
    unsigned const left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum = fmaf(widen(left[i] & 0xFFFF), widen(right[i] & 0xFFFF), sum);
      sum = fmaf(widen(left[i] >> 16), widen(right[i] >> 16), sum);
    }
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (!exists || lane != 0) return;
  float const lse = p.lse[row];
  p.statistics[row] = make_float2(lse == -kInfinity ? kInfinity : lse * 1.4426950408889634f, sum);
}

// The sum of dQ, times the softmax scale, in 16 bits.
extern "C" __global__ void __launch_bounds__(256) sta_convert_sum(__grid_constant__ sta::RowParameters const p) {
  using namespace sta;
  int const lane = threadIdx.x % kLanes;
  long long const row = static_cast<long long>(blockIdx.x) * kBlockRows + threadIdx.x / kLanes;
  if (row >= static_cast<long long>(p.batch_heads) * p.queries || lane >= kPieces) return;
  Row const at = row_of(p, row);
  unsigned packed[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int const column = lane * 8 + i * 4;
    long long const rows = static_cast<long long>(p.batch_heads) * p.queries;
    float4 const part = *reinterpret_cast<float4 const*>(p.dq_sum + (column / kPart * rows + row) * kPart + swizzle_sum(row, column % kPart));
    packed[2 * i] = pack<kBfloat16>(part.x * p.softmax_scale, part.y * p.softmax_scale);
    packed[2 * i + 1] = pack<kBfloat16>(part.z * p.softmax_scale, part.w * p.softmax_scale);
  }
  *reinterpret_cast<uint4*>(p.dq.row(at.batch, at.head, at.token) + lane * 8) =
      make_uint4(packed[0], packed[1], packed[2], packed[3]);
}
