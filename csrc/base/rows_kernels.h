// Kernels of rows.cpp; see each_processor.h.

constexpr int kFloats = kLanes<float>;
using Floats = Vector<float>;
using Words = VectorN<uint32_t, kFloats>;
using Halves = VectorN<uint16_t, kFloats>;

inline Words words_of(Halves bits) { return __builtin_convertvector(bits, Words); }
inline Halves halves_of(Words bits) { return __builtin_convertvector(bits, Halves); }

inline Floats from_bfloat16(Halves bits) { return (Floats)(words_of(bits) << 16); }

inline Halves to_bfloat16(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return halves_of((Words)(x != x) ? Words{} + 0x7fc0u : rounded);
}

// float16 by integers, for processors without an instruction. No step makes a subnormal float:
// where those are flushed to zero, small halves would be lost.
inline Floats from_half_by_bits(Words bits) {
  const Words size = (bits & 0x7fff) << 13;
  const Words normal = size + (112u << 23);  // the exponent with float's bias
  // A subnormal half is m·2^-24: with the smallest normal exponent it reads as 2^-14 + m·2^-24.
  const Words subnormal = (Words)((Floats)(normal + (1u << 23)) - 0x1p-14f);
  Words wide = (Words)(size < 1u << 23) ? subnormal : normal;
  wide |= (Words)(size >= 0x7c00u << 13) & 0x7f800000;
  return (Floats)(wide | ((bits & 0x8000) << 16));
}

inline Words to_half_by_bits(Floats x) {
  const Words bits = (Words)x, size = bits & 0x7fffffff;
  const Words normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  const Words small = (Words)((Floats)size + 0.5f) - 0x3f000000;
  Words half = (Words)(size < 0x38800000u) ? small : normal;
  half = (Words)(size >= 0x47800000u) ? Words{} + 0x7c00u : half;
  half = (Words)(size > 0x7f800000u) ? Words{} + 0x7e00u : half;
  return half | ((bits >> 16) & 0x8000);
}

// F16C and AVX-512 convert subnormal halves whether or not floats are flushed.
template <int bytes = kBytes>
FASTKD_KERNEL inline Floats from_half(Halves bits) {
#if defined(FASTKD_KINDS)
  if constexpr (bytes == 64) return (Floats)_mm512_cvtph_ps((__m256i)bits);
  if constexpr (bytes == 32) return (Floats)_mm256_cvtph_ps((__m128i)bits);
#endif
  if constexpr (bytes == kBaselineBytes) return from_half_by_bits(words_of(bits));
}

template <int bytes = kBytes>
FASTKD_KERNEL inline Halves to_half(Floats x) {
#if defined(FASTKD_KINDS)
  if constexpr (bytes == 64) return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  if constexpr (bytes == 32) return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#endif
  if constexpr (bytes == kBaselineBytes) return halves_of(to_half_by_bits(x));
}

template <typename Convert>
inline void widen_each(const void* row, int64_t n, float* wide, const Convert& convert) {
  each<float>(n, [&](int64_t i, int64_t count) {
    Halves bits{};
    std::memcpy(&bits, static_cast<const uint16_t*>(row) + i, count * sizeof(uint16_t));
    store<float>(wide + i, convert(bits), count);
  });
}

template <typename Convert>
inline void narrow_each(const float* wide, int64_t n, void* row, const Convert& convert) {
  each<float>(n, [&](int64_t i, int64_t count) {
    const Halves bits = convert(load<float>(wide + i, count));
    std::memcpy(static_cast<uint16_t*>(row) + i, &bits, count * sizeof(uint16_t));
  });
}

FASTKD_KERNEL void widen_row(const void* row, Type type, int64_t n, float* wide) {
  if (type == Type::kBFloat16) {
    widen_each(row, n, wide, from_bfloat16);
  } else if (type == Type::kHalf) {
    widen_each(row, n, wide, from_half<>);
  } else {
    std::memcpy(wide, row, n * sizeof(float));
  }
}

FASTKD_KERNEL void narrow_row(const float* wide, int64_t n, Type type, void* row) {
  if (type == Type::kBFloat16) {
    narrow_each(wide, n, row, to_bfloat16);
  } else if (type == Type::kHalf) {
    narrow_each(wide, n, row, to_half<>);
  } else {
    std::memcpy(row, wide, n * sizeof(float));
  }
}
