// The producer of the kernel whose thread blocks own keys: which queries see a block's keys, and their loads.
#pragma once

#include "sm90/group_list.cuh"
#include "sm90/problem.cuh"
#include "sm90/query_sum.cuh"

namespace sta {

constexpr int kBlockKeys = 2 * kRows;  // of a thread block: two warpgroups
constexpr int kBlockQueries = 64;      // of a step
constexpr int kGroups = kBlockQueries / kGroup;
constexpr int kNoted = 4 * kStages;    // steps whose rows are kept: dQ may be two steps behind

struct BackwardParameters {
  TensorMap q, dout, k, v;         // boxes of kAtomColumns columns by 64 tokens
  TensorMap q_group, dout_group;   // by kGroup tokens
  float2 const* statistics;        // [batch, heads, queries] of (lse * log2(e), dout . out), then one of (infinity, 0)
  float* dq_sum;                   // [parts, batch, heads, queries, kPart], zero; or null
  long long part_rows;             // batch * heads * queries
  Output dk, dv;
  float softmax_scale;
  int kv_heads, tile_blocks;       // thread blocks of a tile
  Problem problem;
};

// What a thread block does: keys from `first` on, of which `length` are its own.
struct KeyWork {
  int batch, kv_head, first, length, context;  // context: -1 for the video
  bool whole;                                  // seen by the whole video
  int tile[3];
};

__device__ __forceinline__ KeyWork key_work_of(BackwardParameters const& parameters, int block) {
  Problem const& p = parameters.problem;
  KeyWork work = {};
  work.context = -1;
  int const of_contexts = p.batch_heads / p.heads * parameters.kv_heads * p.context_blocks;
  bool const context = block < of_contexts;
  if (!context) block -= of_contexts;
  int const per_head = context ? p.context_blocks : p.axis[0].tiles * p.axis[1].tiles * p.axis[2].tiles * parameters.tile_blocks;
  int const head = block / per_head;
  block %= per_head;
  work.batch = head / parameters.kv_heads;
  work.kv_head = head % parameters.kv_heads;
  work.whole = context || is_masked(p, work.batch) || is_dense(p, work.batch);
  if (context) {
    work.context = 0;
    while (block * kBlockKeys >= p.context_length[work.context]) {
      block -= (p.context_length[work.context] + kBlockKeys - 1) / kBlockKeys;
      work.context++;
    }
    work.first = p.context_key[work.context] + block * kBlockKeys;
    work.length = p.context_length[work.context] - block * kBlockKeys;
    return work;
  }
  int tile = block / parameters.tile_blocks;
  block %= parameters.tile_blocks;
  work.tile[2] = tile % p.axis[2].tiles;
  tile /= p.axis[2].tiles;
  work.tile[1] = tile % p.axis[1].tiles;
  work.tile[0] = tile / p.axis[1].tiles;
  Run const run = Runs(p.axis, {work.tile[0], 1}, {work.tile[1], 1}, {work.tile[2], 1}).at(0, 0);
  work.first = p.video_key + run.start + block * kBlockKeys;
  work.length = run.length - block * kBlockKeys;
  return work;
}

// Does a key of the block count? Each context has keys that are not valid.
__device__ __forceinline__ bool counts(Problem const& p, KeyWork const& work, int key) {
  if (key >= work.length) return false;
  int const token = work.first + key;
  if (work.context < 0) return p.video_mask == nullptr || video_flags(p, work.batch)[token];
  if (token - p.context_key[work.context] >= valid_keys(p, work.batch, work.context)) return false;
  unsigned char const* flags = context_flags(p, work.batch, work.context);
  return flags == nullptr || flags[token];
}

// Runs of queries of one head that see the keys: of the video's transposed window, then one for each context.
struct Queries {
  static constexpr bool kAligned = false;

  Problem const& p;
  Runs video;
  int of_video, count;

  __device__ __forceinline__ Queries(Problem const& p, KeyWork const& work, int head) : p(p), video(box(p, work, head)) { count_runs(); }

  __device__ __forceinline__ void turn_to(KeyWork const& work, int head) {
    video = box(p, work, head);
    count_runs();
  }

  __device__ __forceinline__ void count_runs() {
    of_video = video.count_t * video.count_h;
    count = of_video + p.contexts;
  }

  static __device__ __forceinline__ Runs box(Problem const& p, KeyWork const& work, int head) {
    Span span[3];
#pragma unroll
    for (int i = 0; i < 3; i++) span[i] = work.whole ? Span{0, p.axis[i].tiles} : groups_of(p, head, i).seen_by(work.tile[i]);
    return Runs(p.axis, span[0], span[1], span[2]);
  }

