// Data path. Blocks of some bank rows stay in the nearest caches while every student row is compared
// with those of its label, four at a time, so the bank is read once. Distances are sums of squared
// differences, right to a known part of themselves; rows as near as the k-th within that are
// measured again in float64, which makes the choice exact. Backward: the rows chosen are read once
// more.
#include "knn.h"

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int kAtOnce = 4;

// Of one row to four others, so that no sum waits for the last.
template <typename W>
inline void distances(const W* a, const W* const* b, int64_t n, double* out) {
  const W *first = b[0], *second = b[1], *third = b[2], *fourth = b[3];
  Vector<W> totals[kAtOnce]{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> x = load(a + i, count);
    const Vector<W> to_first = x - load(first + i, count), to_second = x - load(second + i, count);
    const Vector<W> to_third = x - load(third + i, count), to_fourth = x - load(fourth + i, count);
    totals[0] += to_first * to_first, totals[1] += to_second * to_second;
    totals[2] += to_third * to_third, totals[3] += to_fourth * to_fourth;
  });
  for (int k = 0; k < kAtOnce; ++k) out[k] = sum<W>(totals[k]);
}

// ‖(a − b)·shrink‖² in float64
template <typename W>
inline double exactly(const W* a, const W* b, int64_t n, double shrink) {
  using Wide = VectorN<double, kLanes<W>>;
  Wide total{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Wide d = (__builtin_convertvector(load(a + i, count), Wide) -
                    __builtin_convertvector(load(b + i, count), Wide)) * shrink;
    total += d * d;
  });
  return sum_of<kLanes<W>>(total);
}

// sums ← sums + a − b
template <typename W>
inline void add(const W* a, const W* b, int64_t n, W* sums) {
  each<W>(n, [&](int64_t i, int64_t count) {
    store<W>(sums + i, load(sums + i, count) + (load(a + i, count) - load(b + i, count)), count);
  });
}

template <typename W>
inline void scale(const W* sums, int64_t n, W factor, W* out) {
  each<W>(n, [&](int64_t i, int64_t count) {
    store<W>(out + i, load(sums + i, count) * factor, count);
  });
}

FASTKD_CLONES void distances_of(const float* a, const float* const* b, int64_t n, double* out) {
  distances(a, b, n, out);
}
FASTKD_CLONES void distances_of(const double* a, const double* const* b, int64_t n, double* out) {
  distances(a, b, n, out);
}
FASTKD_CLONES double exact_of(const float* a, const float* b, int64_t n, double shrink) {
  return exactly(a, b, n, shrink);
}
FASTKD_CLONES double exact_of(const double* a, const double* b, int64_t n, double shrink) {
  return exactly(a, b, n, shrink);
}
FASTKD_CLONES void add_to(const float* a, const float* b, int64_t n, float* sums) {
  add(a, b, n, sums);
}
FASTKD_CLONES void add_to(const double* a, const double* b, int64_t n, double* sums) {
  add(a, b, n, sums);
}
FASTKD_CLONES void scale_to(const float* sums, int64_t n, float factor, float* out) {
  scale(sums, n, factor, out);
}
FASTKD_CLONES void scale_to(const double* sums, int64_t n, double factor, double* out) {
  scale(sums, n, factor, out);
}

struct Candidate {
  double distance;
  int64_t place;
  bool operator<(const Candidate& other) const {
    return distance != other.distance ? distance < other.distance : place < other.place;
  }
};

// A pair in float64.
class Exact {
 public:
  explicit Exact(const Neighbours& of) : of_(of) {}

  // ‖(s − t)·shrink‖²
  double operator()(int64_t i, int64_t j, double shrink) const {
    return of_.student.type == Type::kDouble ? measure<double>(i, j, shrink)
                                             : measure<float>(i, j, shrink);
  }

  // The largest number stands for what overflows.
  Candidate candidate(int64_t i, int64_t j) const {
    return {std::min((*this)(i, j, 1), std::numeric_limits<double>::max()), j};
  }

  bool is_finite(const Rows& rows, int64_t row) const {
    std::vector<double> copy(rows.n);
    const double* x = rows.read(row, 0, rows.n, copy.data());
    return std::all_of(x, x + rows.n, [](double value) { return std::isfinite(value); });
  }

 private:
  template <typename W>
  double measure(int64_t i, int64_t j, double shrink) const {
    W copies[2][kBlock];
    double total = 0;
    for (int64_t start = 0; start < of_.student.n; start += kBlock) {
      const int64_t n = std::min(kBlock, of_.student.n - start);
      total += exact_of(of_.student.read(i, start, n, copies[0]),
                        of_.teacher.read(j, start, n, copies[1]), n, shrink);
    }
    return total;
  }

  const Neighbours& of_;
};

