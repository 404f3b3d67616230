// Vectors of one width for every processor: parts of rows, exp and log, sums.
//
// A vector has 64 bytes; a processor with shorter registers takes several for one. Only what is
// inlined into a function of FASTKD_CLONES is compiled for each processor.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

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
  // Of 1/k! and of 1/(2k+1): what they leave out lies below half a rounding.
  static constexpr int kExpTerms = 8, kAtanhTerms = 7;
  static constexpr float kLeastExp = -104;  // below e^x is 0
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440054690583e-4f;
};
template <>
struct FloatFormat<double> {
  using Bits = int64_t;
  using Unsigned = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int kExpTerms = 14, kAtanhTerms = 16;
  static constexpr double kLeastExp = -746;
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

// A line that is read soon, from memory that may end before it.
inline void fetch(const void* p) { __builtin_prefetch(p); }

// Near, but not into the nearest cache, where what is computed with stays.
inline void fetch_near(const char* p) { __builtin_prefetch(p, 0, 2); }
inline void fetch_all(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) fetch_near(from + at);
}

// body(start, count) along a row of n: whole vectors, and a rest of fewer. In the loop the count is
// a constant, so nothing there asks for it.
template <typename W, typename Body>
inline void each(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<W> <= n; i += kLanes<W>) body(i, int64_t(kLanes<W>));
  if (i < n) body(i, n - i);
}

template <typename W>
struct alignas(Vector<W>) Lanes {
  W at[kLanes<W>];
  explicit Lanes(const Vector<W>& x) { std::memcpy(at, &x, sizeof(x)); }
  operator Vector<W>() const {
    Vector<W> x;
    std::memcpy(&x, at, sizeof(x));
    return x;
  }
};

// f of each lane's numbers. Comparisons stand in such loops, which become vectors of any width: those
// of whole vectors gcc makes number by number where registers are shorter.
template <typename W, typename F, typename... V>
inline Vector<W> by_lane(const F& f, const V&... x) {
  const auto of = [&](const auto&... lanes) {
    Lanes<W> result{Vector<W>{}};
#pragma omp simd
    for (int i = 0; i < kLanes<W>; ++i) result.at[i] = f(lanes.at[i]...);
    return Vector<W>(result);
  };
  return of(Lanes<W>(x)...);
}

// The first ``count`` numbers, and ``other`` beyond.
template <typename W>
inline Vector<W> keep(Vector<W> x, int64_t count, W other = 0) {
  if (count == kLanes<W>) return x;
  Lanes<W> lanes(x);
#pragma omp simd
  for (int i = 0; i < kLanes<W>; ++i) lanes.at[i] = i < count ? lanes.at[i] : other;
  return lanes;
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
  return by_lane<W>([](W x, W y) { return x > y ? x : y; }, a, b);
}

// A vector that a loop carries along, such as a sum. gcc keeps what is wider than a register in
// memory, so there it has parts; the numbers are the same.
template <typename W, int kParts>
struct Carried {
  VectorN<W, kLanes<W> / kParts> parts[kParts] = {};

  Carried& operator=(const Vector<W>& x) {
    std::memcpy(parts, &x, sizeof(x));
    return *this;
  }
  void operator+=(const Vector<W>& x) {
    Carried other;
    other = x;
    for (int i = 0; i < kParts; ++i) parts[i] += other.parts[i];
  }
  operator Vector<W>() const {
    Vector<W> x;
    std::memcpy(&x, parts, sizeof(x));
    return x;
  }
};

// body(parts): of how many registers a vector is made.
template <typename Body>
inline auto with_parts(const Body& body) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return body(std::integral_constant<int, 1>());
  return body(std::integral_constant<int, 2>());
#else
  return body(std::integral_constant<int, 4>());
#endif
}

// In halves, so in the same order whatever the registers.
template <int N>
inline double sum_of(const VectorN<double, N>& x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    VectorN<double, N / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return sum_of<N / 2>(halves[0] + halves[1]);
  }
}
template <typename W>
inline double sum(Vector<W> x) {
  return sum_of<kLanes<W>>(__builtin_convertvector(x, VectorN<double, kLanes<W>>));
}

template <typename W, int N>
inline W largest_of(const VectorN<W, N>& x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    VectorN<W, N / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return largest_of<W, N / 2>(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}
template <typename W>
inline W largest(Vector<W> x) {
  return largest_of<W, kLanes<W>>(x);
}

// Σ c(k)·x^k; c is a type, so that the compiler knows each number before it makes vectors.
template <typename W, typename Series, int k = 0>
inline Vector<W> series(Vector<W> x) {
  if constexpr (k == Series::kTerms - 1) {
    return splat(Series::template at<W>(k));
  } else {
    return series<W, Series, k + 1>(x) * x + Series::template at<W>(k);
  }
}

// 1/k!
template <int terms>
struct InverseFactorials {
  static constexpr int kTerms = terms;
  template <typename W>
  static constexpr W at(int k) {
    W factorial = 1;
    for (int i = 2; i <= k; ++i) factorial *= W(i);
    return 1 / factorial;
  }
};

// 2/(2k + 1)
template <int terms>
struct InverseOdd {
  static constexpr int kTerms = terms;
  template <typename W>
  static constexpr W at(int k) {
    return W(2) / W(2 * k + 1);
  }
};

// e^x to about one rounding, of numbers up to 0.
template <typename W>
inline Vector<W> exp(Vector<W> x) {
  using F = FloatFormat<W>;
  // The exponent goes up, above those of numbers that aren't normal, and the result down again.
  constexpr int kUp = 64;
  // In sums with 1.5·2^mantissa the last bits hold the nearest integer, here that and the bias.
  constexpr W kRound = W(3ll << (F::kMantissa - 1)) + F::kBias + kUp;
  x = by_lane<W>([](W at) { return at < F::kLeastExp ? F::kLeastExp : at; }, x);
  const Vector<W> shifted = x * W(1.44269504088896340736) + kRound, turns = shifted - kRound;
  const Vector<W> r = (x - turns * F::kLn2High) - turns * F::kLn2Low;
  const Vector<W> power = (Vector<W>)((Unsigned<W>)shifted << F::kMantissa);
  return series<W, InverseFactorials<F::kExpTerms>>(r) * power * W(0x1p-64);
}

// log(2/(1 + x)) to less than three roundings of itself, of numbers from 0 to 1.
template <typename W>
inline Vector<W> log_of_mean(Vector<W> x) {
  const Vector<W> t = (W(1) - x) / (x + W(3));
  return t * series<W, InverseOdd<FloatFormat<W>::kAtanhTerms>>(t * t);
}

}  // namespace fastkd
