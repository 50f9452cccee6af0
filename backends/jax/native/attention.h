// Ragged paged attention: rotates queries and keys, writes the step's keys and values into their blocks, then attends
// (flash style, exact).
//
// A block of one layer and kv head holds its keys and values in tiles of up to 32 tokens: keys as [d / kPair][tile][kPair]
// and values as [tile / kPair][d][kPair], which is what `Tile` multiplies with. Query tokens of one row are taken in
// groups, times the query heads that share a kv head, so that a long prompt runs as matrix products and a decode token
// reads its keys and values once.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace sliceserve {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMaxTile = 32;       // tokens
constexpr int64_t kSpan = 128;      // keys whose scores exist at one time
constexpr int64_t kQueryRows = 48;  // query vectors of one task

struct AttentionShape {
  int64_t heads, kv_heads, dim, block_size, max_blocks;
  int64_t window;  // keys further back are not seen; 0 = no limit
  float scale;
};

template <typename T>
struct Attention {
  AttentionShape shape;
  const float* qkv;            // [t, heads + 2 kv_heads, dim], not rotated yet
  const float *cos, *sin;      // [t, dim / 2]
  T* cache;                    // one layer: [blocks, 2, kv_heads, block_size * dim]
  const int32_t *tables, *kv_lens, *query_starts;
  int64_t rows;
  float* out;  // [t, heads, dim]

  static constexpr int P = Element<T>::kPair;

  int64_t tile() const { return std::min<int64_t>(kMaxTile, shape.block_size); }

  T* TileOf(int64_t row, int64_t token, int64_t head, int64_t which) const {
    const int64_t block = tables[row * shape.max_blocks + token / shape.block_size];
    const int64_t in_block = token % shape.block_size / tile() * tile();
    return cache + (((block * 2 + which) * shape.kv_heads + head) * shape.block_size + in_block) * shape.dim;
  }

  const float* Vector(int64_t token, int64_t index) const {
    return qkv + (token * (shape.heads + 2 * shape.kv_heads) + index) * shape.dim;
  }

  // Rotary embedding of a query or key, times `factor`; pairs are (i, i + dim / 2).
  void Rotate(int64_t token, const float* __restrict x, float factor, float* __restrict y) const {
    const int64_t half = shape.dim / 2;
    const float *c = cos + token * half, *s = sin + token * half;
    for (int64_t i = 0; i < half; ++i) {
      y[i] = (x[i] * c[i] - x[i + half] * s[i]) * factor;
      y[i + half] = (x[i + half] * c[i] + x[i] * s[i]) * factor;
    }
  }

