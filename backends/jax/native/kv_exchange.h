// KV blocks between the order in which attention keeps them (see attention.h) and the order of tokens.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "parallel.h"

namespace sliceserve {

constexpr int64_t kStrip = 16;  // columns of a transposition that are read together: a cache line of 32-bit words

// from [rows][cols] -> to [cols][rows]
inline void Transpose(const uint32_t* __restrict from, int64_t rows, int64_t cols, uint32_t* __restrict to) {
  for (int64_t begin = 0; begin < cols; begin += kStrip) {
    const int64_t end = std::min(begin + kStrip, cols);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = begin; c < end; ++c) to[c * rows + r] = from[r * cols + c];
  }
}

// The blocks of one chip, and a batch of them in the order of tokens.
template <typename T>
struct BlockExchange {
  int64_t layers, blocks, kv_heads, block_size, dim;
  const int32_t* ids;
  int64_t count, batch_tokens;  // blocks to move; tokens of the whole batch
  static constexpr int64_t P = Element<T>::kPair;

  int64_t tile() const { return std::min<int64_t>(kMaxTile, block_size); }

  // Calls move(which, kept tile, tokens of the tile, first token in the batch) for every tile.
  template <typename Kept, typename Tokens, typename Move>
  void ForTiles(xla::ffi::ThreadPool& pool, Kept* cache, Tokens* data, const Move& move) const {
    ParallelFor(pool, layers * 2 * kv_heads, [&](int64_t task) {
      const int64_t head = task % kv_heads, which = task / kv_heads % 2, layer = task / kv_heads / 2;
      Tokens* tokens = data + task * batch_tokens * dim;
      for (int64_t i = 0; i < count; ++i) {
        Kept* block = cache + (((layer * blocks + ids[i]) * 2 + which) * kv_heads + head) * block_size * dim;
        for (int64_t t = 0; t < block_size; t += tile())
          move(which, block + t * dim, tokens + (i * block_size + t) * dim, i * block_size + t);
      }
    });
  }

  void Read(xla::ffi::ThreadPool& pool, const T* cache, T* data) const {
    ForTiles(pool, cache, data, [&](int64_t which, const T* kept, T* tokens, int64_t) {
      if (which == 0) {
        Transpose(reinterpret_cast<const uint32_t*>(kept), dim / P, tile(), reinterpret_cast<uint32_t*>(tokens));
      } else if constexpr (P == 1) {
        std::memcpy(tokens, kept, tile() * dim * sizeof(T));
      } else {
        for (int64_t j = 0; j < tile() / 2; ++j)
          for (int64_t i = 0; i < dim; ++i) {
            tokens[2 * j * dim + i] = kept[(j * dim + i) * 2];
            tokens[(2 * j + 1) * dim + i] = kept[(j * dim + i) * 2 + 1];
          }
      }
    });
  }

  // The first `skipped` tokens of the first block stay as they are.
  void Write(xla::ffi::ThreadPool& pool, T* cache, const T* data, int64_t skipped) const {
    ForTiles(pool, cache, data, [&](int64_t which, T* kept, const T* tokens, int64_t first) {
      if (first < skipped) {
        WriteTokens(which, kept, tokens, std::min(skipped - first, tile()));
      } else if (which == 0) {
        Transpose(reinterpret_cast<const uint32_t*>(tokens), tile(), dim / P, reinterpret_cast<uint32_t*>(kept));
      } else if constexpr (P == 1) {
        std::memcpy(kept, tokens, tile() * dim * sizeof(T));
      } else {
        for (int64_t j = 0; j < tile() / 2; ++j)
          for (int64_t i = 0; i < dim; ++i) {
            kept[(j * dim + i) * 2] = tokens[2 * j * dim + i];
            kept[(j * dim + i) * 2 + 1] = tokens[(2 * j + 1) * dim + i];
          }
      }
    });
  }

  void WriteTokens(int64_t which, T* kept, const T* tokens, int64_t from) const {
    for (int64_t s = from; s < tile(); ++s)
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t place = which == 0 ? (i / P * tile() + s) * P + i % P : (s / P * dim + i) * P + s % P;
        kept[place] = tokens[s * dim + i];
      }
  }
};

}  // namespace sliceserve
