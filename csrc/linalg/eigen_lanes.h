// Eigenvalues and eigenvectors of one symmetric matrix by several lanes: the threads of a CUDA
// block or warp, or one lane on a CPU. Householder reflections to tridiagonal form, then implicit QL
// with Wilkinson shifts.
//
// A block: for reflections and their product each warp has rows, and its lanes have the row's
// elements. Lane 0 computes the rotations of the next sweep while the other lanes apply those of
// the last sweep, each to columns of its own. Two barriers for a reflection, one for a sweep. A
// warp, for small matrices: each lane has columns of its own throughout and computes every rotation
// itself. Only warp barriers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#ifdef __CUDACC__
#define FASTKD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTKD_HOST_DEVICE inline
#endif

namespace fastkd {

// The single lane of a CPU thread. Loops run along rows, so that they vectorise.
struct OneLane {
  static constexpr int kWarp = 1, index = 0, count = 1;
  static constexpr bool kOneWarp = true;

  FASTKD_HOST_DEVICE void sync() const {}
  double warp_sum(double x) const { return x; }
  double warp_max(double x) const { return x; }
  FASTKD_HOST_DEVICE int first(bool mine) const { return mine ? 0 : kWarp; }

  template <typename Body>
  void each(int n, const Body& body) const {
#pragma omp simd
    for (int j = 0; j < n; ++j) body(j);
  }
};

constexpr int kMostWarps = 32;
constexpr int kMostSweeps = 60;  // for each eigenvalue, in all
// Rows with smaller squares, beside the matrix's 1, are zero: 1/square must stay finite.
constexpr double kLeastSquare = 1e-200;

// Rotations of rows end − 1 to low, each with the next row. low < 0: kConverged or kFailed.
struct Sweep {
  int low, end;
};

constexpr int kConverged = -1, kFailed = -2;

// Memory of one matrix, in two parts: the matrices may be too large for shared memory.
struct EigenScratch {
  int64_t n;
  double* a;           // (n, n): the matrix, then the reflectors, then the rotations of two sweeps
  double* rows;        // (n, n): row k is the eigenvector of diagonal[k]
  double* diagonal;    // (n)
  double* off;         // (n): off[i] couples i and i + 1
  double* reflectors;  // (2, n): the last and the next
  double* products;    // (2, n): the matrix times each
  double* partial;     // (kMostWarps)
  Sweep* sweeps;       // (2)

  static FASTKD_HOST_DEVICE int64_t matrix(int64_t n) { return n < 4 ? 4 * n : n * n; }

  static FASTKD_HOST_DEVICE size_t matrices_size(int64_t n) {
    return size_t(2 * matrix(n)) * sizeof(double);
  }

  static FASTKD_HOST_DEVICE size_t vectors_size(int64_t n) {
    return size_t(6 * n + kMostWarps) * sizeof(double) + 2 * sizeof(Sweep);
  }

  FASTKD_HOST_DEVICE EigenScratch(int64_t n, void* matrices, void* vectors) : n(n) {
    a = static_cast<double*>(matrices);
    rows = a + matrix(n);
    diagonal = static_cast<double*>(vectors);
    off = diagonal + n;
    reflectors = off + n;
    products = reflectors + 2 * n;
    partial = products + 2 * n;
    sweeps = reinterpret_cast<Sweep*>(partial + kMostWarps);
  }

