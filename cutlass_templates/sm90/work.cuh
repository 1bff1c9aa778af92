// The problem of one launch and its division into thread blocks of query rows. Integers only: a host compiler takes it too.
#pragma once

#include "include/key_runs.cuh"

namespace sta {

constexpr int kRows = 64;  // of a warpgroup
constexpr int kContexts = 4;
constexpr int kNothing = 1 << 24;  // the block of query rows of a thread block that has none

// A thread block of query rows where heads have windows of their own: `block` of a group of tiles with one window.
struct alignas(16) ListedBlock {
  int head, block;
  unsigned short group[4];  // of frames, rows and columns
};

struct Problem {
  void const* lengths;           // [batch, contexts] of length_bytes each, or null
  unsigned char const* dense;    // [batch], or null
  unsigned char const* key_mask;    // [batch, context_keys], 0 hides a key of a context; or null
  unsigned char const* video_mask;  // [batch, tokens of the video], or null
  unsigned char const* shown;       // [batch], samples whose video_mask hides nothing; or null
  float scale;                   // softmax scale * log2(e)
  int length_bytes, batch_heads, heads, queries;
  int video_key, video_query;    // first token of the grid
  Axis axis[3];
  Groups groups[3];
  Divisor by_share, by_heads, by_context_blocks, by_video_blocks;
  // Thread blocks of one head: of all its contexts, of the video, and of the groups of tiles with one window. Groups are
  // counted apart for the first, a middle and the last one of each axis: blocks of one [t], [t][h] and [t][h][w].
  int context_blocks, video_blocks;
  Divisor slab_blocks[3], band_blocks[3][3], group_blocks[3][3][3];
  int contexts, context_keys;
  int context_column[kContexts];  // in key_mask
  int context_key[kContexts], context_length[kContexts], context_query[kContexts], context_rows[kContexts];
  // With kHeadWindows. video_blocks and by_video_blocks are then of a whole sample, and `groups` and what counts their blocks
  // have no use.
  ListedBlock const* listed;  // thread blocks of a sample that is not dense, the longest first
  int const* windows;         // [heads, 3], in tiles
  int listed_blocks, whole_blocks;  // thread blocks of one head in a dense sample
};

// Keys of a context that count, from its first one on.
__device__ __forceinline__ int valid_keys(Problem const& p, int batch, int context) {
  int const length = p.context_length[context];
  if (p.lengths == nullptr) return length;
  int const at = batch * p.contexts + context;
  long long const given = p.length_bytes == 8 ? static_cast<long long const*>(p.lengths)[at] : static_cast<int const*>(p.lengths)[at];
  return static_cast<int>(max(0ll, min(given, static_cast<long long>(length))));
}

// Flags of a context's keys by token, or null.
__device__ __forceinline__ unsigned char const* context_flags(Problem const& p, int batch, int context) {
  if (p.key_mask == nullptr) return nullptr;
  return p.key_mask + static_cast<long long>(batch) * p.context_keys + p.context_column[context] - p.context_key[context];
}

// Flags of the video's keys by token.
__device__ __forceinline__ unsigned char const* video_flags(Problem const& p, int batch) {
  long long const tokens = p.axis[0].length * p.axis[1].length * p.axis[2].length;
  return p.video_mask + batch * tokens - p.video_key;
}

// What a thread block does: `block` counts the blocks of its group of tiles or of its context.
struct Work {
  int batch, head, block, context;  // context: -1 for the video
  bool whole;                       // sees the whole video
  bool masked;                      // but for what video_mask hides
  int group[3];
};

// Groups of one axis lie in order; returns one's index and makes `block` count from its start.
__device__ __forceinline__ int take_group(int& block, Divisor const (&blocks)[3], int count, int& place) {
  place = 0;
  if (block < blocks[0].value) return 0;
  block -= blocks[0].value;
  int const middle = min(blocks[1].divide(block), count - 2);
  block -= middle * blocks[1].value;
  place = middle < count - 2 ? 1 : 2;
  return middle + 1;
}

__device__ __forceinline__ bool is_masked(Problem const& p, int batch) { return p.video_mask != nullptr && !p.shown[batch]; }

__device__ __forceinline__ bool is_dense(Problem const& p, int batch) { return p.dense != nullptr && p.dense[batch]; }

// With kHeadWindows: of a block that counts those of the video.
__device__ __forceinline__ Work listed_work(Problem const& p, int block) {
  Work work = {};
  work.context = -1;
  work.batch = p.by_video_blocks.divide(block);
  block -= work.batch * p.by_video_blocks.value;
  work.masked = is_masked(p, work.batch);
  work.whole = work.masked || is_dense(p, work.batch);
  if (work.whole) {
    int const head = block / p.whole_blocks;
    work.head = head < p.heads ? head : 0;
    work.block = head < p.heads ? block - head * p.whole_blocks : kNothing;
  } else if (block < p.listed_blocks) {
    ListedBlock const listed = p.listed[block];
    work.head = listed.head;
    work.block = listed.block;
    for (int i = 0; i < 3; i++) work.group[i] = listed.group[i];
  } else {
    work.block = kNothing;
  }
  return work;
}

__device__ __forceinline__ Work work_of(Problem const& p, int block) {
  constexpr int kBlockRows = kRows * kWarpgroups;
  Work work = {};
  work.context = -1;
  int const of_contexts = p.batch_heads * p.context_blocks;
  bool const context = block < of_contexts;
  if constexpr (kHeadWindows) {
    if (!context) return listed_work(p, block - of_contexts);
  }
  Divisor const& per_head = context ? p.by_context_blocks : p.by_video_blocks;
  if (!context) block -= of_contexts;
  int const batch_head = per_head.divide(block);
  block -= batch_head * per_head.value;
  work.batch = p.by_heads.divide(batch_head);
  work.head = batch_head - work.batch * p.heads;
  if (context) {
    // They read all keys, so they are the longest and come first.
    work.context = 0;
    while (block * kBlockRows >= p.context_rows[work.context]) {
      block -= (p.context_rows[work.context] + kBlockRows - 1) / kBlockRows;
      work.context++;
    }
  }
  work.block = block;
  work.masked = is_masked(p, work.batch);
  work.whole = context || work.masked || is_dense(p, work.batch);
  if (work.whole) return work;
  int t, h, w;
  work.group[0] = take_group(work.block, p.slab_blocks, p.groups[0].count, t);
  work.group[1] = take_group(work.block, p.band_blocks[t], p.groups[1].count, h);
  work.group[2] = take_group(work.block, p.group_blocks[t][h], p.groups[2].count, w);
  return work;
}

// Groups of one axis' tiles for a query head.
__device__ __forceinline__ Groups groups_of(Problem const& p, int head, int axis) {
  if constexpr (kHeadWindows) {
    int const tiles = p.axis[axis].tiles, half = p.windows[3 * head + axis] / 2, width = min(tiles, 2 * half + 1);
    return {tiles, half, width, tiles - width + 1};
  }
  return p.groups[axis];
}

template <bool kOfQueries>
__device__ __forceinline__ Runs box_of(Problem const& p, Work const& work) {
  Span span[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    Groups const& groups = groups_of(p, work.head, i);
    span[i] = work.whole ? Span{0, p.axis[i].tiles} : kOfQueries ? groups.queries(work.group[i]) : groups.keys(work.group[i]);
  }
  return Runs(p.axis, span[0], span[1], span[2]);
}

// Query rows of a warp, at most kGroup of them, from `first` on. Rows of different runs are packed into one block.
struct WarpRows {
  int first, count;  // count <= 0: the block has less to do
};

// warp: among those that compute.
__device__ __forceinline__ WarpRows rows_of(Problem const& p, Work const& work, int warp) {
  int index = work.block * kWarpgroups * 4 + warp;
  if (work.context >= 0) return {p.context_query[work.context] + index * kGroup, p.context_rows[work.context] - index * kGroup};
  Runs const runs = box_of<true>(p, work);
#pragma unroll 1
  for (int a = 0; a < runs.count_t; a++) {
#pragma unroll 1
    for (int b = 0; b < runs.count_h; b++) {
      Run const run = runs.at(a, b);
      int const groups = (run.length + kGroup - 1) / kGroup;
      if (index < groups) return {p.video_query + run.start + index * kGroup, run.length - index * kGroup};
      index -= groups;
    }
  }
  return {0, 0};
}

}  // namespace sta
