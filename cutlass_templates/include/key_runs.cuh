// Which tokens are in a box of tiles? Arithmetic on scalars, no tables: the twin of sta_compile.ir.runs and ir.window.
//
// In tile order a box is one run of consecutive tokens for each pair of a frame tile and a row tile. Runs that touch
// are one: a box over all columns has one run per frame tile, the whole grid is one.
#pragma once

namespace sta {

constexpr int kGroup = 16;  // tokens that are loaded together where a run is not made of whole blocks

struct Run {
  int start, length;
};

// Division of numbers below 2^31 by one that the host knows: with l = ceil(log2(value)), multiplier is
// ceil(2^(31 + l) / value) and shift is l - 1 (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
  int value;
  unsigned multiplier, shift;

  __device__ __forceinline__ int divide(int dividend) const {
    return value == 1 ? dividend : static_cast<int>(__umulhi(static_cast<unsigned>(dividend), multiplier) >> shift);
  }
};

// Tiles of one axis. Their sizes differ by at most one and the larger ones come first.
struct Axis {
  int length, tiles, small, larger;  // size of a smaller tile, and how many are one token larger

  __device__ __forceinline__ int start(int tile) const { return tile * small + min(tile, larger); }
};

struct Span {  // consecutive tiles of one axis
  int first, count;
};

// Tiles of one axis that see the same window are a group: window `group` starts at tile `group`. A window shifts inward
// at borders, so the groups at both ends have several tiles and all others have one. An even window acts as the
// next odd one.
struct Groups {
  int tiles, half, width, count;  // of the axis; half of a window; a whole one; groups

  __device__ __forceinline__ Span queries(int group) const {
    if (count == 1) return {0, tiles};
    if (group == 0) return {0, half + 1};
    if (group == count - 1) return {tiles - 1 - half, half + 1};
    return {group + half, 1};
  }
  __device__ __forceinline__ Span keys(int group) const { return {group, width}; }
  // The transposed window: tiles whose queries see tile `key`, those of groups key - width + 1 to key.
  __device__ __forceinline__ Span seen_by(int key) const {
    int const first = queries(max(key - width + 1, 0)).first;
    Span const last = queries(min(key, count - 1));
    return {first, last.first + last.count - first};
  }
};

struct Runs {
  Axis t, h, w;
  int first_t, first_h, step_t, step_h, count_t, count_h, column, columns;

  __device__ __forceinline__ Runs(Axis const (&axis)[3], Span of_t, Span of_h, Span of_w)
      : t(axis[0]), h(axis[1]), w(axis[2]), first_t(of_t.first), first_h(of_h.first) {
    bool const whole_rows = of_w.count == w.tiles;
    bool const whole_frames = whole_rows && of_h.count == h.tiles;
    step_t = whole_frames ? of_t.count : 1;
    step_h = whole_rows ? of_h.count : 1;
    count_t = whole_frames ? 1 : of_t.count;
    count_h = whole_rows ? 1 : of_h.count;
    column = w.start(of_w.first);
    columns = w.start(of_w.first + of_w.count) - column;
  }

  // From the start of the video, in tokens.
  __device__ __forceinline__ Run at(int a, int b) const {
    int const t0 = t.start(first_t + a), t1 = t.start(first_t + a + step_t);
    int const h0 = h.start(first_h + b), h1 = h.start(first_h + b + step_h);
    int const frames = t1 - t0, rows = h1 - h0;
    return {t0 * h.length * w.length + frames * (h0 * w.length + rows * column), frames * rows * columns};
  }
};

}  // namespace sta