  FASTKD_HOST_DEVICE double* cosines(int buffer) const { return a + 2 * buffer * n; }
  FASTKD_HOST_DEVICE double* sines(int buffer) const { return a + (2 * buffer + 1) * n; }
};

// The larger one; NaN if either is NaN.
FASTKD_HOST_DEVICE double larger(double x, double y) { return x > y || x != x ? x : y; }

// a ← (A + Aᵀ)/2 divided by a power of 2, so that squares neither overflow nor vanish. Returns the
// power: the largest element becomes 1 to 2. Matrices below the least normal number are zero.
// Returns NaN or inf if the matrix has one.
template <typename Lanes>
FASTKD_HOST_DEVICE double load(const double* in, const EigenScratch& s, const Lanes& lanes) {
  const int64_t n = s.n;
  const int lane = lanes.index % Lanes::kWarp;
  double largest = 0;
  for (int64_t i = lanes.index / Lanes::kWarp; i < n; i += lanes.count / Lanes::kWarp) {
    for (int64_t j = lane; j < n; j += Lanes::kWarp) {
      const double x = in[i * n + j] / 2 + in[j * n + i] / 2;
      largest = larger(fabs(x), largest);
      s.a[i * n + j] = x;
    }
  }
  largest = lanes.warp_max(largest);
  if (lane == 0) s.partial[lanes.index / Lanes::kWarp] = largest;
  lanes.sync();
  for (int i = 0; i < lanes.count / Lanes::kWarp; ++i) largest = larger(s.partial[i], largest);
  const bool finite = largest <= std::numeric_limits<double>::max();
  const bool zero = largest < std::numeric_limits<double>::min();
  int exponent = 1;
  if (finite && !zero) frexp(largest, &exponent);
  const double scale = ldexp(1.0, exponent - 1);
  for (int64_t e = lanes.index; e < n * n; e += lanes.count) s.a[e] = zero ? 0 : s.a[e] / scale;
  for (int64_t i = lanes.index; i < n; i += lanes.count) {
    s.reflectors[i] = s.products[i] = 0;
  }
  lanes.sync();
  return finite ? scale : largest;
}

// u = x − alpha·e₁ reflects x to alpha·e₁. scale = 2/uᵀu, or 0 if x is a multiple of e₁ already.
struct Reflection {
  double alpha, scale = 0;

  FASTKD_HOST_DEVICE Reflection(double first, double squares_of_others) : alpha(first) {
    if (squares_of_others <= kLeastSquare) return;
    const double square = first * first + squares_of_others;
    alpha = copysign(sqrt(square), -first);
    scale = 1 / (square - alpha * first);
  }
};

// Reduces a to tridiagonal form. Row k of a, from column k + 1 on, becomes reflector k, and a[k, k]
// its 2/uᵀu.
//
// A reflection subtracts u·pᵀ + p·uᵀ from the trailing rows, with p = q − half·u and q the scaled
// product of the matrix and u. The subtraction and the next product share one pass over the matrix.
template <typename Lanes>
FASTKD_HOST_DEVICE void tridiagonalise(const EigenScratch& s, const Lanes& lanes) {
  const int64_t n = s.n;
  const int lane = lanes.index % Lanes::kWarp, warp = lanes.index / Lanes::kWarp;
  const int warps = lanes.count / Lanes::kWarp;
  double half = 0;
  int last = 0;
  for (int64_t k = 0; k + 1 < n; ++k) {
    const double *u = s.reflectors + last * n, *q = s.products + last * n;
    double* row = s.a + k * n;
    const double u_k = u[k], p_k = q[k] - half * u_k;
    const auto changed = [=](int64_t j) {
      return row[j] - (u_k * (q[j] - half * u[j]) + p_k * u[j]);
    };
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = k + 2 + lane; j < n; j += Lanes::kWarp) squares += changed(j) * changed(j);
    squares = lanes.warp_sum(squares);
    const double first = changed(k + 1);
    const auto [alpha, scale] = Reflection(first, squares);
    double* next = s.reflectors + (1 - last) * n;
    double* product = s.products + (1 - last) * n;
    for (int64_t j = k + 1 + lanes.index; j < n; j += lanes.count) {
      next[j] = changed(j) - (j == k + 1 ? alpha : 0.0);
    }
    if (lanes.index == 0) {
      s.diagonal[k] = changed(k);
      s.off[k] = alpha;
    }
    lanes.sync();
    for (int64_t i = k + 1 + warp; i < n; i += warps) {
      const double u_i = u[i], p_i = q[i] - half * u_i;
      double* other = s.a + i * n;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = k + 1 + lane; j < n; j += Lanes::kWarp) {
        const double x = other[j] - (u_i * (q[j] - half * u[j]) + p_i * u[j]);
        other[j] = x;
        sum += x * next[j];
      }
      sum = lanes.warp_sum(sum);
      if (lane == 0) product[i] = scale * sum;
    }
    for (int64_t j = k + 1 + lanes.index; j < n; j += lanes.count) row[j] = next[j];
    if (lanes.index == 0) row[k] = scale;
    lanes.sync();
    last = 1 - last;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = k + 1 + lane; j < n; j += Lanes::kWarp) sum += product[j] * next[j];
    half = scale * lanes.warp_sum(sum) / 2;
  }
  if (lanes.index == 0) {
    s.diagonal[n - 1] = s.a[n * n - 1];  // the last reflection has scale 0
    s.off[n - 1] = 0;
  }
}

