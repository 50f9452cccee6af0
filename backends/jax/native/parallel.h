// ParallelFor over XLA's own thread pool, without a second pool that would fight it for the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace sliceserve {

constexpr int kSpins = 500;  // some ten microseconds

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs fn(i) for i in [0, n). The caller works too and takes whatever nobody has started, so it never waits for a pool
// thread that is busy elsewhere: only for pieces already running. That rules out a deadlock when all pool threads are
// inside such a loop.
template <typename Fn>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t n, const Fn& fn) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  const Fn* body = &fn;
  auto work = [state, body, n]() {
    int64_t finished = 0;
    for (int64_t i = state->next.fetch_add(1); i < n; i = state->next.fetch_add(1), ++finished) (*body)(i);
    if (finished && state->done.fetch_add(finished, std::memory_order_acq_rel) + finished == n) state->done.notify_one();
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule([work]() { work(); });
  work();
  // A short spin covers the usual gap. Then sleep: a core that only waits may be just what a pool thread needs that was
  // pushed aside by another process.
  int64_t done = state->done.load(std::memory_order_acquire);
  for (int spins = 0; done < n && spins < kSpins; ++spins) {
    Pause();
    done = state->done.load(std::memory_order_acquire);
  }
  for (; done < n; done = state->done.load(std::memory_order_acquire)) state->done.wait(done, std::memory_order_acquire);
}

}  // namespace sliceserve