  __device__ __forceinline__ Run at(int index) const {
    if (index < of_video) {
      Run run = video.at(index / video.count_h, index % video.count_h);
      run.start += p.video_query;
      return run;
    }
    index -= of_video;
    return index < p.contexts ? Run{p.context_query[index], p.context_rows[index]} : Run{0, 0};
  }

  __device__ __forceinline__ int in_blocks(int, Run const& run) const { return run.length / kBlockQueries * kBlockQueries; }
};

struct BackwardShared {
  alignas(1024) unsigned char k[kBlockKeys * kRowBytes], v[kBlockKeys * kRowBytes];
  alignas(1024) unsigned char q[kStages][kBlockQueries * kRowBytes], dout[kStages][kBlockQueries * kRowBytes];
  alignas(1024) unsigned char dscores[kQuerySum ? 2 : 1][kQuerySum ? kBlockKeys * kSwizzle : 1024];  // [keys][queries]
  alignas(1024) float dq[kQuerySum ? kParts : 1][kQuerySum ? kBlockQueries * kPart : 256];
  float lse[kStages][kBlockQueries], delta[kStages][kBlockQueries];  // the statistics
  GroupList<kGroups> list;
  Barrier keys_full, q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], ds_full[2], ds_empty[2], loaded, counted;
  int steps;
  // Of each group of a step: its first row in [batch, heads, queries], and which of its rows count.
  long long row[kNoted][kGroups];
  unsigned char from[kNoted][kGroups], to[kNoted][kGroups];
};
static_assert(offsetof(BackwardShared, to) + sizeof(BackwardShared::to) <= kSharedBytes);

// Rows that see nothing of this block have no weight (their lse is infinite), but 0 * NaN is NaN.
__device__ __forceinline__ void clear_rows(unsigned char* rows, unsigned seen, int g) {
  constexpr int kPieces = kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kGroup * kPieces; i += 32) {
    int const row = i / kPieces, piece = i % kPieces;
    if (!(seen >> row & 1))
      *reinterpret_cast<uint4*>(rows + piece / 8 * kBlockQueries * kSwizzle + (g * kGroup + row) * kSwizzle + piece % 8 * 16) = {};
  }
}

