// Cached rows of any dtype and layout to float32, and finished rows back: the part of the CPU kernels that Highway compiles
// for each instruction set. Included by their .cpp files, once for each.

#include <cstring>

#include "core/convert.hpp"
#include "core/kv_row.hpp"

#if defined(TREEMLA_BACKEND_CPU_WIDEN_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEMLA_BACKEND_CPU_WIDEN_INL_
#undef TREEMLA_BACKEND_CPU_WIDEN_INL_
#else
#define TREEMLA_BACKEND_CPU_WIDEN_INL_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int kLanes = HWY_LANES(float);
constexpr bool kManyRegisters = (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM_A64;  // 32, not 16
static_assert(kPackedGroup % kLanes == 0 && kQ8Block / 2 % kLanes == 0 &&
              kInterleavedBlock / 2 % kLanes == 0);

// kLanes e4m3 numbers. Exponent and mantissa move up 20 bits and the bias from 7 to 127. Exponent 0 means no
// implicit one: read it as 2^-6 * (1 + man / 8) and take 2^-6 away again, which is exact and meets no float32
// subnormal.
HWY_INLINE V widen_e4m3(const uint8_t* from) {
  const D d;
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<uint8_t, D> du8;
  const auto x = hn::PromoteTo(du32, hn::LoadU(du8, from));
  const auto sign = hn::ShiftLeft<24>(hn::And(x, hn::Set(du32, 0x80)));
  const auto low = hn::And(x, hn::Set(du32, 0x7F));
  const auto mag = hn::ShiftLeft<20>(low);
  const V normal = hn::BitCast(d, hn::Add(mag, hn::Set(du32, 120u << 23)));
  const V small = hn::Sub(hn::BitCast(d, hn::Add(mag, hn::Set(du32, 121u << 23))), hn::Set(d, 0x1p-6f));
  V v = hn::IfThenElse(hn::RebindMask(d, hn::Lt(low, hn::Set(du32, 8))), small, normal);
  v = hn::IfThenElse(hn::RebindMask(d, hn::Eq(low, hn::Set(du32, 0x7F))), hn::NaN(d), v);
  return hn::Or(v, hn::BitCast(d, sign));
}

// fp16 numbers, as their bits. Where the CPU has no instruction for it, Highway takes the exponent of infinity and NaN for one more
// power of two.
HWY_INLINE V widen_f16(hn::Vec<hn::Rebind<uint16_t, D>> bits) {
  const D d;
  const V v = hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
#if HWY_TARGET >= HWY_SSE4
  const V exponent = hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), 0x7F800000u));
  return hn::IfThenElse(hn::Ge(hn::Abs(v), hn::Set(d, 65536.0f)), hn::Or(v, exponent), v);
#else
  return v;
#endif
}

// Widens n elements to float32; writes whole vectors, so `to` has room up to the next multiple of kLanes.
HWY_INLINE void widen_row(const void* from, DType dtype, int n, float* HWY_RESTRICT to) {
  const D d;
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<uint16_t, D> du16;
  int i = 0;
  const int whole = n - n % kLanes;
  switch (dtype) {
    case DType::kF32: {
      const float* f = static_cast<const float*>(from);
      for (; i < whole; i += kLanes) hn::Store(hn::LoadU(d, f + i), d, to + i);
      break;
    }
    case DType::kBF16: {
      const uint16_t* f = static_cast<const uint16_t*>(from);
      for (; i < whole; i += kLanes)
        hn::Store(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, f + i)))), d, to + i);
      break;
    }
    case DType::kF16: {
      const uint16_t* f = static_cast<const uint16_t*>(from);
      for (; i < whole; i += kLanes) hn::Store(widen_f16(hn::LoadU(du16, f + i)), d, to + i);
      break;
    }
    case DType::kF8E4M3: {
      const uint8_t* f = static_cast<const uint8_t*>(from);
      for (; i < whole; i += kLanes) hn::Store(widen_e4m3(f + i), d, to + i);
      break;
    }
    case DType::kF8E4M3Packed:
    case DType::kQ8:
      break;  // widen_packed_row(), widen_q8_row()
  }
  for (; i < n; ++i) to[i] = load_element(from, dtype, i);
}

