// y = x W^T with W as int8 and one scale per output, packed in blocks of 32 outputs: [blocks][k / 2][32][2].
//
// Two ways to the same product. The exact one widens weights to float in registers and multiplies with the float
// activations. The other rounds activations to 16 bits, with one scale per row and kGroup consecutive k (an error of at
// most 2^-16 of the group's largest value), and lets AVX512-VNNI add up the pairs as integers: a third to a half more
// products per second, since there is half as much to unpack. Sums over a group fit 32 bits: 256 * 32767 * 127 < 2^31.
#pragma once

#include <cmath>
#include <memory>

#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define SLICESERVE_INT16_DOT 1
#endif

namespace sliceserve {

template <int L>
struct Pairs {
  typedef int8_t Bytes __attribute__((vector_size(L * 2), aligned(1)));
  typedef int16_t Words __attribute__((vector_size(L * 4), aligned(4)));
};

template <>
struct Element<int8_t> {
  static constexpr int kPair = 2;
  template <int L>
  static void Unpack(const int8_t* p, F<L> (&out)[2]) {
    using I = typename Lanes<L>::I;
    typename Pairs<L>::Bytes bytes;
    std::memcpy(&bytes, p, sizeof(bytes));
    const I pairs = (I)__builtin_convertvector(bytes, typename Pairs<L>::Words);
    out[0] = __builtin_convertvector((I)((typename Lanes<L>::U)pairs << 16) >> 16, F<L>);
    out[1] = __builtin_convertvector(pairs >> 16, F<L>);
  }
};

// One layer's packed weight and its scales, [blocks * 32].
struct Int8Weight {
  const int8_t* data;
  const float* scale;
};

// y [rows, n]'s columns of a block: count of them from `first` on, each times its scale.
inline void ScaleColumns(float* y, int64_t rows, int64_t n, int64_t first, int64_t count, const float* scale) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c) y[r * n + first + c] *= scale[c];
}

inline void LinearExact(xla::ffi::ThreadPool& pool, const float* x, Int8Weight w, int64_t rows, int64_t k, float* y, int64_t n) {
  ForBlocks<int8_t>(pool, k, n, [&](int64_t b) {
    const int64_t first = b * kBlock;
    LinearBlock(x, w.data + first * k, rows, k, y, n, first);
    ScaleColumns(y, rows, n, first, std::min<int64_t>(kBlock, n - first), w.scale + first);
  });
}

#ifdef SLICESERVE_INT16_DOT

inline uint32_t MagnitudeBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffffu;
}

constexpr int64_t kGroup = 256;  // consecutive k that share an activation scale

// Activations [rows, k] in 16 bits, and their scales [rows, groups].
struct RoundedRows {
  int64_t k, groups;
  std::unique_ptr<int16_t[]> data;
  std::unique_ptr<float[]> scale;

  RoundedRows(const float* x, int64_t rows, int64_t k)
      : k(k), groups((k + kGroup - 1) / kGroup), data(new int16_t[rows * k]), scale(new float[rows * groups]) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = r * k + g * kGroup;
        scale[r * groups + g] = Round(x + begin, std::min(kGroup, k - g * kGroup), data.get() + begin);
      }
  }

  static float Round(const float* x, int64_t count, int16_t* out) {
    uint32_t bits = 0;  // of magnitudes: ordered like the numbers, infinity and NaN above all
    for (int64_t i = 0; i < count; ++i) bits = std::max(bits, MagnitudeBits(x[i]));
    const float largest = FromBits(bits);
    if (largest < 1e-30f) {  // its inverse could overflow
      std::fill(out, out + count, int16_t{0});
      return 0;
    }
    if (!(largest < 1e38f)) {
      std::fill(out, out + count, int16_t{1});
      return NAN;
    }
    const float inverse = 32767.0f / largest;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int16_t>(std::nearbyint(x[i] * inverse));
    return largest / 32767.0f;
  }
};

