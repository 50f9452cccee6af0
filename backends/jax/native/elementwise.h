// RMS norm and the gated SiLU: short loops over a step's tokens, in parallel over rows. XLA runs them as several passes.
#pragma once

#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace sliceserve {

constexpr int64_t kTaskFloats = 8 << 10;  // floats of one task: what is worth waking a thread for

// fn(row) for rows [0, n) of `width` floats each.
template <typename Fn>
void ForRows(xla::ffi::ThreadPool& pool, int64_t n, int64_t width, const Fn& fn) {
  const int64_t group = std::max<int64_t>(1, kTaskFloats / width);
  ParallelFor(pool, (n + group - 1) / group, [&](int64_t task) {
    for (int64_t row = task * group; row < std::min(n, (task + 1) * group); ++row) fn(row);
  });
}

// y = x / rms(x) * weight
inline void RmsNormRow(const float* __restrict x, const float* __restrict weight, int64_t n, float epsilon,
                       float* __restrict y) {
  constexpr int L = 16;
  F<L> squares = Splat<L>(0.0f);
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    F<L> v = Load<L>(x + j);
    squares += v * v;
  }
  float total = Sum<L>(squares);
  for (; j < n; ++j) total += x[j] * x[j];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + epsilon);
  for (j = 0; j < n; ++j) y[j] = x[j] * scale * weight[j];
}

// y = silu(gate) * up, with silu(g) = g / (1 + exp(-g))
inline void GatedSiluRow(const float* __restrict gate, const float* __restrict up, int64_t n, float* __restrict y) {
  constexpr int L = 16;
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    F<L> g = Load<L>(gate + j);
    F<L> e = ExpNegative<L>(g < 0.0f ? g : -g);
    F<L> sigmoid = (g < 0.0f ? e : Splat<L>(1.0f)) / (1.0f + e);
    Store<L>(y + j, g * sigmoid * Load<L>(up + j));
  }
  for (; j < n; ++j) y[j] = gate[j] / (1.0f + std::exp(-gate[j])) * up[j];
}

}  // namespace sliceserve
