// Attention forward on Hopper: one block is CONSUMERS * 64 query rows of one tile, head and sample.
//
// One warp of the first warpgroup is the producer: it walks the tile's key runs and loads keys and values with TMA, all
// full blocks of KEY_BLOCK keys first, then the tails of all runs in groups of 16 keys. Each other warpgroup computes 64
// query rows; it knows how many blocks there are and nothing of the pattern. Scores are in base 2.
//
// A tail is loaded in groups that end where its run ends, so a group may begin before the tail does: `bounds` says which
// of a group's keys count, and only in tail blocks scores are masked.
//
// Included by attention_forward.cu.jinja, which defines Element, HEAD_DIM, KEY_BLOCK, CONSUMERS, STAGES, SHARED_BYTES
// and the wgmma instructions ScoreMma and OutputMma.
#pragma once

namespace sta {

constexpr int QUERY_UNIT = 64;
constexpr int GROUP = 16;                         // keys of a tail's TMA box
constexpr int BOX = 64;                           // elements of a row in a TMA box: 128 bytes, the swizzle's width
constexpr int ROW = 128;                          // bytes of that
constexpr int BOXES = (HEAD_DIM + BOX - 1) / BOX;  // columns past the head dim are read as zeros
constexpr int SCORE_STEPS = (HEAD_DIM + 15) / 16;
constexpr int GROUPS = KEY_BLOCK / GROUP;
constexpr int SCORES = KEY_BLOCK / 2;  // registers of a thread
constexpr int OUTPUTS = HEAD_DIM / 2;
constexpr int WEIGHTS = KEY_BLOCK / 4;
constexpr int QUERY_BYTES = QUERY_UNIT * BOXES * ROW;
constexpr int KEY_BYTES = KEY_BLOCK * BOXES * ROW;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr float NO_KEY = -1.f / 0.f;  // a score of minus infinity
static_assert(KEY_BLOCK % GROUP == 0 && HEAD_DIM % 8 == 0);

struct alignas(64) TensorMap {
  char opaque[128];
};

struct Params {
  // [head_dim, tokens, heads, batch]; boxes of QUERY_UNIT, KEY_BLOCK and GROUP rows.
  TensorMap q, k, v, k_tail, v_tail;
  Element* out;
  float* lse;                             // [batch, heads, queries]
  int64_t out_batch, out_head, out_token;  // strides in elements
  float scale;                            // of the softmax, times log2(e)
  int heads, share, queries;              // share: query heads of a key head
  int frames, rows, cols, tiles_t, tiles_h, tiles_w, window_t, window_h, window_w;
  int tile_blocks;  // blocks of the largest tile
};

struct Run {
  int start, length;  // tokens
};

struct Shared {
  alignas(1024) uint8_t q[CONSUMERS][QUERY_BYTES];
  alignas(1024) uint8_t k[STAGES][KEY_BYTES];
  alignas(1024) uint8_t v[STAGES][KEY_BYTES];
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int full_blocks, tail_blocks;
  uchar2 bounds[STAGES][GROUPS];  // of the keys of a group: first that counts, end
};
static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the host asks for SHARED_BYTES; 1024 of them align the struct");

__device__ __forceinline__ uint32_t address_of(void const* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes) : "memory");
}

// The phase does not end before an arrival.
__device__ __forceinline__ void barrier_expect_more(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\n"
      "bra.uni again;\n"
      "end:\n"
      "}" ::"r"(address_of(barrier)), "r"(phase) : "memory");
}

