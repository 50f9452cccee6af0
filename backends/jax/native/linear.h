// y = x W^T with W packed in blocks of 32 outputs: [blocks][k / kPair][32][kPair].
#pragma once

#include "parallel.h"
#include "simd.h"

namespace sliceserve {

constexpr int kBlock = 32;  // outputs of one packed block

template <typename T>
void LinearBlock(const float* x, const T* w, int64_t rows, int64_t k, float* y, int64_t n, int64_t first) {
  const char* next = reinterpret_cast<const char*>(w + kBlock * k);
  if (first + kBlock <= n) {
    Rows<T, 16, 2, 12>(rows, x, k, w, kBlock, k, y + first, n, false, next);
    return;
  }
  float edge[12 * kBlock];  // the last block sticks out over n: compute aside, copy what exists
  for (int64_t r = 0; r < rows; r += 12) {
    const int64_t count = std::min<int64_t>(12, rows - r);
    Rows<T, 16, 2, 12>(count, x + r * k, k, w, kBlock, k, edge, kBlock, false, next);
    for (int64_t i = 0; i < count; ++i) std::memcpy(y + (r + i) * n + first, edge + i * kBlock, (n - first) * sizeof(float));
  }
}

// x [t, k], of which `rows` are valid; w one layer's packed weight; y [t, n] (rows behind `rows` become 0).
template <typename T>
void Linear(xla::ffi::ThreadPool& pool, const float* x, const T* w, int64_t t, int64_t rows, int64_t k, float* y, int64_t n) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  // A task should be worth a thread's wake-up (64 KiB of weights at least), and there should be several per thread.
  const int64_t bytes = kBlock * k * static_cast<int64_t>(sizeof(T));
  const int64_t group = std::max<int64_t>(1, std::min<int64_t>((64 << 10) / bytes, blocks / 4));
  const int64_t tasks = (blocks + group - 1) / group;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t end = std::min(blocks, (task + 1) * group);
    for (int64_t b = task * group; b < end; ++b) LinearBlock(x, w + b * kBlock * k, rows, k, y, n, b * kBlock);
  });
  std::memset(y + rows * n, 0, (t - rows) * n * sizeof(float));
}

}  // namespace sliceserve
