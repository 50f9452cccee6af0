// What XLA calls: unpacks buffers for the other headers. Shapes are right by construction in
// backends/jax/native/__init__.py.
#include "attention.h"
#include "elementwise.h"
#include "kv_exchange.h"
#include "linear.h"
#include "linear_int8.h"
#include "sampling.h"

namespace ffi = xla::ffi;

namespace sliceserve {
namespace {

// x [t, k], w [layers, blocks, k / pair, 32, pair] (uint16 holds bfloat16), layer [], rows [1] -> y [t, n]
ffi::Error LinearImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                      ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t t = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1];
  const int64_t valid = std::clamp<int64_t>(rows.typed_data()[0], 0, t);
  int64_t per_layer = 1;
  for (size_t i = 1; i < w.dimensions().size(); ++i) per_layer *= w.dimensions()[i];
  const int64_t offset = layer.typed_data()[0] * per_layer;
  float* out = y->typed_data();
  if (w.element_type() == ffi::F32)
    Linear(pool, x.typed_data(), w.typed_data<float>() + offset, t, valid, k, out, n);
  else
    Linear(pool, x.typed_data(), static_cast<const uint16_t*>(w.untyped_data()) + offset, t, valid, k, out, n);
  return ffi::Error::Success();
}

// x [t, k], w [layers, blocks, k / 2, 32, 2], scale [layers, blocks, 32], layer [], rows [1] -> y [t, n]
ffi::Error LinearInt8Impl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> scale,
                          ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::Buffer<ffi::F32>> y,
                          bool exact) {
  const int64_t t = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1];
  const int64_t valid = std::clamp<int64_t>(rows.typed_data()[0], 0, t);
  const int64_t padded = layer.typed_data()[0] * scale.dimensions()[1] * kBlock;
  const Int8Weight weight{w.typed_data() + padded * k, scale.typed_data() + padded};
  LinearInt8(pool, x.typed_data(), weight, t, valid, k, y->typed_data(), n, exact);
  return ffi::Error::Success();
}

// x [t, n], weight [n], rows [1] -> y [t, n] (rows behind `rows` become 0)
ffi::Error RmsNormImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                       ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::Buffer<ffi::F32>> y, float epsilon) {
  const int64_t t = x.dimensions()[0], n = x.dimensions()[1];
  const int64_t valid = std::clamp<int64_t>(rows.typed_data()[0], 0, t);
  float* out = y->typed_data();
  ForRows(pool, valid, n, [&](int64_t r) {
    RmsNormRow(x.typed_data() + r * n, weight.typed_data(), n, epsilon, out + r * n);
  });
  std::memset(out + valid * n, 0, (t - valid) * n * sizeof(float));
  return ffi::Error::Success();
}

// gate_up [t, 2 n], rows [1] -> silu(gate) * up [t, n] (rows behind `rows` become 0)
ffi::Error GatedSiluImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gate_up, ffi::Buffer<ffi::S32> rows,
                         ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t t = y->dimensions()[0], n = y->dimensions()[1];
  const int64_t valid = std::clamp<int64_t>(rows.typed_data()[0], 0, t);
  float* out = y->typed_data();
  ForRows(pool, valid, n, [&](int64_t r) {
    const float* gate = gate_up.typed_data() + r * 2 * n;
    GatedSiluRow(gate, gate + n, n, out + r * n);
  });
  std::memset(out + valid * n, 0, (t - valid) * n * sizeof(float));
  return ffi::Error::Success();
}

// qkv [t, heads + 2 kv_heads, d] not rotated yet, cos and sin [t, d / 2]; cache [layers, blocks, 2, kv_heads,
// block_size * d], updated in place; tables [rows, max_blocks], kv_lens [rows], query_starts [rows + 1], num_rows [1]
// -> out [t, heads, d], cache
ffi::Error AttentionImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> cos,
                         ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> layer,
                         ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> query_starts,
                         ffi::Buffer<ffi::S32> num_rows, ffi::Result<ffi::Buffer<ffi::F32>> out,
                         ffi::Result<ffi::AnyBuffer> new_cache, float scale, int64_t window) {
  if (new_cache->untyped_data() != cache.untyped_data())
    return ffi::Error::Internal("attention: the cache must be updated in place");
  const auto c = cache.dimensions();
  const int64_t t = out->dimensions()[0], heads = out->dimensions()[1], dim = out->dimensions()[2];
  const AttentionShape shape{heads, c[3], dim, c[4] / dim, tables.dimensions()[1], window, scale};
  const int64_t offset = layer.typed_data()[0] * c[1] * c[2] * c[3] * c[4];
  const int64_t rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, kv_lens.dimensions()[0]);
  const int32_t* starts = query_starts.typed_data();
  auto run = [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    Attention<T>{shape, qkv.typed_data(), cos.typed_data(), sin.typed_data(), data + offset, tables.typed_data(),
                 kv_lens.typed_data(), starts, rows, out->typed_data()}
        .Run(pool);
  };
  if (cache.element_type() == ffi::F32) run(static_cast<float*>(new_cache->untyped_data()));
  else run(static_cast<uint16_t*>(new_cache->untyped_data()));
  const int64_t used = starts[rows] * heads * dim;
  std::memset(out->typed_data() + used, 0, (t * heads * dim - used) * sizeof(float));
  return ffi::Error::Success();
}