__device__ __forceinline__ void load_box(void* to, TensorMap const* map, uint64_t* barrier, int column, int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(address_of(to)), "l"(map), "r"(address_of(barrier)), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values as one register, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// First position of a tile: sizes differ by at most one, the larger ones first.
__device__ __forceinline__ int axis_start(int tile, int length, int tiles) {
  int const small = length / tiles;
  return tile * small + min(tile, length - small * tiles);
}

// A box of tiles, as key runs: run (a, b) of frame tiles and row tiles, step_t and step_h of them at a time.
struct Window {
  int rows, cols, small_t, larger_t, small_h, larger_h;
  int step_t, step_h, first_t, first_h, first_col, count_cols, runs_t, runs_h;

  __device__ Run run(int a, int b) const {
    int const t = first_t + a, h = first_h + b;
    int const t0 = t * small_t + min(t, larger_t), t1 = (t + step_t) * small_t + min(t + step_t, larger_t);
    int const h0 = h * small_h + min(h, larger_h), h1 = (h + step_h) * small_h + min(h + step_h, larger_h);
    int const depth = t1 - t0, height = h1 - h0;
    return {t0 * rows * cols + depth * (h0 * cols + height * first_col), depth * height * count_cols};
  }
};

// Shared-memory operand of wgmma in rows of 128 bytes, 128-byte swizzle: 8 rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(void const* p, int leading_bytes) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(leading_bytes >> 4) << 16) |
         ((address_of(p) & 0x3FFFF) >> 4);
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
  using type = Indices<I...>;
};

using cute::SM90::GMMA::ScaleOut;

template <class Mma, int N, int... I>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sum)[N], ScaleOut add, Indices<I...>) {
  Mma::fma(a, b, sum[I]..., add);
}

template <class Mma, int N, int... I>
__device__ __forceinline__ void multiply(uint32_t const* a, uint64_t b, float (&sum)[N], ScaleOut add, Indices<I...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, sum[I]..., add);
}

// wgmma writes registers behind the compiler's back: none may be moved across these points.
template <int N>
__device__ __forceinline__ void pin(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(uint32_t (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(values[i])::"memory");
}

// 64 query rows. A thread has two of them, `top` and `top + 8` of the wgmma layout: index 0 and 1 below.
struct Consumer {
  Shared& shared;
  int group;
  float scale;
  float scores[SCORES], output[OUTPUTS], most[2], total[2], decay[2];
  uint32_t weights[WEIGHTS];

  __device__ __forceinline__ void start_scores(int stage) {
    pin(scores);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    uint64_t const keys = descriptor(shared.k[stage], 16), queries = descriptor(shared.q[group], 16);
#pragma unroll
    for (int i = 0; i < SCORE_STEPS; i++) {
      int const key = (i / 4) * (KEY_BLOCK * ROW) + (i % 4) * 32, query = (i / 4) * (QUERY_UNIT * ROW) + (i % 4) * 32;
      multiply<ScoreMma<Major::K, Major::K>>(queries + (query >> 4), keys + (key >> 4), scores,
                                             i ? ScaleOut::One : ScaleOut::Zero, typename CountTo<SCORES>::type{});
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(scores);
  }

  __device__ __forceinline__ void start_output(int stage) {
    pin(output);
    pin(weights);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    uint64_t const values = descriptor(shared.v[stage], KEY_BLOCK * ROW);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      multiply<OutputMma<Major::K, Major::MN>>(weights + 4 * i, values + ((i * GROUP * ROW) >> 4), output,
                                               ScaleOut::One, typename CountTo<OUTPUTS>::type{});
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(output);
  }

  // Until at most `Pending` products run: scores are ready, and with 0 so is the output.
  template <int Pending>
  __device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
    pin(scores);
    if constexpr (Pending == 0) {
      pin(output);
      pin(weights);
    }
  }

  __device__ __forceinline__ void raise_most() {
    float x[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 0; i < SCORES; i++) x[i / 2 % 2] = fmaxf(x[i / 2 % 2], scores[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], d));
      float const before = most[r];
      most[r] = fmaxf(before, x[r] * scale);
      decay[r] = most[r] == NO_KEY ? 1.f : exp2_fast(before - most[r]);
      total[r] *= decay[r];
    }
  }

  __device__ __forceinline__ void decay_output() {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) output[i] *= decay[i / 2 % 2];
  }

  __device__ __forceinline__ void exponentiate() {
    float const shift[2] = {most[0] == NO_KEY ? 0.f : -most[0], most[1] == NO_KEY ? 0.f : -most[1]};
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      scores[i] = exp2_fast(fmaf(scores[i], scale, shift[i / 2 % 2]));
      sum[i % 4] += scores[i];
    }
    total[0] += sum[0] + sum[1];
    total[1] += sum[2] + sum[3];
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void mask(uchar2 const* bounds, int lane) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      int const key = (i / 4 * 8 + i % 2 + lane % 4 * 2) % GROUP;
      uchar2 const bound = bounds[i / 8];
      if (!(bound.x <= key && key < bound.y)) scores[i] = NO_KEY;
    }
  }
};

