// Choosing the next token of one row: greedy, or from the distribution cut by top-k, top-p and min-p.
//
// A row needs one random number: the token is the first whose cumulative weight passes `uniform` times the total. Cuts
// keep every token whose probability is at least a threshold, so ties at the edge stay in (backends/jax/sampling.py does
// the same without a sort).
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace sliceserve {

struct RowSampling {
  float temperature;  // 0 = greedy
  int32_t top_k;      // 0 = off
  float top_p, min_p, uniform;
};

inline float RowMax(const float* x, int64_t n) {
  constexpr int L = 16;
  F<L> best = Splat<L>(x[0]);
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    F<L> v = Load<L>(x + j);
    best = v > best ? v : best;
  }
  float top = Max<L>(best);
  for (; j < n; ++j) top = x[j] > top ? x[j] : top;
  return top;
}

inline int32_t FirstEqual(const float* x, int64_t n, float value) {
  int64_t index = 0;
  while (index < n - 1 && x[index] != value) ++index;
  return static_cast<int32_t>(index);
}

// weights[j] = exp((x[j] - top) / temperature); returns their sum.
inline double Weights(const float* x, int64_t n, float top, float temperature, float* weights) {
  constexpr int L = 16;
  const float inverse = 1.0f / temperature;
  double total = 0;
  int64_t j = 0;
  while (j + L <= n) {
    F<L> sum = Splat<L>(0.0f);
    for (int64_t end = std::min(n, j + 64 * L); j + L <= end; j += L) {
      F<L> w = ExpNegative<L>((Load<L>(x + j) - top) * inverse);
      Store<L>(weights + j, w);
      sum += w;
    }
    total += Sum<L>(sum);
  }
  for (; j < n; ++j) total += weights[j] = std::exp((x[j] - top) * inverse);
  return total;
}

// The smallest weight that survives the cuts (weights are relative to the largest, which is 1).
inline float Threshold(const float* weights, int64_t n, double total, const RowSampling& row, std::vector<float>& kept) {
  float threshold = row.min_p;
  if (row.top_k <= 0 && row.top_p >= 1.0f) return threshold;
  if (threshold > 0.0f) {
    total = 0;
    for (int64_t j = 0; j < n; ++j) total += weights[j] >= threshold ? weights[j] : 0.0f;
  }
  // Tokens below this together weigh less than the 1 - top_p that may be cut, so the nucleus is among the others.
  const float floor = row.top_p < 1.0f && row.top_k <= 0 ? float((1.0 - row.top_p) * total / double(n)) : 0.0f;
  kept.clear();
  for (int64_t j = 0; j < n; ++j)
    if (weights[j] >= floor && weights[j] >= threshold) kept.push_back(weights[j]);
  if (row.top_k > 0 && row.top_k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + (row.top_k - 1), kept.end(), std::greater<float>());
    threshold = kept[row.top_k - 1];
    total = 0;
    for (int64_t j = 0; j < n; ++j) total += weights[j] >= threshold ? weights[j] : 0.0f;
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](float w) { return w < threshold; }), kept.end());
  }
  if (row.top_p >= 1.0f) return threshold;
  std::sort(kept.begin(), kept.end(), std::greater<float>());
  double mass = 0;
  for (float w : kept) {
    mass += w;
    threshold = w;
    if (mass >= row.top_p * total) break;
  }
  return threshold;
}

inline int32_t SampleRow(const float* x, int64_t n, const RowSampling& row) {
  const float top = RowMax(x, n);
  if (row.temperature <= 0.0f) return FirstEqual(x, n, top);
  thread_local std::vector<float> weights, kept;
  weights.resize(n);
  double total = Weights(x, n, top, row.temperature, weights.data());
  const float threshold = Threshold(weights.data(), n, total, row, kept);
  if (threshold > 0.0f) {
    total = 0;
    for (int64_t j = 0; j < n; ++j) total += weights[j] >= threshold ? weights[j] : 0.0f;
  }
  const double target = row.uniform * total;
  double mass = 0;
  int64_t last = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (weights[j] < threshold || weights[j] <= 0.0f) continue;
    mass += weights[j];
    last = j;
    if (mass > target) break;
  }
  return static_cast<int32_t>(last);
}

}  // namespace sliceserve