// The first index from ``start`` on that belongs to ``lane``, of lanes with every ``step``th index
// each.
FASTKD_HOST_DEVICE int64_t own_from(int64_t start, int lane, int step) {
  return start + (lane - int(start % step) + step) % step;
}

// rows ← the product of all reflections. Each row has one warp and each element one lane: no
// barriers.
template <typename Lanes>
FASTKD_HOST_DEVICE void accumulate(const EigenScratch& s, const Lanes& lanes) {
  const int64_t n = s.n;
  const int lane = lanes.index % Lanes::kWarp, warp = lanes.index / Lanes::kWarp;
  const int warps = lanes.count / Lanes::kWarp;
  for (int64_t i = warp; i < n; i += warps) {
    for (int64_t j = lane; j < n; j += Lanes::kWarp) s.rows[i * n + j] = i == j;
  }
  for (int64_t k = n - 2; k >= 0; --k) {
    const double* u = s.a + k * n;
    const int64_t start = own_from(k + 1, lane, Lanes::kWarp);
    for (int64_t i = own_from(k + 1, warp, warps); i < n; i += warps) {
      double* row = s.rows + i * n;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = start; j < n; j += Lanes::kWarp) sum += row[j] * u[j];
      const double factor = u[k] * lanes.warp_sum(sum);
#pragma omp simd
      for (int64_t j = start; j < n; j += Lanes::kWarp) row[j] -= factor * u[j];
    }
  }
}

// `tridiagonalise` and `accumulate` by one warp, whose lanes have columns: columns of the symmetric
// matrix are read as rows.
template <typename Lanes>
FASTKD_HOST_DEVICE void reduce_by_columns(const EigenScratch& s, const Lanes& lanes) {
  const int n = int(s.n);
  double *u = s.reflectors, *p = s.products;
  lanes.each(n, [&](int j) {
    for (int i = 0; i < n; ++i) s.rows[i * n + j] = i == j;
  });
  for (int k = 0; k + 1 < n; ++k) {
    const double* row = s.a + k * n;
    double squares = 0;
    lanes.each(n, [&](int j) { squares += j > k + 1 ? row[j] * row[j] : 0; });
    const Reflection reflection(row[k + 1], lanes.warp_sum(squares));
    lanes.each(n, [&](int j) {
      u[j] = j > k + 1 ? row[j] : j == k + 1 ? row[j] - reflection.alpha : 0;
      if (j != k) return;
      s.diagonal[k] = row[k];
      s.off[k] = reflection.alpha;
    });
    lanes.sync();
    double along = 0;
    lanes.each(n, [&](int j) {
      double product = 0, turned = 0;
      for (int i = k + 1; i < n; ++i) {
        product += s.a[i * n + j] * u[i];
        turned += s.rows[i * n + j] * u[i];
      }
      p[j] = reflection.scale * product;
      along += p[j] * u[j];
      turned *= reflection.scale;
      for (int i = k + 1; i < n; ++i) s.rows[i * n + j] -= turned * u[i];
    });
    const double half = reflection.scale * lanes.warp_sum(along) / 2;
    lanes.each(n, [&](int j) { p[j] -= half * u[j]; });
    lanes.sync();
    lanes.each(n, [&](int j) {
      const double u_j = u[j], p_j = p[j];
      for (int i = k + 1; i < n; ++i) s.a[i * n + j] -= u[i] * p_j + p[i] * u_j;
    });
    lanes.sync();
  }
  if (lanes.index == 0) {
    s.diagonal[n - 1] = s.a[n * n - 1];
    s.off[n - 1] = 0;
  }
}

