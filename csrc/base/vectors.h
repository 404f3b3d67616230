// Vectors of kBytes, for one kind of processor: loads and stores, sums, exp and log. Included by
// each_processor.h.

template <typename W>
constexpr int kLanes = kBytes / int(sizeof(W));
template <typename W>
using Vector = VectorN<W, kLanes<W>>;

template <typename W>
using Bits = VectorN<typename FloatFormat<W>::Bits, kLanes<W>>;

template <typename W>
using Unsigned = VectorN<typename FloatFormat<W>::Unsigned, kLanes<W>>;

template <typename W>
inline Vector<W> splat(W x) {
  return x - Vector<W>{};
}

// Calls body(start, count) along a row of n numbers: for whole vectors, and for the rest. The count
// of whole vectors is a constant, so their code has no branches on it.
template <typename W, typename Body>
inline void each(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<W> <= n; i += kLanes<W>) body(i, int64_t(kLanes<W>));
  if (i < n) body(i, n - i);
}

// The first ``count`` numbers of x, and ``other`` in the lanes behind them.
template <typename W>
inline Vector<W> keep(Vector<W> x, int64_t count, W other = 0) {
  if (count == kLanes<W>) return x;
  Bits<W> lane;
  for (int i = 0; i < kLanes<W>; ++i) lane[i] = i;
  // All bits of the kept lanes, without a comparison: gcc 13 can't compile one here.
  const Bits<W> kept = (lane - typename FloatFormat<W>::Bits(count)) >> (8 * sizeof(W) - 1);
  return (Vector<W>)(((Bits<W>)x & kept) | ((Bits<W>)splat(other) & ~kept));
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
  // Two branches: a memcpy of variable size alone would be a call.
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

// Adds halves of the vector: the order depends on N only.
template <typename W, int N>
inline W sum_of(const VectorN<W, N>& x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    VectorN<W, N / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return sum_of<W, N / 2>(halves[0] + halves[1]);
  }
}
template <typename W>
inline double sum(Vector<W> x) {
  return sum_of<double, kLanes<W>>(__builtin_convertvector(x, VectorN<double, kLanes<W>>));
}

// Number of float64 vectors that hold a vector's numbers.
template <typename W>
constexpr int kWide = int(sizeof(double) / sizeof(W));

template <typename W>
inline Vector<double> widened(const Vector<W>& x, int part) {
  VectorN<W, kLanes<double>> parts[kWide<W>];
  std::memcpy(parts, &x, sizeof(x));
  return __builtin_convertvector(parts[part], Vector<double>);
}

template <typename W>
inline double sum_of_parts(const Vector<double>* totals) {
  Vector<double> total = totals[0];
  for (int part = 1; part < kWide<W>; ++part) total += totals[part];
  return sum<double>(total);
}

// kSums sums along a row of n numbers: body(start, count, vectors) adds to kSums vectors. Few sums
// have several vectors each, used in turn, to hide the latency of additions. After kLongest numbers
// the vectors are added to float64 totals.
template <typename W, int kSums, typename Body>
inline std::array<double, kSums> sums_of(int64_t n, const Body& body) {
  constexpr int64_t kLongest = 1024;
  constexpr int kApart = kSums == 1 ? 4 : kSums == 2 ? 2 : 1;
  std::array<double, kSums> found{};
  for (int64_t start = 0; start < n; start += kLongest) {
    Vector<W> vectors[kApart][kSums]{};
    const int64_t end = std::min(n, start + kLongest);
    int64_t i = start;
    for (; i + kApart * kLanes<W> <= end; i += kApart * kLanes<W>) {
#pragma GCC unroll 4
      for (int j = 0; j < kApart; ++j) body(i + j * kLanes<W>, int64_t(kLanes<W>), vectors[j]);
    }
    each<W>(end - i, [&](int64_t k, int64_t count) { body(i + k, count, vectors[0]); });
    for (int k = 0; k < kSums; ++k) {
      for (int j = 1; j < kApart; ++j) vectors[0][k] += vectors[j][k];
      found[k] += sum<W>(vectors[0][k]);
    }
  }
  return found;
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

// a·b + c, rounded once whatever -ffp-contract is. The compiler turns the loop into one
// instruction.
template <typename W>
inline Vector<W> fused(Vector<W> a, Vector<W> b, Vector<W> c) {
  Vector<W> result;
  for (int i = 0; i < kLanes<W>; ++i) {
    if constexpr (sizeof(W) == sizeof(float)) {
      result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    } else {
      result[i] = __builtin_fma(a[i], b[i], c[i]);
    }
  }
  return result;
}

// Σ c(k)·x^k. The coefficients are a type's constants, so that the compiler evaluates them.
template <typename W, typename Series, int k = 0>
inline Vector<W> series(Vector<W> x) {
  if constexpr (k == Series::kTerms - 1) {
    return splat(Series::template at<W>(k));
  } else {
    return series<W, Series, k + 1>(x) * x + Series::template at<W>(k);
  }
}

// Coefficients of e^x, or of 2^(x/parts).
template <int terms, int parts>
struct ExpSeries {
  static constexpr int kTerms = terms;
  template <typename W>
  static constexpr W at(int k) {
    long double factor = 1;
    for (int i = 1; i <= k; ++i) factor *= (parts ? kLn2 / parts : 1) / i;
    return W(factor);
  }
};

// Coefficients of 2·atanh(√x)/√x for x from 0 to 1/9. For float a minimax polynomial, relative
// error 4e-9.
template <typename Of>
struct AtanhSeries {
  static constexpr bool kFitted = std::is_same_v<Of, float>;
  static constexpr int kTerms = kFitted ? 5 : 16;
  template <typename W>
  static constexpr W at(int k) {
    constexpr double fitted[] = {2, 0.6666631468, 0.4002491027, 0.2796060289, 0.2817833425};
    return W(kFitted ? fitted[k] : 2.0 / (2 * k + 1));
  }
};

// Bits of 2^(i/16), minus i << 19, which raised_exp adds with the exponent. A vector of 64 bytes
// looks them up by one instruction, __builtin_shuffle, which clang lacks.
constexpr uint32_t kRoots[] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d,
};
#if defined(__clang__)
constexpr bool kLooksUp = false;
#else
constexpr bool kLooksUp = kBytes == sizeof(kRoots);
#endif

