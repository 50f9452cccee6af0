// Vectors of L float lanes and the few operations the kernels are made of.
//
// Weights, keys and values are float or bfloat16 (as uint16_t); activations and sums are float. bfloat16 is stored in
// pairs of consecutive k values per lane, so that unpacking takes one shift and one mask. That beats AVX512-BF16's own
// dot product, which has a quarter of the FMA's rate on some cores (measured: 88 against 167 GFLOP/s per core), and runs
// on every instruction set that GCC's generic vectors know.
#pragma once

#include <cstdint>
#include <cstring>

namespace sliceserve {

constexpr int kCacheLine = 64;  // bytes

template <int L>
struct Lanes {
  typedef float F __attribute__((vector_size(L * 4), aligned(4)));
  typedef int32_t I __attribute__((vector_size(L * 4), aligned(4)));
  typedef uint32_t U __attribute__((vector_size(L * 4), aligned(4)));
};

template <int L>
using F = typename Lanes<L>::F;

template <int L>
inline F<L> Splat(float x) {
  return F<L>{} + x;
}

template <int L>
inline F<L> Load(const float* p) {
  F<L> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <int L>
inline void Store(float* p, F<L> v) {
  std::memcpy(p, &v, sizeof(v));
}

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Round to nearest even; a NaN stays one.
inline uint16_t ToBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A stored element type T, kPair of which share a lane, and the float vectors of kPair consecutive k values it unpacks to.
template <typename T>
struct Element;

template <>
struct Element<float> {
  static constexpr int kPair = 1;
  static float From(float x) { return x; }
  template <int L>
  static void Unpack(const float* p, F<L> (&out)[1]) {
    out[0] = Load<L>(p);
  }
};

template <>
struct Element<uint16_t> {
  static constexpr int kPair = 2;
  static uint16_t From(float x) { return ToBf16(x); }
  template <int L>
  static void Unpack(const uint16_t* p, F<L> (&out)[2]) {
    typename Lanes<L>::U bits;
    std::memcpy(&bits, p, sizeof(bits));
    out[0] = (F<L>)(bits << 16);
    out[1] = (F<L>)(bits & 0xffff0000u);
  }
};

// exp(x) for x <= 0 within 2 ulp (Cephes' polynomial); 0 below -87.
template <int L>
inline F<L> ExpNegative(F<L> x) {
  const auto live = x > -87.0f;
  F<L> clipped = live ? x : Splat<L>(-87.0f);
  const F<L> magic = Splat<L>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F<L> n = (clipped * 1.44269504088896341f + magic) - magic;
  F<L> r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
  F<L> p = Splat<L>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  F<L> e = p * r * r + r + 1.0f;
  typename Lanes<L>::I exponent = (__builtin_convertvector(n, typename Lanes<L>::I) + 127) << 23;
  F<L> result = e * (F<L>)exponent;
  return live ? result : Splat<L>(0.0f);
}

template <int L>
inline F<L / 2> Half(F<L> v, int which) {
  F<L / 2> half;
  std::memcpy(&half, reinterpret_cast<const char*>(&v) + which * sizeof(half), sizeof(half));
  return half;
}

template <int L>
inline float Sum(F<L> v) {
  if constexpr (L == 2) return v[0] + v[1];
  else return Sum<L / 2>(Half<L>(v, 0) + Half<L>(v, 1));
}

template <int L>
inline F<L> Larger(F<L> a, F<L> b) {
  return a > b ? a : b;
}

template <int L>
inline float Max(F<L> v) {
  if constexpr (L == 2) return v[0] > v[1] ? v[0] : v[1];
  else return Max<L / 2>(Larger<L / 2>(Half<L>(v, 0), Half<L>(v, 1)));
}

// out[MR][NV * L] (+)= x[MR][k] * w, with w packed as [k / kPair][w_stride lanes][kPair], of which NV * L lanes are used.
// The order of additions over k is the same for every MR: a row's result does not depend on its neighbours. `ahead` is
// what will be read next: one cache line of it is fetched per step, so that streaming weights overlaps with computing.
template <typename T, int L, int MR, int NV>
inline void Tile(const float* __restrict x, int64_t x_stride, const T* __restrict w, int64_t w_stride, int64_t k,
                 float* __restrict out, int64_t out_stride, bool accumulate, const char* ahead) {
  constexpr int P = Element<T>::kPair;
  F<L> acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = accumulate ? Load<L>(out + r * out_stride + v * L) : Splat<L>(0.0f);
  for (int64_t i = 0; i < k; i += P, w += w_stride * P, ahead += kCacheLine) {
    __builtin_prefetch(ahead, 0, 2);
    F<L> weight[NV][P];
    for (int v = 0; v < NV; ++v) Element<T>::template Unpack<L>(w + v * L * P, weight[v]);
    for (int r = 0; r < MR; ++r)
      for (int p = 0; p < P; ++p) {
        const float scalar = x[r * x_stride + i + p];
        for (int v = 0; v < NV; ++v) acc[r][v] += weight[v][p] * scalar;
      }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) Store<L>(out + r * out_stride + v * L, acc[r][v]);
}

// Tile for any number of rows: register tiles of MAX rows, then one of what is left.
template <typename T, int L, int NV, int MAX>
inline void Rows(int64_t rows, const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t k, float* out,
                 int64_t out_stride, bool accumulate, const char* ahead) {
  for (; rows >= MAX; rows -= MAX, x += MAX * x_stride, out += MAX * out_stride, ahead += k / Element<T>::kPair * kCacheLine)
    Tile<T, L, MAX, NV>(x, x_stride, w, w_stride, k, out, out_stride, accumulate, ahead);
  if constexpr (MAX > 1) {
    if (rows > 0) Rows<T, L, NV, MAX - 1>(rows, x, x_stride, w, w_stride, k, out, out_stride, accumulate, ahead);
  }
}

}  // namespace sliceserve
