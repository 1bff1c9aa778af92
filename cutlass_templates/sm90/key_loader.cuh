// The producer of kernels whose thread blocks own queries: which keys does a block read, and when are they loaded? How they
// lie in memory is a Source's to know (key_rows.cuh, key_bytes.cuh).
#pragma once

#include "sm90/group_list.cuh"
#include "sm90/problem.cuh"

namespace sta {

static_assert(kKeys % kGroup == 0);
constexpr int kScores = kKeys / 2, kOutputs = kHeadDim / 2;  // registers of a thread

// Apart from the stages of keys and values, whose alignment would pad it.
template <int kInFlight>
struct KeyState {
  Barrier k_full[kInFlight], k_empty[kInFlight], v_full[kInFlight], v_empty[kInFlight], v_loaded, seen_empty[kInFlight];
  GroupList<kKeys / kGroup> list;
  int blocks, rest_blocks;
  bool shared;  // all warpgroups take the first one's rows, and different blocks of keys
  unsigned seen[kInFlight][(kKeys / kGroup + 1) / 2];  // of two groups: bit i, key i counts

  // What the loads of the first blocks need.
  __device__ __forceinline__ void init_loads() {
    init(v_loaded, 1);
    for (int i = 0; i < kInFlight; i++) {
      init(k_full[i], 1);
      init(v_full[i], 1);
    }
  }

  // readers: warpgroups that say when a block is no longer needed, and each thread of them that it has read `seen`.
  __device__ __forceinline__ void init_releases(int readers) {
    for (int i = 0; i < kInFlight; i++) {
      init(k_empty[i], readers);
      init(v_empty[i], readers);
      init(seen_empty[i], readers * 128);
    }
  }

  __device__ __forceinline__ void init_list() { list.init_barriers(); }
};

// Runs of keys: of the video's window, then one for each context. kAlignedLoads: see Walk.
template <bool kAlignedLoads>
struct Keys {
  static constexpr bool kAligned = kAlignedLoads;

  Problem const& p;
  int batch;
  Runs video;
  int of_video, count;
  bool masked;  // the video

  __device__ __forceinline__ Keys(Problem const& p, Work const& work)
      : p(p), batch(work.batch), video(box_of<false>(p, work)), masked(work.masked) {
    of_video = video.count_t * video.count_h;
    count = of_video + p.contexts;
  }

  __device__ __forceinline__ Run at(int index) const {
    if (index < of_video) {
      Run run = video.at(index / video.count_h, index % video.count_h);
      run.start += p.video_key;
      return run;
    }
    index -= of_video;
    if (index >= p.contexts) return {0, 0};
    return {p.context_key[index], valid_keys(p, batch, index)};
  }

  // Keys of a run that are walked in whole blocks: none where each key may be hidden.
  __device__ __forceinline__ int in_blocks(int index, Run const& run) const {
    bool const picky = index < of_video ? masked : p.key_mask != nullptr;
    return picky ? 0 : run.length / kKeys * kKeys;
  }

  // Flags of a run by token, or null.
  __device__ __forceinline__ unsigned char const* flags(int index) const {
    return index < of_video ? masked ? video_flags(p, batch) : nullptr : context_flags(p, batch, index - of_video);
  }
};

// A consumer warp's rows; `firsts` tells them to the producer.
__device__ __forceinline__ WarpRows take_rows(Problem const& p, Work const& work, int warp, int (&firsts)[4 * kWarpgroups]) {
  WarpRows const rows = rows_of(p, work, warp);
  if (threadIdx.x % 32 == 0) firsts[warp] = rows.count > 0 ? rows.first : -1;
  return rows;
}

// One warp. A warp without rows, of a warpgroup with some, gets those of the warp before: finite where those are.
template <class Layout>
__device__ __forceinline__ void load_rows(unsigned char (&rows)[kWarpgroups][kRows * Layout::kRowBytes], TensorMap const& map,
                                          int const (&firsts)[4 * kWarpgroups], int active, Barrier& full, Work const& work) {
  int const lane = threadIdx.x % 32;
  if (lane == 0) expect(full, active * kRows * Layout::kRowBytes);
  __syncwarp();
  for (int i = lane; i < active * 4 * Layout::kColumnBlocks; i += 32) {
    int const warp = i / Layout::kColumnBlocks, c = i % Layout::kColumnBlocks;
    int given = warp;
    while (firsts[given] < 0) given--;
    load_box(rows[warp / 4] + c * kRows * kSwizzle + warp % 4 * kGroup * kSwizzle, map, full, c * Layout::kAtomColumns, firsts[given],
             work.head, work.batch);
  }
  __syncwarp();
}

// One warp. kClearKeys: hidden keys are cleared too, for kernels that multiply by them (and not only by values).
// KeyRuns: a side of Walk that has `flags` too.
template <bool kClearKeys, class Source, class KeyRuns = Keys<Source::kAligned>>
struct KeyLoader {
  using Runs = KeyRuns;
  using State = KeyState<Source::kInFlight>;
  static constexpr int kInFlight = Source::kInFlight;