// 1/√x for x > 0.
FASTKD_HOST_DEVICE double inverse_root(double x) {
#ifdef __CUDA_ARCH__
  return rsqrt(x);
#else
  return 1 / std::sqrt(x);
#endif
}

// Implicit QL with Wilkinson shifts, one sweep at a time; by one lane, or by all lanes of a warp in
// step.
template <typename Lanes>
class Rotations {
 public:
  FASTKD_HOST_DEVICE Rotations(const EigenScratch& s, const Lanes& lanes)
      : lanes_(lanes), d_(s.diagonal), off_(s.off), n_(int(s.n)) {
    for (int i = 0; i < n_; ++i) {
      const double size = fabs(d_[i]) + fabs(off_[i]);
      magnitude_ = size > magnitude_ ? size : magnitude_;
    }
  }

  // Computes the next sweep: calls turn(i, cosine, sine) for each rotation, and updates diagonal
  // and off.
  template <typename Turn>
  FASTKD_HOST_DEVICE Sweep next(const Turn& turn) {
    for (; low_ < n_; ++low_) {
      const int end = uncoupled_from();
      if (end == low_) continue;
      if (count_++ == kMostSweeps * n_) return {kFailed, 0};
      double below = d_[end], value = d_[end - 1], coupling = off_[end - 1];
      double g = (d_[low_ + 1] - d_[low_]) / (2 * off_[low_]);
      g = below - d_[low_] + off_[low_] / (g + copysign(sqrt(g * g + 1), g));
      double sine = 1, cosine = 1, shift = 0;
      for (int i = end - 1;; --i) {
        const double f = sine * coupling, b = cosine * coupling;
        const double square = f * f + g * g;
        if (square == 0) return changed({i + 1, end}, below - shift, 0);
        // Read the next row before the barrier: behind it lane 0 writes.
        const int above = i > low_ ? i - 1 : i;
        const double next_value = d_[above];
        coupling = off_[above];
        lanes_.sync();
        const double inverse = inverse_root(square);
        cosine = g * inverse;
        sine = f * inverse;
        g = below - shift;
        const double t = (value - g) * sine + 2 * cosine * b;
        shift = sine * t;
        if (lanes_.index == 0) {
          off_[i + 1] = square * inverse;
          d_[i + 1] = g + shift;
        }
        g = cosine * t - b;
        turn(i, cosine, sine);
        if (i == low_) return changed({i, end}, value - shift, g);
        below = value;
        value = next_value;
      }
    }
    return {kConverged, 0};
  }

 private:
  // Stores the sweep's last row and coupling, and returns the sweep.
  FASTKD_HOST_DEVICE Sweep changed(Sweep sweep, double value, double coupling) {
    lanes_.sync();
    if (lanes_.index == 0) {
      d_[sweep.low] = value;
      off_[sweep.low] = coupling;
      off_[sweep.end] = 0;
    }
    lanes_.sync();
    return sweep;
  }

  // The first row from low on whose coupling to the next row is negligible: beside its neighbours,
  // or of rounding size beside the matrix.
  FASTKD_HOST_DEVICE int uncoupled_from() const {
    const double eps = std::numeric_limits<double>::epsilon(), least = magnitude_;
    for (int start = low_;; start += Lanes::kWarp) {
      const int i = start + lanes_.index;
      bool uncoupled = i + 1 >= n_;
      if (!uncoupled) {
        const double neighbours = fabs(d_[i]) + fabs(d_[i + 1]);
        uncoupled = fabs(off_[i]) <= eps * (neighbours > least ? neighbours : least);
      }
      const int found = lanes_.first(uncoupled);
      if (found < Lanes::kWarp) return start + found;
    }
  }

  const Lanes lanes_;
  double *const d_, *const off_;
  const int n_;
  double magnitude_ = 0;
  int low_ = 0, count_ = 0;
};

