// y = x W^T with W packed in blocks of 32 outputs: [blocks][k / kPair][32][kPair].
#pragma once

#include "parallel.h"
#include "simd.h"

namespace sliceserve {

constexpr int kBlock = 32;  // outputs of one packed block
constexpr int kTileRows = 12;  // rows of a full register tile

// The first `count` columns of a block's result [rows][kBlock] go where they belong in y (row stride n).
inline void CopyEdge(const float* edge, int64_t rows, float* y, int64_t n, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(y + r * n, edge + r * kBlock, count * sizeof(float));
}

template <typename T>
void LinearBlock(const float* x, const T* w, int64_t rows, int64_t k, float* y, int64_t n, int64_t first) {
  const char* next = reinterpret_cast<const char*>(w + kBlock * k);
  if (first + kBlock <= n) {
    Rows<T, 16, 2, kTileRows>(rows, x, k, w, kBlock, k, y + first, n, false, next);
    return;
  }
  float edge[kTileRows * kBlock];  // the last block sticks out over n: compute aside, copy what exists
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r);
    Rows<T, 16, 2, kTileRows>(count, x + r * k, k, w, kBlock, k, edge, kBlock, false, next);
    CopyEdge(edge, count, y + r * n + first, n, n - first);
  }
}

// Calls fn(b) for the blocks of n outputs with weights of type T, in parallel.
template <typename T, typename Fn>
void ForBlocks(xla::ffi::ThreadPool& pool, int64_t k, int64_t n, const Fn& fn) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  // A task should be worth a thread's wake-up (64 KiB of weights at least), and there should be several per thread.
  const int64_t bytes = kBlock * k * static_cast<int64_t>(sizeof(T));
  const int64_t group = std::max<int64_t>(1, std::min<int64_t>((64 << 10) / bytes, blocks / 4));
  const int64_t tasks = (blocks + group - 1) / group;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t end = std::min(blocks, (task + 1) * group);
    for (int64_t b = task * group; b < end; ++b) fn(b);
  });
}

// x [t, k], of which `rows` are valid; w one layer's packed weight; y [t, n] (rows behind `rows` become 0).
template <typename T>
void Linear(xla::ffi::ThreadPool& pool, const float* x, const T* w, int64_t t, int64_t rows, int64_t k, float* y, int64_t n) {
  ForBlocks<T>(pool, k, n, [&](int64_t b) { LinearBlock(x, w + b * kBlock * k, rows, k, y, n, b * kBlock); });
  std::memset(y + rows * n, 0, (t - rows) * n * sizeof(float));
}

}  // namespace sliceserve