  Problem const& p;
  Source const& source;
  State& s;
  Work const& work;
  Walk<kKeys, KeyRuns> walk;
  int const kv_head;
  bool const leader;
  bool started = false;  // is the first whole block on its way?

  __device__ __forceinline__ KeyLoader(Problem const& p, Source const& source, State& s, Work const& work, KeyRuns const& keys)
      : p(p), source(source), s(s), work(work), walk(keys), kv_head(p.by_share.divide(work.head)), leader(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void load_whole_keys(int stage, int token) const {
    expect(s.k_full[stage], Source::kKeyBytes);
    source.load_keys(stage, s.k_full[stage], token, kv_head, work.batch);
    arrive(s.k_full[stage]);
  }
  __device__ __forceinline__ void load_whole_values(int stage, int token) const {
    expect(s.v_full[stage], Source::kValueBytes);
    source.load_values(stage, s.v_full[stage], token, kv_head, work.batch);
    arrive(s.v_full[stage]);
  }

  __device__ __forceinline__ static KeyRuns runs(Problem const& p, Source const&, Work const& work) { return KeyRuns(p, work); }

  // One warp, beside the one that loads.
  __device__ __forceinline__ static void list(State& s, KeyRuns const& keys, Source const&, Work const&) {
    Walk<kKeys, KeyRuns> walk(keys);
    int block = 0;
    s.list.fill(walk, [&](int run) { return keys.flags(run); }, block);
  }

  // For those that read.
  __device__ __forceinline__ void tell_counts() const {
    if (!leader) return;
    s.blocks = walk.blocks;
    s.rest_blocks = walk.rest_blocks;
  }

  // Before anyone reads: counts the blocks, and loads the first whole one, whose stage is free.
  __device__ __forceinline__ void start() {
    int const token = walk.first_whole();
    started = token >= 0;
    tell_counts();
    if (!leader || !started) return;
    load_whole_keys(0, token);
    load_whole_values(0, token);
  }

  // Of a thread block without work: memory that loads write to is not given back before they have.
  __device__ __forceinline__ void abandon() {
    if (!started) return;
    wait(s.k_full[0], 0);
    wait(s.v_full[0], 0);
  }

  __device__ __forceinline__ void load_all() {
    int j = 0;
    walk.whole([&](int token) {
      int const stage = j % kInFlight, parity = j / kInFlight % 2 ^ 1;
      if (leader && (j > 0 || !started)) {
        wait(s.k_empty[stage], parity);
        load_whole_keys(stage, token);
        wait(s.v_empty[stage], parity);
        load_whole_values(stage, token);
      }
      __syncwarp();
      j++;
    });
    load_rest(j);
  }

  // j: blocks before them.
  __device__ __forceinline__ void load_rest(int j) {
    constexpr int kGroups = kKeys / kGroup;
    int const lane = threadIdx.x % 32;
    // Do boxes of the rest hold keys that their run does not have, or that are hidden?
    bool const foreign = Source::kClears && (walk.shorter || work.masked || p.key_mask != nullptr);
#pragma unroll 1
    for (int r = 0; r < walk.rest_blocks; r++, j++) {
      int const stage = j % kInFlight, parity = j / kInFlight % 2 ^ 1;
      ListedGroup const mine = s.list.take(r);
      int const token = __shfl_sync(~0u, mine.token, Source::group_of(lane));
      bool const clear_keys = kClearKeys && foreign;
      unsigned words[(kGroups + 1) / 2];
#pragma unroll
      for (int i = 0; i < (kGroups + 1) / 2; i++)
        words[i] = __shfl_sync(~0u, mine.seen, 2 * i) | __shfl_sync(~0u, mine.seen, 2 * i + 1) << kGroup;
      wait(s.k_empty[stage], parity);
      wait(s.seen_empty[r % kInFlight], r / kInFlight % 2 ^ 1);
      // The lane that arrives writes them: an arrival orders the writes of its own thread.
      if (leader) {
#pragma unroll
        for (int i = 0; i < (kGroups + 1) / 2; i++) s.seen[stage][i] = words[i];
      }
      auto const load = [&](Barrier& loaded, int bytes, auto const& boxes) {
        if (leader) expect(loaded, bytes);
        __syncwarp();
        boxes(loaded);
        __syncwarp();
        if (leader) arrive(loaded);
      };
      load(clear_keys ? s.v_loaded : s.k_full[stage], Source::kKeyBytes,
           [&](Barrier& loaded) { source.load_key_group(stage, loaded, token, kv_head, work.batch); });
      if (clear_keys) {
        wait(s.v_loaded, 0);
        source.clear_keys(stage, s.seen[stage]);
        if (leader) arrive(s.k_full[stage]);
      }
      wait(s.v_empty[stage], parity);
      load(foreign ? s.v_loaded : s.v_full[stage], Source::kValueBytes,
           [&](Barrier& loaded) { source.load_value_group(stage, loaded, token, kv_head, work.batch); });
      if (foreign) {
        wait(s.v_loaded, kClearKeys ? 1 : r % 2);
        source.clear_values(stage, s.seen[stage]);
        if (leader) arrive(s.v_full[stage]);
      }
    }
  }
};

// Rows of [batch, heads, queries] before those of this head.
__device__ __forceinline__ long long first_row(Problem const& p, Work const& work) {
  return (static_cast<long long>(work.batch) * p.heads + work.head) * p.queries;
}

// A thread block that owns queries: one warpgroup loads, the others compute. S has keys, q_full and first.
// load_queries(active, work): one warp's loads, for so many warpgroups. compute(work, rows, id, shared, blocks, all): of one
// warpgroup; whole blocks of keys, and those with the rest. kShares: where the first warpgroup alone has rows, all of them
// compute, and each block of keys is one's; `shared` tells them.
template <class Loader, bool kShares, int kLoaderRegisters, int kRegisters, class Source, class S, class LoadQueries, class Compute>
__device__ __forceinline__ void run_block(Problem const& problem, Source const& source, S& s, LoadQueries load_queries, Compute compute) {
  constexpr int kThreads = 128 * (kWarpgroups + 1);
  Work const work = work_of(problem, blockIdx.x);
  // The shuffle tells the compiler that it is the same in a warp, which keeps descriptors in uniform registers.
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (warpgroup == 0) {
    give_registers<kLoaderRegisters>();
    typename Loader::Runs const keys = Loader::runs(problem, source, work);
    if (warp == 0) {
      // Nothing here waits for the consumers' rows, which they find meanwhile.
      if (threadIdx.x == 0) {
        init(s.q_full, 1);
        s.keys.init_loads();
        fence_init();
      }
      Loader loader(problem, source, s.keys, work, keys);
      loader.start();
      int const active = count_of_block<kThreads>(false);
      if (active == 0) return loader.abandon();
      if (threadIdx.x == 0) {
        s.keys.shared = kShares && active == 1 && loader.walk.blocks + loader.walk.rest_blocks >= 2 * kWarpgroups;
        s.keys.init_releases(s.keys.shared ? kWarpgroups : active);
        fence_init();
      }
      sync_block<kThreads>();
      load_queries(active, work);
      if (threadIdx.x == 0) arrive(s.q_full);
      loader.load_all();
    } else {
      if (threadIdx.x == 32) s.keys.init_list();
      int const active = count_of_block<kThreads>(false);
      if (active == 0) return;
      sync_block<kThreads>();
      if (warp == 1) Loader::list(s.keys, keys, source, work);
    }
    return;
  }
  WarpRows const rows = take_rows(problem, work, warp - 4, s.first);
  int const active = __shfl_sync(~0u, count_of_block<kThreads>(threadIdx.x % 128 == 0 && rows.count > 0), 0);
  if (active == 0) return;  // a group of smaller tiles needs fewer blocks
  sync_block<kThreads>();
  take_registers<kRegisters>();
  int const id = warpgroup - 1;
  int const blocks = __shfl_sync(~0u, s.keys.blocks, 0), all = blocks + __shfl_sync(~0u, s.keys.rest_blocks, 0);
  bool const shared = __shfl_sync(~0u, static_cast<int>(s.keys.shared), 0) != 0;
  if (id >= active && !shared) return;
  compute(work, rows, id, shared, blocks, all);
}

}  // namespace sta
