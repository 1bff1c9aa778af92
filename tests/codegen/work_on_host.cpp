// The C++ kernels' division of a problem into work, for a host compiler: which rows does each warp own, which keys do they see?
#include <algorithm>
#include <cstdint>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<std::uint64_t>(a) * b >> 32; }

namespace sta {
constexpr int kWarpgroups = WARPGROUPS;
constexpr bool kHeadWindows = HEAD_WINDOWS;
}  // namespace sta

#include "sm90/work.cuh"

using namespace sta;

// For each warp with rows: sample, head, first row, rows, number of runs of keys, and (start, length) of each. Returns how many
// integers that are.
extern "C" int query_work(Problem const* problem, int blocks, int* out) {
  Problem const& p = *problem;
  int const* const begin = out;
  for (int block = 0; block < blocks; block++) {
    Work const work = work_of(p, block);
    Runs const video = box_of<false>(p, work);
    for (int warp = 0; warp < 4 * kWarpgroups; warp++) {
      WarpRows const rows = rows_of(p, work, warp);
      if (rows.count <= 0) continue;
      int const of_video = video.count_t * video.count_h;
      for (int value : {work.batch, work.head, rows.first, min(rows.count, kGroup), of_video + p.contexts}) *out++ = value;
      for (int i = 0; i < of_video; i++) {
        Run const run = video.at(i / video.count_h, i % video.count_h);
        *out++ = p.video_key + run.start;
        *out++ = run.length;
      }
      for (int i = 0; i < p.contexts; i++) {
        *out++ = p.context_key[i];
        *out++ = valid_keys(p, work.batch, i);
      }
    }
  }
  return static_cast<int>(out - begin);
}

// (first, count) on each axis of the query tiles that see key tile (t, h, w).
extern "C" void seen_by(Problem const* problem, int head, int const* tile, int* out) {
  for (int i = 0; i < 3; i++) {
    Span const span = groups_of(*problem, head, i).seen_by(tile[i]);
    *out++ = span.first;
    *out++ = span.count;
  }
}