template <typename W>
void row_gradient(const Neighbours& of, int64_t row, int64_t k, const int64_t* nearest,
                  double factor, const Rows& out) {
  W s_copy[kBlock], t_copy[kBlock], sums[kBlock];
  for (int64_t start = 0; start < of.student.n; start += kBlock) {
    const int64_t count = std::min(kBlock, of.student.n - start);
    const W* s = of.student.read(row, start, count, s_copy);
    std::fill(sums, sums + count, W(0));
    for (int64_t j = 0; j < k && nearest[j] >= 0; ++j) {
      add_to(s, of.teacher.read(nearest[j], start, count, t_copy), count, sums);
    }
    W* dx = out.write(row, start, s_copy);
    scale_to(sums, count, W(factor), dx);
    out.written(row, start, count, dx);
  }
}

}  // namespace

// Blocks of rows are summed in float64, so no sum is longer than a block.
template <typename W>
void Neighbours::measure_as(int64_t tile, int64_t count,
                            const std::vector<uint16_t>& pairs) const {
  std::vector<W> copies(is_of(teacher.type, W()) ? 0 : kTile * kBlock);
  W copy[kBlock];
  const W* bank[kTile];
  for (int64_t start = 0; start < student.n; start += kBlock) {
    const int64_t n = std::min(kBlock, student.n - start);
    for (int64_t j = 0; j < count; ++j) {
      W* to = copies.empty() ? nullptr : copies.data() + j * kBlock;
      bank[j] = teacher.read(tile + j, start, n, to);
    }
    for (int64_t i = 0; i < N; ++i) {
      if (pairs[i] == 0) continue;
      const W* s = student.read(i, start, n, copy);
      const W* some[kTile + kAtOnce];
      int64_t places[kTile], found = 0;
      for (int64_t j = 0; j < count; ++j) {
        if (pairs[i] >> j & 1) some[found] = bank[j], places[found++] = j;
      }
      std::fill_n(some + found, kAtOnce, some[found - 1]);  // what is left of four, again
      for (int64_t k = 0; k < found; k += kAtOnce) {
        double parts[kAtOnce];
        distances_of(s, some + k, n, parts);
        for (int64_t one = k; one < std::min(found, k + kAtOnce); ++one) {
          distances[i * M + tile + places[one]] += parts[one - k];
        }
      }
    }
  }
}

void Neighbours::measure_tile(int64_t tile, int64_t count,
                              const std::vector<uint16_t>& pairs) const {
  if (student.type == Type::kDouble) {
    measure_as<double>(tile, count, pairs);
  } else {
    measure_as<float>(tile, count, pairs);
  }
}

double Neighbours::choose(int64_t row, int64_t k, int64_t* nearest) const {
  std::fill(nearest, nearest + k, -1);
  const double* of = distances + row * M;
  int64_t count = 0;
  bool overflows = false;
  for (int64_t j = 0; j < M; ++j) count += of[j] != kNone, overflows |= !std::isfinite(of[j]);
  if (count == 0) return 0;
  const Exact exact(*this);
  std::vector<Candidate> found;
  if (overflows) {  // of a square, or of a number that is none
    for (int64_t j = 0; j < M; ++j) {
      if (of[j] == kNone) continue;
      const bool is_number = std::isfinite(of[j]) ||
                             (exact.is_finite(student, row) && exact.is_finite(teacher, j));
      if (!is_number) return std::numeric_limits<double>::quiet_NaN();
      found.push_back(exact.candidate(row, j));
    }
  } else {
    // The k smallest, the largest in front. No branch asks for the label, which nobody can predict.
    std::vector<double> smallest(k, kNone);
    for (int64_t j = 0; j < M; ++j) {
      if (!(of[j] < smallest.front())) continue;
      std::pop_heap(smallest.begin(), smallest.end());
      smallest.back() = of[j];
      std::push_heap(smallest.begin(), smallest.end());
    }
    const bool wide = student.type == Type::kDouble;
    // Of a sum over a block's lanes, and the differences in it.
    const double part = (kBlock / 8 + 8) * (wide ? 1.2e-16 : 6e-8);
    const double limit = smallest.front() * (1 + 4 * part) +
                         (wide ? 0 : 4 * double(student.n) * std::numeric_limits<float>::min());
    for (int64_t j = 0; j < M; ++j) {
      if (of[j] <= limit && of[j] != kNone) found.push_back({of[j], j});
    }
    if (int64_t(found.size()) > k) {
      for (Candidate& one : found) one = exact.candidate(row, one.place);
    }
  }
  std::sort(found.begin(), found.end());
  if (int64_t(found.size()) > k) found.resize(k);
  // A power of two, at most 1/√D: the sum of squares can't overflow where the loss doesn't.
  const double shrink = std::exp2(-std::ceil(std::log2(double(student.n)) / 2));
  double total = 0;
  for (size_t j = 0; j < found.size(); ++j) {
    nearest[j] = found[j].place;
    total += exact(row, found[j].place, shrink);
  }
  return total / (double(student.n) * shrink * shrink);
}

void Neighbours::gradient(int64_t row, int64_t k, const int64_t* nearest, double factor,
                          const Rows& out) const {
  if (student.type == Type::kDouble) {
    row_gradient<double>(*this, row, k, nearest, factor, out);
  } else {
    row_gradient<float>(*this, row, k, nearest, factor, out);
  }
}

}  // namespace fastkd