// Walks the window and loads; one thread.
__device__ __forceinline__ void produce(Shared& s, Params const& p, Window const& window, int query, int head, int batch) {
  int full = 0, groups = 0;
  for (int a = 0; a < window.runs_t; a++) {
    for (int b = 0; b < window.runs_h; b++) {
      int const length = window.run(a, b).length;
      full += length / KEY_BLOCK;
      groups += (length % KEY_BLOCK + GROUP - 1) / GROUP;
    }
  }
  s.full_blocks = full;
  s.tail_blocks = (groups + GROUPS - 1) / GROUPS;
  barrier_expect(&s.q_full, CONSUMERS * QUERY_BYTES);
  for (int w = 0; w < CONSUMERS; w++) {
    for (int box = 0; box < BOXES; box++) {
      load_box(s.q[w] + box * QUERY_UNIT * ROW, &p.q, &s.q_full, box * BOX, query + w * QUERY_UNIT, head, batch);
    }
  }
  int const key_head = head / p.share;
  auto load = [&](uint8_t* to, TensorMap const& map, uint64_t* barrier, int at) {
    for (int box = 0; box < BOXES; box++) load_box(to + box * KEY_BLOCK * ROW, &map, barrier, box * BOX, at, key_head, batch);
  };
  int j = 0;
  for (int a = 0; a < window.runs_t; a++) {
    for (int b = 0; b < window.runs_h; b++) {
      Run const run = window.run(a, b);
      for (int i = 0; i < run.length / KEY_BLOCK; i++, j++) {
        int const stage = j % STAGES, phase = j / STAGES & 1, at = run.start + i * KEY_BLOCK;
        barrier_wait(&s.k_empty[stage], phase ^ 1);
        barrier_expect(&s.k_full[stage], KEY_BYTES);
        load(s.k[stage], p.k, &s.k_full[stage], at);
        barrier_wait(&s.v_empty[stage], phase ^ 1);
        barrier_expect(&s.v_full[stage], KEY_BYTES);
        load(s.v[stage], p.v, &s.v_full[stage], at);
      }
    }
  }
  int a = 0, b = 0;
  Run run = window.run(0, 0);
  int left = (run.length % KEY_BLOCK + GROUP - 1) / GROUP;
  for (; j < full + s.tail_blocks; j++) {
    int const stage = j % STAGES, phase = j / STAGES & 1;
    barrier_wait(&s.k_empty[stage], phase ^ 1);
    barrier_wait(&s.v_empty[stage], phase ^ 1);
    barrier_expect_more(&s.k_full[stage], KEY_BYTES);
    barrier_expect_more(&s.v_full[stage], KEY_BYTES);
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
      while (a < window.runs_t && left == 0) {
        if (++b == window.runs_h) {
          b = 0;
          a++;
        }
        if (a < window.runs_t) {
          run = window.run(a, b);
          left = (run.length % KEY_BLOCK + GROUP - 1) / GROUP;
        }
      }
      // Past the last tail: the last run's end again, of which no key counts.
      int const end = run.start + run.length - max(left - 1, 0) * GROUP;
      int const begin = left == 0 ? end : max(run.start + run.length - run.length % KEY_BLOCK, end - GROUP);
      left = max(left - 1, 0);
      s.bounds[stage][g] = make_uchar2(begin - (end - GROUP), GROUP);
      load(s.k[stage] + g * GROUP * ROW, p.k_tail, &s.k_full[stage], end - GROUP);
      load(s.v[stage] + g * GROUP * ROW, p.v_tail, &s.v_full[stage], end - GROUP);
    }
    barrier_arrive(&s.k_full[stage]);  // after the bounds, which readers of the block may now read
    barrier_arrive(&s.v_full[stage]);
  }
}