// One warp.
__device__ __forceinline__ void produce_queries(BackwardParameters const& parameters, BackwardShared& s, KeyWork const& work) {
  Problem const& p = parameters.problem;
  int const lane = threadIdx.x % 32;
  bool const leader = lane == 0;
  int const share = p.heads / parameters.kv_heads, first_head = work.kv_head * share;
  Queries queries(p, work, first_head);
  Walk<kBlockQueries, Queries> walk(queries);
  int steps = share * (walk.blocks + walk.rest_blocks);
  if constexpr (kHeadWindows) {
    steps = walk.blocks + walk.rest_blocks;
#pragma unroll 1
    for (int head = first_head + 1; head < first_head + share; head++) {
      queries.turn_to(work, head);
      walk.start();
      steps += walk.blocks + walk.rest_blocks;
    }
  }
  if (leader) {
    s.steps = steps;
    arrive(s.counted);
    expect(s.keys_full, 2 * kBlockKeys * kRowBytes);
    for (int c = 0; c < kColumnBlocks; c++)
      for (int unit = 0; unit < kBlockKeys / kRows; unit++) {
        int const to = c * kBlockKeys * kSwizzle + unit * kRows * kSwizzle, token = work.first + unit * kRows;
        load_box(s.k + to, parameters.k, s.keys_full, c * kAtomColumns, token, work.kv_head, work.batch);
        load_box(s.v + to, parameters.v, s.keys_full, c * kAtomColumns, token, work.kv_head, work.batch);
      }
    arrive(s.keys_full);
  }
  long long const all_rows = static_cast<long long>(p.batch_heads) * p.queries;
  int j = 0, loads = 0, listed = 0;
#pragma unroll 1
  for (int head = first_head; head < first_head + share; head++) {
    if constexpr (kHeadWindows) {
      queries.turn_to(work, head);
      walk.start();
    }
    long long const head_row = (static_cast<long long>(work.batch) * p.heads + head) * p.queries;
    // Row `lane` and row lane + 32 of the block, -1 for one that sees nothing. They are read before a stage is waited for.
    auto const read = [&](long long row) { return parameters.statistics[row < 0 ? all_rows : row]; };
    auto const write = [&](int stage, float2 first, float2 second) {
      s.lse[stage][lane] = first.x;
      s.delta[stage][lane] = first.y;
      s.lse[stage][lane + 32] = second.x;
      s.delta[stage][lane + 32] = second.y;
      arrive(s.q_full[stage]);
    };
    walk.whole([&](int token) {
      int const stage = j % kStages, parity = j / kStages % 2 ^ 1;
      float2 const first = read(head_row + token + lane), second = read(head_row + token + lane + 32);
      wait(s.q_empty[stage], parity);
      if (leader) {
        for (int g = 0; g < kGroups; g++) {
          s.row[j % kNoted][g] = head_row + token + g * kGroup;
          s.from[j % kNoted][g] = 0;
          s.to[j % kNoted][g] = kGroup;
        }
        expect(s.q_full[stage], kBlockQueries * kRowBytes);
        for (int c = 0; c < kColumnBlocks; c++)
          load_box(s.q[stage] + c * kBlockQueries * kSwizzle, parameters.q, s.q_full[stage], c * kAtomColumns, token, head, work.batch);
        arrive(s.q_full[stage]);
      }
      __syncwarp();
      write(stage, first, second);
      if (leader) {
        wait(s.dout_empty[stage], parity);
        expect(s.dout_full[stage], kBlockQueries * kRowBytes);
        for (int c = 0; c < kColumnBlocks; c++)
          load_box(s.dout[stage] + c * kBlockQueries * kSwizzle, parameters.dout, s.dout_full[stage], c * kAtomColumns, token, head, work.batch);
        arrive(s.dout_full[stage]);
      }
      __syncwarp();
      j++;
    });
#pragma unroll 1
    for (int r = 0; r < walk.rest_blocks; r++, j++) {
      int const stage = j % kStages, parity = j / kStages % 2 ^ 1;
      ListedGroup const mine = s.list.take(listed++);
      auto const row_of = [&](int i) {
        int const first = __shfl_sync(~0u, mine.token, i / kGroup);
        return __shfl_sync(~0u, mine.seen, i / kGroup) >> i % kGroup & 1 ? head_row + first + i % kGroup : -1ll;
      };
      float2 const first = read(row_of(lane)), second = read(row_of(lane + 32));
      int const c = lane % kColumnBlocks, g = lane / kColumnBlocks, token = __shfl_sync(~0u, mine.token, g);
      auto const load = [&](unsigned char* rows, TensorMap const& map, Barrier& full) {
        Barrier& loaded = walk.shorter ? s.loaded : full;
        if (leader) expect(loaded, kBlockQueries * kRowBytes);
        __syncwarp();
        if (g < kGroups)
          load_box(rows + c * kBlockQueries * kSwizzle + g * kGroup * kSwizzle, map, loaded, c * kAtomColumns, token, head, work.batch);
        __syncwarp();
        if (leader) arrive(loaded);
        if (walk.shorter) {
          wait(s.loaded, loads++ % 2);
          for (int i = 0; i < kGroups; i++) clear_rows(rows, __shfl_sync(~0u, mine.seen, i), i);
          fence_shared_writes();
          __syncwarp();
          if (leader) arrive(full);
        }
      };
      wait(s.q_empty[stage], parity);
      write(stage, first, second);
      for (int i = 0; i < kGroups; i++) {
        unsigned const of_group = __shfl_sync(~0u, mine.seen, i);
        int const start = __shfl_sync(~0u, mine.token, i);
        if (leader) {
          s.row[j % kNoted][i] = head_row + start;
          s.from[j % kNoted][i] = of_group == 0 ? 0 : __ffs(of_group) - 1;
          s.to[j % kNoted][i] = 32 - __clz(of_group);
        }
      }
      load(s.q[stage], parameters.q_group, s.q_full[stage]);
      wait(s.dout_empty[stage], parity);
      load(s.dout[stage], parameters.dout_group, s.dout_full[stage]);
    }
  }
}

// One warp, beside the one that loads.
__device__ __forceinline__ void list_queries(BackwardParameters const& parameters, BackwardShared& s, KeyWork const& work) {
  Problem const& p = parameters.problem;
  int const first_head = work.kv_head * (p.heads / parameters.kv_heads);
  Queries queries(p, work, first_head);
  Walk<kBlockQueries, Queries> walk(queries);
  int block = 0;
  for (int i = 0; i < p.heads / parameters.kv_heads; i++) {
    if constexpr (kHeadWindows) {
      queries.turn_to(work, first_head + i);
      walk.start();
    }
    s.list.fill(walk, [](int) { return static_cast<unsigned char const*>(nullptr); }, block);
  }
}

}  // namespace sta