// A row of kF8E4M3Packed.
HWY_INLINE void widen_packed_row(const void* from, const MlaShape& shape, float* HWY_RESTRICT to) {
  const D d;
  const uint8_t* latents = static_cast<const uint8_t*>(from);
  for (int i = 0; i < shape.d_v; i += kPackedGroup) {
    const V scale = hn::Set(d, packed_scale(from, shape, i / kPackedGroup));
    for (int j = i; j < i + kPackedGroup; j += kLanes)
      hn::Store(hn::Mul(widen_e4m3(latents + j), scale), d, to + j);
  }
  widen_row(latents + packed_rope_offset(shape), DType::kBF16, shape.d_rope, to + shape.d_v);
}

// The scale that a block of kQ8 begins with, in all lanes.
HWY_INLINE V q8_scale_of(const void* block) {
  return widen_f16(hn::Set(hn::Rebind<uint16_t, D>(), *static_cast<const uint16_t*>(block)));
}

// kLanes int8, times a scale.
HWY_INLINE V widen_int8(const int8_t* from, V scale) {
  const D d;
  const hn::Rebind<int32_t, D> di32;
  const hn::Rebind<int8_t, D> di8;
  return hn::Mul(hn::ConvertTo(d, hn::PromoteTo(di32, hn::LoadU(di8, from))), scale);
}

// A row of kQ8: n is a multiple of kQ8Block.
HWY_INLINE void widen_q8_row(const void* from, int n, float* HWY_RESTRICT to) {
  const D d;
  const auto* at = static_cast<const int8_t*>(from);
  for (int block = 0; block < n / kQ8Block; ++block, at += kQ8BlockBytes, to += kQ8Block) {
    const V scale = q8_scale_of(at);
    for (int c = 0; c < kQ8Block; c += kLanes) hn::Store(widen_int8(at + 2 + c, scale), d, to + c);
  }
}

// The vectors at columns c and c + kInterleavedBlock / 2 of an interleaved bf16 row: the halves of the same words.
HWY_INLINE void widen_interleaved(const uint16_t* row, int c, V& lower, V& upper) {
  const D d;
  const hn::Rebind<uint32_t, D> du32;
  constexpr int kHalf = kInterleavedBlock / 2;
  const int block = c / kInterleavedBlock * kInterleavedBlock;
  const auto words = hn::LoadU(du32, reinterpret_cast<const uint32_t*>(row + block) + c % kHalf);
  lower = hn::BitCast(d, hn::ShiftLeft<16>(words));
  upper = hn::BitCast(d, hn::And(words, hn::Set(du32, 0xFFFF0000u)));
}

// Such a row: n is a multiple of kInterleavedBlock.
HWY_INLINE void widen_interleaved_row(const void* from, int n, float* HWY_RESTRICT to) {
  const D d;
  constexpr int kHalf = kInterleavedBlock / 2;
  for (int block = 0; block < n; block += kInterleavedBlock) {
    for (int c = block; c < block + kHalf; c += kLanes) {
      V lower, upper;
      widen_interleaved(static_cast<const uint16_t*>(from), c, lower, upper);
      hn::Store(lower, d, to + c);
      hn::Store(upper, d, to + c + kHalf);
    }
  }
}

// Narrows n floats (whole vectors readable) to `to`.
HWY_INLINE void narrow_row(const float* HWY_RESTRICT from, int n, DType dtype, void* to) {
  const D d;
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<uint16_t, D> du16;
  if (dtype == DType::kF32) {
    std::memcpy(to, from, sizeof(float) * n);
    return;
  }
  int i = 0;
  if (dtype == DType::kBF16) {  // round to nearest even; NaN keeps its upper half, made quiet
    uint16_t* t = static_cast<uint16_t*>(to);
    for (; i + kLanes <= n; i += kLanes) {
      const V v = hn::Load(d, from + i);
      const auto u = hn::BitCast(du32, v);
      const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du32, 1));
      const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du32, 0x7FFF))));
      const auto nan = hn::Or(hn::ShiftRight<16>(u), hn::Set(du32, 0x40));
      const auto r = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), nan, rounded);
      hn::StoreU(hn::TruncateTo(du16, r), du16, t + i);
    }
  }
  for (; i < n; ++i) store_element(to, dtype, i, from[i]);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#endif  // TREEMLA_BACKEND_CPU_WIDEN_INL_