template <typename T>
BlockExchange<T> ExchangeOf(ffi::AnyBuffer::Dimensions c, ffi::AnyBuffer::Dimensions data, ffi::Buffer<ffi::S32> ids,
                            ffi::Buffer<ffi::S32> count) {
  const int64_t dim = data[4], wanted = count.typed_data()[0];
  return {c[0], c[1], c[3], c[4] / dim, dim, ids.typed_data(), std::clamp<int64_t>(wanted, 0, ids.dimensions()[0]), data[3]};
}

// cache [layers, blocks, 2, kv_heads, block_size * d], ids [n], count [1] -> data [layers, 2, kv_heads, n * block_size, d],
// of which what is behind `count` blocks may be anything
ffi::Error ReadBlocksImpl(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> ids,
                          ffi::Buffer<ffi::S32> count, ffi::Result<ffi::AnyBuffer> data) {
  auto run = [&](auto* kept) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(kept)>>;
    ExchangeOf<T>(cache.dimensions(), data->dimensions(), ids, count).Read(pool, kept, static_cast<T*>(data->untyped_data()));
  };
  if (cache.element_type() == ffi::F32) run(static_cast<const float*>(cache.untyped_data()));
  else run(static_cast<const uint16_t*>(cache.untyped_data()));
  return ffi::Error::Success();
}

// cache and data as above, ids [n], count [1], skipped [1] -> cache, updated in place
ffi::Error WriteBlocksImpl(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer data, ffi::Buffer<ffi::S32> ids,
                           ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> skipped,
                           ffi::Result<ffi::AnyBuffer> new_cache) {
  if (new_cache->untyped_data() != cache.untyped_data())
    return ffi::Error::Internal("write_blocks: the cache must be updated in place");
  auto run = [&](auto* kept) {
    using T = std::remove_pointer_t<decltype(kept)>;
    ExchangeOf<T>(cache.dimensions(), data.dimensions(), ids, count)
        .Write(pool, kept, static_cast<const T*>(data.untyped_data()), skipped.typed_data()[0]);
  };
  if (cache.element_type() == ffi::F32) run(static_cast<float*>(new_cache->untyped_data()));
  else run(static_cast<uint16_t*>(new_cache->untyped_data()));
  return ffi::Error::Success();
}

// logits [t, n]; temperature, top_k, top_p, min_p, uniform [t]; rows [1] -> the chosen id of each valid row [t] (0 behind)
ffi::Error SampleImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> temperature,
                      ffi::Buffer<ffi::S32> top_k, ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p,
                      ffi::Buffer<ffi::F32> uniform, ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::Buffer<ffi::S32>> out) {
  const int64_t t = logits.dimensions()[0], n = logits.dimensions()[1];
  const int64_t valid = std::clamp<int64_t>(rows.typed_data()[0], 0, t);
  ParallelFor(pool, valid, [&](int64_t r) {
    const RowSampling row{temperature.typed_data()[r], top_k.typed_data()[r], top_p.typed_data()[r], min_p.typed_data()[r],
                          uniform.typed_data()[r]};
    out->typed_data()[r] = SampleRow(logits.typed_data() + r * n, n, row);
  });
  std::fill(out->typed_data() + valid, out->typed_data() + t, 0);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sliceserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveLinear, sliceserve::LinearImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveLinearInt8, sliceserve::LinearInt8Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("exact"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveRmsNorm, sliceserve::RmsNormImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveGatedSilu, sliceserve::GatedSiluImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveAttention, sliceserve::AttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveSample, sliceserve::SampleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveReadBlocks, sliceserve::ReadBlocksImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SliceserveWriteBlocks, sliceserve::WriteBlocksImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