// out[MR][32] = rounded rows * w; see Tile for the order of additions and `ahead`.
template <int MR>
inline void RoundedTile(const RoundedRows& x, int64_t row, const int8_t* w, const float* scale, float* out, int64_t out_stride,
                        const char* ahead) {
  const int16_t* data = x.data.get() + row * x.k;
  __m512 sum[MR][2] = {};
  for (int64_t g = 0; g < x.groups; ++g) {
    __m512i part[MR][2] = {};
    const int64_t end = std::min(x.k, (g + 1) * kGroup);
    for (int64_t i = g * kGroup; i < end; i += 2, w += 2 * kBlock, ahead += kCacheLine) {
      __builtin_prefetch(ahead, 0, 2);
      const __m512i w0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
      const __m512i w1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + kBlock)));
      for (int r = 0; r < MR; ++r) {
        int32_t pair;
        std::memcpy(&pair, data + r * x.k + i, sizeof(pair));
        part[r][0] = _mm512_dpwssd_epi32(part[r][0], w0, _mm512_set1_epi32(pair));
        part[r][1] = _mm512_dpwssd_epi32(part[r][1], w1, _mm512_set1_epi32(pair));
      }
    }
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < 2; ++v)
        sum[r][v] += _mm512_cvtepi32_ps(part[r][v]) * _mm512_set1_ps(x.scale[(row + r) * x.groups + g]);
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(out + r * out_stride + v * 16, sum[r][v] * _mm512_loadu_ps(scale + v * 16));
}

template <int MAX>
inline void RoundedTiles(const RoundedRows& x, int64_t row, int64_t rows, const int8_t* w, const float* scale, float* out,
                         int64_t out_stride, const char* ahead) {
  for (; rows >= MAX; rows -= MAX, row += MAX, out += MAX * out_stride, ahead += x.k / 2 * kCacheLine)
    RoundedTile<MAX>(x, row, w, scale, out, out_stride, ahead);
  if constexpr (MAX > 1) {
    if (rows > 0) RoundedTiles<MAX - 1>(x, row, rows, w, scale, out, out_stride, ahead);
  }
}

inline void LinearRounded(xla::ffi::ThreadPool& pool, const float* x, Int8Weight w, int64_t rows, int64_t k, float* y, int64_t n) {
  const RoundedRows rounded(x, rows, k);
  ForBlocks<int8_t>(pool, k, n, [&](int64_t b) {
    const int64_t first = b * kBlock;
    const int8_t* block = w.data + first * k;
    const char* next = reinterpret_cast<const char*>(block + kBlock * k);
    if (first + kBlock <= n) {
      RoundedTiles<kTileRows>(rounded, 0, rows, block, w.scale + first, y + first, n, next);
      return;
    }
    float edge[kTileRows * kBlock];
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t count = std::min<int64_t>(kTileRows, rows - r);
      RoundedTiles<kTileRows>(rounded, r, count, block, w.scale + first, edge, kBlock, next);
      CopyEdge(edge, count, y + r * n + first, n, n - first);
    }
  });
}

#else

inline void LinearRounded(xla::ffi::ThreadPool& pool, const float* x, Int8Weight w, int64_t rows, int64_t k, float* y, int64_t n) {
  LinearExact(pool, x, w, rows, k, y, n);  // rounding alone would gain nothing
}

#endif

// x [t, k], of which `rows` are valid -> y [t, n] (rows behind `rows` become 0).
inline void LinearInt8(xla::ffi::ThreadPool& pool, const float* x, Int8Weight w, int64_t t, int64_t rows, int64_t k, float* y,
                       int64_t n, bool exact) {
  if (exact) LinearExact(pool, x, w, rows, k, y, n);
  else LinearRounded(pool, x, w, rows, k, y, n);
  std::memset(y + rows * n, 0, (t - rows) * n * sizeof(float));
}

}  // namespace sliceserve
