// Vectors of one kind of processor, of kBytes: parts of rows, exp and log, sums. Included by
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

// body(start, count) along a row of n: whole vectors, and a rest of fewer. In the loop the count is
// a constant, so nothing there asks for it.
template <typename W, typename Body>
inline void each(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<W> <= n; i += kLanes<W>) body(i, int64_t(kLanes<W>));
  if (i < n) body(i, n - i);
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

// A vector's numbers in float64 are so many vectors.
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

// The sums of kSums vectors, to which body(start, count, vectors) adds along a row of n: to several
// of each in turn where they are few, since each waits for its last sum. After so many numbers they
// go on in float64, so no sum of W is longer.
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

// 2^(i/16), of which one instruction looks up a vector's; other compilers lack its name.
constexpr float kRoots[] = {1.f,         1.04427378f, 1.09050773f, 1.13878863f,
                            1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
                            1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f,
                            1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
#if defined(__clang__)
constexpr bool kLooksUp = false;
#else
constexpr bool kLooksUp = kBytes == sizeof(kRoots);
#endif

// e^x·2^kUp to about one rounding, of numbers up to 0; 0 where e^x is.
template <typename W>
inline Vector<W> raised_exp(Vector<W> x) {
  using F = FloatFormat<W>;
  constexpr bool looks_up = kLooksUp && std::is_same_v<W, float>;
  // e^x = 2^(turns/kSteps)·e^r. Looked up is what the last bits of turns stand for.
  constexpr int kSteps = looks_up ? 16 : 1;
  // In sums with 1.5·2^mantissa the last bits hold the nearest integer, here that and what is added.
  constexpr W kRound = W(3ll << (F::kMantissa - 1)) + kSteps * F::kUp + (looks_up ? 0 : F::kBias);
  const Vector<W> shifted = x * W(kSteps * 1.44269504088896340736) + kRound;
  const Vector<W> turns = shifted - kRound;
  const Vector<W> r = (x - turns * (F::kLn2High / kSteps)) - turns * (F::kLn2Low / kSteps);
  const Unsigned<W> bits = (Unsigned<W>)shifted;
  Vector<W> result;
  if constexpr (looks_up) {
    Vector<W> roots;
    std::memcpy(&roots, kRoots, sizeof(roots));
    const Unsigned<W> root = (Unsigned<W>)__builtin_shuffle(roots, (Bits<W>)bits);
    const Vector<W> power = (Vector<W>)(root + ((bits & ~15u) << (F::kMantissa - 4)));
    result = power + power * (((r * W(1.0 / 6) + W(0.5)) * r + W(1)) * r);
  } else {
    const Vector<W> power = (Vector<W>)(bits << F::kMantissa);
    result = series<W, InverseFactorials<F::kExpTerms>>(r) * power;
  }
  return x < F::kLeastExp ? Vector<W>{} : result;
}

// e^x likewise.
template <typename W>
inline Vector<W> exp(Vector<W> x) {
  return raised_exp<W>(x) * FloatFormat<W>::kDown;
}

// log(2x/(x + y)) to less than three roundings of itself, of x > 0 and y from 0 to x.
template <typename W>
inline Vector<W> log_over_mean(Vector<W> x, Vector<W> y) {
  const Vector<W> t = (x - y) / (y + x * W(3));
  return t * series<W, InverseOdd<FloatFormat<W>::kAtanhTerms>>(t * t);
}