__device__ __forceinline__ void consume(Consumer& c, Shared& s, int lane) {
  auto release = [&](uint64_t* barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  auto phase_of = [](int j) { return j / STAGES & 1; };
  int const full = s.full_blocks, tails = s.tail_blocks;
  if (full > 0) {
    barrier_wait(&s.k_full[0], 0);
    c.start_scores(0);
    c.wait<0>();
    release(&s.k_empty[0]);
    c.raise_most();
    c.exponentiate();
    c.pack_weights();
    // Scores of block j run beside the output of block j - 1.
    for (int j = 1; j < full; j++) {
      int const stage = j % STAGES, before = (j - 1) % STAGES;
      barrier_wait(&s.k_full[stage], phase_of(j));
      c.start_scores(stage);
      barrier_wait(&s.v_full[before], phase_of(j - 1));
      c.start_output(before);
      c.wait<1>();
      release(&s.k_empty[stage]);
      c.raise_most();
      c.exponentiate();
      c.wait<0>();
      release(&s.v_empty[before]);
      c.decay_output();
      c.pack_weights();
    }
    int const before = (full - 1) % STAGES;
    barrier_wait(&s.v_full[before], phase_of(full - 1));
    c.start_output(before);
    c.wait<0>();
    release(&s.v_empty[before]);
  }
  for (int j = full; j < full + tails; j++) {
    int const stage = j % STAGES;
    barrier_wait(&s.k_full[stage], phase_of(j));
    c.start_scores(stage);
    c.wait<0>();
    c.mask(s.bounds[stage], lane);
    release(&s.k_empty[stage]);
    c.raise_most();
    c.decay_output();
    c.exponentiate();
    c.pack_weights();
    barrier_wait(&s.v_full[stage], phase_of(j));
    c.start_output(stage);
    c.wait<0>();
    release(&s.v_empty[stage]);
  }
}

// Output through shared memory, where this warp's rows of q were, so that whole rows are stored 16 bytes at a time.
__device__ __forceinline__ void store(Consumer& c, Params const& p, uint8_t* own, int first, int valid, int head, int batch, int lane) {
  int const row[2] = {lane / 32 * 16 + lane % 32 / 4, lane / 32 * 16 + lane % 32 / 4 + 8};
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int d = 1; d < 4; d *= 2) c.total[r] += __shfl_xor_sync(~0u, c.total[r], d);
    inverse[r] = c.total[r] == 0 ? 0.f : 1.f / c.total[r];
    if (lane % 4 == 0 && row[r] < valid) {
      p.lse[(int64_t(batch) * p.heads + head) * p.queries + first + row[r]] =
          (c.most[r] + log2f(c.total[r])) * 0.6931471805599453f;
    }
  }
  auto piece = [&](int at_row, int chunk) {  // 16 bytes
    return own + chunk / 8 * (QUERY_UNIT * ROW) + at_row * ROW + ((chunk % 8 ^ at_row % 8) * 16);
  };