// For one warp or one lane: each rotation is applied to the eigenvectors at once.
template <typename Lanes>
FASTKD_HOST_DEVICE bool diagonalise_at_once(const EigenScratch& s, const Lanes& lanes) {
  const int n = int(s.n);
  const auto turn = [&](int i, double cosine, double sine) {
    double *upper = s.rows + int64_t(i) * n, *lower = upper + n;
    lanes.each(n, [=](int j) {
      const double x = upper[j], y = lower[j];
      lower[j] = sine * x + cosine * y;
      upper[j] = cosine * x - sine * y;
    });
  };
  lanes.sync();
  Rotations<Lanes> rotations(s, lanes);
  lanes.sync();
  Sweep sweep;
  do sweep = rotations.next(turn);
  while (sweep.low >= 0);
  lanes.sync();
  return sweep.low == kConverged;
}

// Applies one sweep to rows low to end of a lane's columns.
FASTKD_HOST_DEVICE void turn(const EigenScratch& s, Sweep sweep, int buffer, int first, int step) {
  const double *cosines = s.cosines(buffer), *sines = s.sines(buffer);
  for (int64_t j = first; j < s.n; j += step) {
    double* column = s.rows + j;
    double below = column[sweep.end * s.n];
    for (int64_t i = sweep.end - 1; i >= sweep.low; --i) {
      const double x = column[i * s.n];
      column[(i + 1) * s.n] = sines[i] * x + cosines[i] * below;
      below = cosines[i] * x - sines[i] * below;
    }
    column[sweep.low * s.n] = below;
  }
}

// For a block: lane 0 computes the rotations of the next sweep while other lanes apply the last
// sweep.
template <typename Lanes>
FASTKD_HOST_DEVICE bool diagonalise_ahead(const EigenScratch& s, const Lanes& lanes) {
  // The other lanes of the first warp stay idle: they would wait for lane 0.
  const int idle = lanes.count > Lanes::kWarp ? Lanes::kWarp : 0;
  lanes.sync();
  Rotations<OneLane> rotations(s, OneLane());
  lanes.sync();  // every lane has read diagonal and off before lane 0 changes them
  const auto find = [&](int buffer) {
    double *cosines = s.cosines(buffer), *sines = s.sines(buffer);
    s.sweeps[buffer] = rotations.next([=](int i, double cosine, double sine) {
      cosines[i] = cosine;
      sines[i] = sine;
    });
  };
  if (lanes.index == 0) find(0);
  lanes.sync();
  for (int now = 0; s.sweeps[now].low >= 0; now = 1 - now) {
    const Sweep sweep = s.sweeps[now];
    if (lanes.index == 0) find(1 - now);
    if (lanes.index >= idle) turn(s, sweep, now, lanes.index - idle, lanes.count - idle);
    lanes.sync();
    if (s.sweeps[1 - now].low == kFailed) return false;
  }
  return true;
}

// Solves ``in`` = rowsᵀ·diag(scale·diagonal)·rows, eigenvalues unordered. Returns scale; NaN if the
// matrix has a NaN or inf, or the iteration fails.
template <typename Lanes>
FASTKD_HOST_DEVICE double eigen(const double* in, const EigenScratch& s, const Lanes& lanes) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double scale = load(in, s, lanes);
  if (!(scale <= std::numeric_limits<double>::max())) return nan;  // the same in every lane
  if constexpr (Lanes::kOneWarp && Lanes::kWarp > 1) {
    reduce_by_columns(s, lanes);
  } else {
    tridiagonalise(s, lanes);
    accumulate(s, lanes);
  }
  if constexpr (Lanes::kOneWarp) {
    return diagonalise_at_once(s, lanes) ? scale : nan;
  } else {
    return diagonalise_ahead(s, lanes) ? scale : nan;
  }
}

// Index of value i in ascending order; equal values keep their order.
FASTKD_HOST_DEVICE int64_t place_of(const double* values, int64_t i, int64_t n) {
  int64_t place = 0;
  for (int64_t j = 0; j < n; ++j) {
    place += values[j] < values[i] || (values[j] == values[i] && j < i);
  }
  return place;
}

}  // namespace fastkd