  void Write(int64_t row, int64_t index) const {
    const int64_t first = query_starts[row], count = query_starts[row + 1] - first, token = first + index;
    const int64_t position = kv_lens[row] - count + index, slot = position % tile(), d = shape.dim;
    thread_local std::vector<float> rotated;
    rotated.resize(d);
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      Rotate(token, Vector(token, shape.heads + h), 1.0f, rotated.data());
      const float* v = Vector(token, shape.heads + shape.kv_heads + h);
      T* keys = TileOf(row, position, h, 0);
      T* values = TileOf(row, position, h, 1);
      for (int64_t i = 0; i < d; ++i) keys[(i / P * tile() + slot) * P + i % P] = Element<T>::From(rotated[i]);
      for (int64_t i = 0; i < d; ++i) values[(slot / P * d + i) * P + slot % P] = Element<T>::From(v[i]);
      // What a former owner left behind the row's end is multiplied with weight 0, which a NaN survives: whoever starts
      // a tile clears its rest.
      if (index == count - 1 && index >= slot)
        for (int64_t s = slot + 1; s < tile(); ++s)
          for (int64_t i = 0; i < d; ++i) values[(s / P * d + i) * P + s % P] = T{};
    }
  }

  // A row's scores [width] become weights relative to its running maximum; returns how the accumulator must shrink.
  template <int L>
  float Softmax(float* scores, int64_t width, float* maximum, float* total) const {
    F<L> best = Load<L>(scores);
    for (int64_t j = L; j < width; j += L) best = Larger<L>(best, Load<L>(scores + j));
    const float top = std::max(*maximum, Max<L>(best));
    if (top == -kInfinity) {  // nothing visible yet
      std::fill(scores, scores + width, 0.0f);
      return 1.0f;
    }
    const float shrink = *maximum == -kInfinity ? 0.0f : std::exp(*maximum - top);
    F<L> sum = Splat<L>(0.0f);
    for (int64_t j = 0; j < width; j += L) {
      F<L> p = ExpNegative<L>(Load<L>(scores + j) - top);
      sum += p;
      Store<L>(scores + j, p);
    }
    *maximum = top;
    *total = *total * shrink + Sum<L>(sum);
    return shrink;
  }

  // What one task works with; kept per thread, because a step has thousands of tasks.
  struct Scratch {
    std::vector<float> queries, scores, acc, maxima, totals;
  };

  // Query tokens [start, start + count) of a row, all query heads of one kv head. A tile is NV vectors of L lanes.
  // Keys are taken kSpan at a time, at multiples of kSpan: the sums do not depend on how a prompt was cut into chunks.
  template <int L, int NV>
  void Attend(int64_t row, int64_t start, int64_t count, int64_t head) const {
    thread_local Scratch s;
    const int64_t d = shape.dim, group = shape.heads / shape.kv_heads, queries = count * group;
    const int64_t first = query_starts[row];
    const int64_t position = kv_lens[row] - (query_starts[row + 1] - first) + start, last = position + count - 1;
    const int64_t oldest = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1) : 0;
    s.queries.resize(queries * d), s.scores.resize(queries * kSpan);
    s.acc.assign(queries * d, 0.0f), s.maxima.assign(queries, -kInfinity), s.totals.assign(queries, 0.0f);
    for (int64_t m = 0; m < queries; ++m) {
      const int64_t token = first + start + m / group;
      Rotate(token, Vector(token, head * group + m % group), shape.scale, &s.queries[m * d]);
    }
    for (int64_t span = oldest / kSpan * kSpan; span <= last; span += kSpan) {
      const int64_t end = std::min(span + kSpan, (last / (L * NV) + 1) * (L * NV));
      Scores<L, NV>(s, queries, row, head, span, end);
      if (end - 1 > position || (shape.window > 0 && span <= last - shape.window)) Mask(s, queries, group, position, span, end);
      for (int64_t m = 0; m < queries; ++m) {
        const float shrink = Softmax<L>(&s.scores[m * kSpan], end - span, &s.maxima[m], &s.totals[m]);
        if (shrink != 1.0f)
          for (int64_t i = 0; i < d; ++i) s.acc[m * d + i] *= shrink;
      }
      for (int64_t key = span; key < end; key += L * NV) AddValues<L, NV>(s, queries, row, head, span, key);
    }
    for (int64_t m = 0; m < queries; ++m) {
      float* target = out + ((first + start + m / group) * shape.heads + head * group + m % group) * d;
      for (int64_t i = 0; i < d; ++i) target[i] = s.acc[m * d + i] / s.totals[m];
    }
  }

  template <int L, int NV>
  void Scores(Scratch& s, int64_t queries, int64_t row, int64_t head, int64_t span, int64_t end) const {
    const int64_t d = shape.dim;
    for (int64_t key = span; key < end; key += L * NV) {
      const T* keys = TileOf(row, key, head, 0);
      Rows<T, L, NV, 12>(queries, s.queries.data(), d, keys, L * NV, d, s.scores.data() + (key - span), kSpan, false,
                         reinterpret_cast<const char*>(TileOf(row, key, head, 1)));
    }
  }

  template <int L, int NV>
  void AddValues(Scratch& s, int64_t queries, int64_t row, int64_t head, int64_t span, int64_t key) const {
    const int64_t d = shape.dim;
    const T* values = TileOf(row, key, head, 1);
    const float* weights = s.scores.data() + (key - span);
    const char* ahead = reinterpret_cast<const char*>(values);
    int64_t column = 0;
    for (; column + 4 * L <= d; column += 4 * L)
      Rows<T, L, 4, 6>(queries, weights, kSpan, values + column * P, d, L * NV, s.acc.data() + column, d, true, ahead);
    for (; column < d; column += L)
      Rows<T, L, 1, 12>(queries, weights, kSpan, values + column * P, d, L * NV, s.acc.data() + column, d, true, ahead);
  }

  void Mask(Scratch& s, int64_t queries, int64_t group, int64_t position, int64_t span, int64_t end) const {
    for (int64_t m = 0; m < queries; ++m) {
      const int64_t newest = position + m / group;
      const int64_t oldest = shape.window > 0 ? newest - shape.window + 1 : 0;
      for (int64_t key = span; key < end; ++key)
        if (key > newest || key < oldest) s.scores[m * kSpan + key - span] = -kInfinity;
    }
  }

  void Run(xla::ffi::ThreadPool& pool) const {
    struct Piece {
      int64_t row, start, count;
    };
    std::vector<Piece> pieces;
    const int64_t group = shape.heads / shape.kv_heads, most = std::max<int64_t>(1, kQueryRows / group);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t count = query_starts[r + 1] - query_starts[r];
      for (int64_t s = 0; s < count; s += most) pieces.push_back({r, s, std::min(most, count - s)});
    }
    const int64_t num_pieces = pieces.size();
    const int64_t grain = std::max<int64_t>(1, num_pieces / 8);  // pieces written by one task
    const int64_t write_tasks = (num_pieces + grain - 1) / grain;
    ParallelFor(pool, write_tasks, [&](int64_t task) {
      for (int64_t i = task * grain; i < std::min(num_pieces, (task + 1) * grain); ++i)
        for (int64_t j = 0; j < pieces[i].count; ++j) Write(pieces[i].row, pieces[i].start + j);
    });
    // Heaviest last-in-line tasks would leave a thread idle: longest contexts of a prompt come last, so go backwards.
    ParallelFor(pool, num_pieces * shape.kv_heads, [&](int64_t task) {
      const Piece& p = pieces[num_pieces - 1 - task / shape.kv_heads];
      const int64_t head = task % shape.kv_heads;
      if (tile() == 32) Attend<16, 2>(p.row, p.start, p.count, head);
      else if (tile() == 16) Attend<16, 1>(p.row, p.start, p.count, head);
      else Attend<8, 1>(p.row, p.start, p.count, head);
    });
  }
};

}  // namespace sliceserve