#pragma unroll
  for (int i = 0; i < OUTPUTS; i += 2) {
    int const r = i / 2 % 2;
    *reinterpret_cast<uint32_t*>(piece(row[r], i / 4) + lane % 4 * 4) = pack(c.output[i] * inverse[r], c.output[i + 1] * inverse[r]);
  }
  __syncwarp();
  Element* const out = p.out + batch * p.out_batch + head * p.out_head + first * p.out_token;
  constexpr int PIECES = HEAD_DIM / 8;
  for (int i = lane % 32; i < 16 * PIECES; i += 32) {
    int const at = lane / 32 * 16 + i / PIECES, chunk = i % PIECES;
    if (at < valid) {
      *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(out + at * p.out_token) + chunk * 16) =
          *reinterpret_cast<uint4 const*>(piece(at, chunk));
    }
  }
}

}  // namespace sta

extern "C" __global__ void __launch_bounds__(sta::THREADS, 1) sta_attention_forward(const __grid_constant__ sta::Params p) {
  using namespace sta;
  extern __shared__ uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
  int const role = threadIdx.x / 128;
  int const tile = blockIdx.x / p.tile_blocks, block = blockIdx.x % p.tile_blocks;
  int const head = blockIdx.y, batch = blockIdx.z;
  int const tile_w = tile % p.tiles_w, tile_h = tile / p.tiles_w % p.tiles_h, tile_t = tile / p.tiles_w / p.tiles_h;
  if (threadIdx.x == 0) {
    barrier_init(&s.q_full, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.v_full[i], 1);
      barrier_init(&s.k_empty[i], CONSUMERS);
      barrier_init(&s.v_empty[i], CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  Window own;
  own.rows = p.rows;
  own.cols = p.cols;
  own.small_t = p.frames / p.tiles_t;
  own.larger_t = p.frames - own.small_t * p.tiles_t;
  own.small_h = p.rows / p.tiles_h;
  own.larger_h = p.rows - own.small_h * p.tiles_h;
  Window window = own;
  own.step_t = own.step_h = own.runs_t = own.runs_h = 1;
  own.first_t = tile_t;
  own.first_h = tile_h;
  own.first_col = axis_start(tile_w, p.cols, p.tiles_w);
  own.count_cols = axis_start(tile_w + 1, p.cols, p.tiles_w) - own.first_col;
  Run const rows = own.run(0, 0);

  if (role == 0) {
    cutlass::arch::warpgroup_reg_dealloc<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x != 0) return;
    int const width_t = min(p.tiles_t, 2 * (p.window_t / 2) + 1), width_h = min(p.tiles_h, 2 * (p.window_h / 2) + 1);
    int const width_w = min(p.tiles_w, 2 * (p.window_w / 2) + 1);
    int const first_w = min(max(tile_w - p.window_w / 2, 0), p.tiles_w - width_w);
    window.first_t = min(max(tile_t - p.window_t / 2, 0), p.tiles_t - width_t);
    window.first_h = min(max(tile_h - p.window_h / 2, 0), p.tiles_h - width_h);
    window.first_col = axis_start(first_w, p.cols, p.tiles_w);
    window.count_cols = axis_start(first_w + width_w, p.cols, p.tiles_w) - window.first_col;
    bool const join_h = width_w == p.tiles_w, join_t = join_h && width_h == p.tiles_h;  // runs that touch are one
    window.step_t = join_t ? width_t : 1;
    window.step_h = join_h ? width_h : 1;
    window.runs_t = join_t ? 1 : width_t;
    window.runs_h = join_h ? 1 : width_h;
    produce(s, p, window, rows.start + block * CONSUMERS * QUERY_UNIT, head, batch);
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<CONSUMERS == 2 ? 240 : 160>();
  int const group = role - 1, lane = threadIdx.x % 128, first = (block * CONSUMERS + group) * QUERY_UNIT;
  Consumer c{s, group, p.scale};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    c.most[r] = NO_KEY;
    c.total[r] = 0;
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) c.output[i] = 0;
  barrier_wait(&s.q_full, 0);
  consume(c, s, lane);
  store(c, p, s.q[group], rows.start + first, rows.length - first, head, batch, lane);
}