// e^(slope·x)·2^kUp for x up to 0; 0 in lanes ``below`` the least exponent. The error is about one
// rounding, plus the rounding error of slope/log(2) unless the slope is 1: at most half a rounding
// of x.
template <typename W, bool is_one = false>
inline Vector<W> raised_exp(Vector<W> x, Exponents<W> by, Bits<W>& below) {
  using F = FloatFormat<W>;
  constexpr bool looks_up = kLooksUp && std::is_same_v<W, float>;
  // e^(slope·x) = 2^(turns/kParts)·e^r. The last bits of turns index kRoots.
  constexpr int kParts = looks_up ? 16 : 1;
  // Adding 1.5·2^mantissa rounds to an integer in the last bits; the bias and kUp are added with
  // it.
  constexpr W kRound = W(3ll << (F::kMantissa - 1)) + kParts * F::kUp + (looks_up ? 0 : F::kBias);
  below = x < by.least;
  Vector<W> shifted, r;
  if constexpr (kFuses) {
    const W turn = by.turn * kParts;
    shifted = x * turn + kRound;
    r = fused<W>(x, splat(turn), kRound - shifted);  // in turns; a rounded x·turn would lose it
    if constexpr (is_one) r += x * W(kParts * (1 / kLn2 - W(1 / kLn2)));
  } else {
    x *= by.slope;
    shifted = x * W(kParts / kLn2) + kRound;
    const Vector<W> turns = shifted - kRound;
    r = (x - turns * (F::kLn2High / kParts)) - turns * (F::kLn2Low / kParts);
  }
  using Series = ExpSeries<looks_up ? 4 : F::kExpTerms, kFuses ? kParts : 0>;
  const Unsigned<W> bits = (Unsigned<W>)shifted;
  Vector<W> result;
  if constexpr (looks_up) {
    Unsigned<W> roots;
    std::memcpy(&roots, kRoots, sizeof(roots));
    const Unsigned<W> root = __builtin_shuffle(roots, bits);
    const Vector<W> power = (Vector<W>)(root + (bits << (F::kMantissa - 4)));
    result = power + power * (series<W, Series, 1>(r) * r);
  } else {
    result = series<W, Series>(r) * (Vector<W>)(bits << F::kMantissa);
  }
  return below ? Vector<W>{} : result;
}

// e^x for x up to 0, with an error of about one rounding.
template <typename W>
inline Vector<W> exp(Vector<W> x) {
  Bits<W> below;
  return raised_exp<W, true>(x, Exponents<W>(1), below) * FloatFormat<W>::kDown;
}

// log(2x/(x + y)) for x > 0 and y from 0 to x, with an error below three roundings.
template <typename W>
inline Vector<W> log_over_mean(Vector<W> x, Vector<W> y) {
  const Vector<W> t = (x - y) / (y + x * W(3));
  return t * series<W, AtanhSeries<W>>(t * t);
}

// log(x) for x ≥ 0 and finite, with an error of about two roundings; −inf for 0. NaN stays NaN.
template <typename W>
inline Vector<W> log_of(Vector<W> x) {
  using F = FloatFormat<W>;
  constexpr typename F::Bits kMantissa = (typename F::Bits(1) << F::kMantissa) - 1;
  // The exponent is chosen so that the mantissa is near 1: from ¾ to 1½.
  constexpr typename F::Bits kHalf = typename F::Bits(1) << (F::kMantissa - 1);
  const Bits<W> bits = (Bits<W>)x, up = (bits & kHalf);
  const Bits<W> exponent = (bits >> F::kMantissa) - F::kBias + (up >> (F::kMantissa - 1));
  const Bits<W> one = (Bits<W>{} + F::kBias - (up >> (F::kMantissa - 1))) << F::kMantissa;
  const Vector<W> m = (Vector<W>)((bits & kMantissa) | one);
  const Vector<W> t = (m - W(1)) / (m + W(1));
  const Vector<W> turns = __builtin_convertvector(exponent, Vector<W>);
  const Vector<W> log = turns * F::kLn2High + (t * series<W, AtanhSeries<W>>(t * t) + turns * F::kLn2Low);
  constexpr W kInfinite = std::numeric_limits<W>::infinity();
  return x > 0 ? log : x == 0 ? splat(-kInfinite) : x;
}
