// Vectors of one width for every processor: parts of rows, exp and log, sums.
//
// A vector has 64 bytes; a processor with shorter registers takes several for one. Only what is
// inlined into a function of FASTKD_CLONES is compiled for each processor.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "clones.h"

namespace fastkd {

template <typename T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using VectorN = typename VectorOf<T, N>::Type;

template <typename W>
constexpr int kLanes = 64 / int(sizeof(W));
template <typename W>
using Vector = VectorN<W, kLanes<W>>;

template <typename W>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  using Bits = int32_t;
  using Unsigned = uint32_t;  // in which nothing overflows
  static constexpr int kMantissa = 23, kBias = 127;
  // Of 1/k! and of 2/(2k+1): what they leave out lies below half a rounding.
  static constexpr int kExpTerms = 8, kLogTerms = 5;
  static constexpr float kLeastExp = -104, kMostExp = 89;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440054690583e-4f;
};
template <>
struct FloatFormat<double> {
  using Bits = int64_t;
  using Unsigned = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int kExpTerms = 14, kLogTerms = 12;
  static constexpr double kLeastExp = -746, kMostExp = 710;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770e-10;
};
template <typename W>
using Bits = VectorN<typename FloatFormat<W>::Bits, kLanes<W>>;

template <typename W>
using Unsigned = VectorN<typename FloatFormat<W>::Unsigned, kLanes<W>>;

template <typename W>
inline Vector<W> splat(W x) {
  return x - Vector<W>{};
}

// body(start, count) along a row of n: whole vectors, and a rest of fewer.
template <typename W, typename Body>
inline void each(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += kLanes<W>) body(i, n - i < kLanes<W> ? n - i : kLanes<W>);
}

// The first ``count`` numbers, and ``other`` beyond.
template <typename W>
inline Vector<W> keep(Vector<W> x, int64_t count, W other = 0) {
  if (count == kLanes<W>) return x;
  Bits<W> lane;
  for (int i = 0; i < kLanes<W>; ++i) lane[i] = i;
  return lane < typename FloatFormat<W>::Bits(count) ? x : splat(other);
}

template <typename W>
inline Vector<W> load(const W* p, int64_t count = kLanes<W>, W other = 0) {
  Vector<W> x{};
  if (count == kLanes<W>) {
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  std::memcpy(&x, p, count * sizeof(W));
  return keep<W>(x, count, other);
}

template <typename W>
inline void store(W* p, Vector<W> x, int64_t count = kLanes<W>) {
  // Apart, or each would be a call.
  if (count == kLanes<W>) {
    std::memcpy(p, &x, sizeof(x));
  } else {
    std::memcpy(p, &x, count * sizeof(W));
  }
}

template <typename W>
inline Vector<W> largest(Vector<W> a, Vector<W> b) {
  return a > b ? a : b;
}

// In halves, so in the same order whatever the registers.
template <typename W>
inline double sum(Vector<W> x) {
  double parts[kLanes<W>];
  for (int i = 0; i < kLanes<W>; ++i) parts[i] = double(x[i]);
  for (int n = kLanes<W> / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) parts[i] += parts[i + n];
  }
  return parts[0];
}

template <typename W>
inline W largest(Vector<W> x) {
  W found = x[0];
  for (int i = 1; i < kLanes<W>; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

// 2^n for n in the range of normal numbers.
template <typename W>
inline Vector<W> power_of_2(Bits<W> n) {
  const auto bias = typename FloatFormat<W>::Unsigned(FloatFormat<W>::kBias);
  return (Vector<W>)(((Unsigned<W>)n + bias) << FloatFormat<W>::kMantissa);
}

// e^x to about one rounding, over all numbers.
template <typename W>
inline Vector<W> exp(Vector<W> x) {
  using F = FloatFormat<W>;
  x = x < F::kLeastExp ? splat(F::kLeastExp) : x;
  x = x > F::kMostExp ? splat(F::kMostExp) : x;
  // In sums with 1.5·2^mantissa the last bits hold the nearest integer.
  constexpr W kRound = W(3ll << (F::kMantissa - 1));
  const Vector<W> shifted = x * W(1.44269504088896340736) + kRound;
  const Bits<W> n = (Bits<W>)((Unsigned<W>)shifted - (Unsigned<W>)splat(kRound));
  const Vector<W> turns = shifted - kRound;
  const Vector<W> r = (x - turns * F::kLn2High) - turns * F::kLn2Low;
  W factorial = 1;
  W inverse[F::kExpTerms] = {1};
  for (int k = 1; k < F::kExpTerms; ++k) inverse[k] = 1 / (factorial *= W(k));
  Vector<W> series = splat(inverse[F::kExpTerms - 1]);
  for (int k = F::kExpTerms - 2; k >= 0; --k) series = series * r + inverse[k];
  // In two steps, since 2^n alone may be no normal number.
  const Bits<W> half = n >> 1;
  return series * power_of_2<W>(half) * power_of_2<W>((Bits<W>)((Unsigned<W>)n - (Unsigned<W>)half));
}

// log x to about one rounding, of positive normal numbers.
template <typename W>
inline Vector<W> log(Vector<W> x) {
  using F = FloatFormat<W>;
  // x = 2^exponent·(1 + f) with 1 + f in [√½, √2)
  const Unsigned<W> root = (Unsigned<W>)splat(W(0.70710678118654752440)), bits = (Unsigned<W>)x;
  const Bits<W> exponent = (Bits<W>)(bits - root) >> F::kMantissa;
  const Vector<W> f = (Vector<W>)(bits - ((Unsigned<W>)exponent << F::kMantissa)) - W(1);
  const Vector<W> s = f / (f + W(2)), z = s * s;
  Vector<W> series = splat(W(2) / W(2 * F::kLogTerms + 1));
  for (int k = F::kLogTerms - 1; k > 0; --k) series = series * z + W(2) / W(2 * k + 1);
  const Vector<W> square = f * f * W(0.5), turns = __builtin_convertvector(exponent, Vector<W>);
  const Vector<W> low = s * (square + series * z) + turns * F::kLn2Low;
  return turns * F::kLn2High - ((square - low) - f);
}

}  // namespace fastkd
