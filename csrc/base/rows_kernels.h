// Kernels of rows.cpp; see each_processor.h.

constexpr int kFloats = kLanes<float>;
using Floats = Vector<float>;
using Words = VectorN<uint32_t, kFloats>;
using Halves = VectorN<uint16_t, kFloats>;

inline Floats from_bfloat16(Words bits) { return (Floats)(bits << 16); }

// No step makes a subnormal float: a processor that flushes those to zero would lose small halves.
inline Floats from_half(Words bits) {
  const Words size = (bits & 0x7fff) << 13;
  const Words normal = size + (112u << 23);  // the exponent with float's bias
  // A subnormal half is m·2^-24: with the smallest normal exponent it reads as 2^-14 + m·2^-24.
  const Words subnormal = (Words)((Floats)(normal + (1u << 23)) - 0x1p-14f);
  Words wide = (Words)(size < 1u << 23) ? subnormal : normal;
  wide |= (Words)(size >= 0x7c00u << 13) & 0x7f800000;
  return (Floats)(wide | ((bits & 0x8000) << 16));
}

inline Words to_bfloat16(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (Words)(x != x) ? Words{} + 0x7fc0u : rounded;
}

inline Words to_half(Floats x) {
  const Words bits = (Words)x, size = bits & 0x7fffffff;
  const Words usual = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  const Words small = (Words)((Floats)size + 0.5f) - 0x3f000000;
  Words half = (Words)(size < 0x38800000u) ? small : usual;
  half = (Words)(size >= 0x47800000u) ? Words{} + 0x7c00u : half;
  half = (Words)(size > 0x7f800000u) ? Words{} + 0x7e00u : half;
  return half | ((bits >> 16) & 0x8000);
}

template <typename Convert>
inline void widen_each(const void* row, int64_t n, float* wide, const Convert& convert) {
  each<float>(n, [&](int64_t i, int64_t count) {
    Halves bits{};
    std::memcpy(&bits, static_cast<const uint16_t*>(row) + i, count * sizeof(uint16_t));
    store<float>(wide + i, convert(__builtin_convertvector(bits, Words)), count);
  });
}

template <typename Convert>
inline void narrow_each(const float* wide, int64_t n, void* row, const Convert& convert) {
  each<float>(n, [&](int64_t i, int64_t count) {
    const Halves bits = __builtin_convertvector(convert(load<float>(wide + i, count)), Halves);
    std::memcpy(static_cast<uint16_t*>(row) + i, &bits, count * sizeof(uint16_t));
  });
}

FASTKD_KERNEL void widen_row(const void* row, Type type, int64_t n, float* wide) {
  if (type == Type::kBFloat16) {
    widen_each(row, n, wide, from_bfloat16);
  } else if (type == Type::kHalf) {
    widen_each(row, n, wide, from_half);
  } else {
    std::memcpy(wide, row, n * sizeof(float));
  }
}

FASTKD_KERNEL void narrow_row(const float* wide, int64_t n, Type type, void* row) {
  if (type == Type::kBFloat16) {
    narrow_each(wide, n, row, to_bfloat16);
  } else if (type == Type::kHalf) {
    narrow_each(wide, n, row, to_half);
  } else {
    std::memcpy(row, wide, n * sizeof(float));
  }
}
