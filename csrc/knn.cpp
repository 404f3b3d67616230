// Data path. A bank row stays in the nearest cache while every student row of its label is compared
// with it, so the bank is read once. Distances are sums of squared differences, right to a known
// part of themselves; rows as near as the k-th within that are measured again in float64, which
// makes the choice exact. Backward: the rows chosen are read once more.
#include "knn.h"

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 2048;

template <typename W>
inline double distance(const W* a, const W* b, int64_t n) {
  Vector<W> total{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> d = load(a + i, count) - load(b + i, count);
    total += d * d;
  });
  return sum<W>(total);
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

FASTKD_CLONES double distance_of(const float* a, const float* b, int64_t n) {
  return distance(a, b, n);
}
FASTKD_CLONES double distance_of(const double* a, const double* b, int64_t n) {
  return distance(a, b, n);
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

// Blocks of rows are summed in float64, so no sum is longer than a block.
template <typename W>
void measure_row(const Neighbours& of, int64_t j, const std::vector<int64_t>& rows) {
  const int64_t D = of.student.n;
  for (const int64_t i : rows) of.distances[i * of.M + j] = 0;
  W bank[kBlock], copy[kBlock];
  for (int64_t start = 0; start < D; start += kBlock) {
    const int64_t count = std::min(kBlock, D - start);
    const W* t = of.teacher.read(j, start, count, bank);
    for (const int64_t i : rows) {
      const W* s = of.student.read(i, start, count, copy);
      of.distances[i * of.M + j] += distance_of(s, t, count);
    }
  }
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
  explicit Exact(const Neighbours& of) : of_(of), s_(of.student.n), t_(of.student.n) {}

  // ‖(s − t)·shrink‖²
  double operator()(int64_t i, int64_t j, double shrink) {
    const double* s = of_.student.read(i, 0, of_.student.n, s_.data());
    const double* t = of_.teacher.read(j, 0, of_.student.n, t_.data());
    double total = 0;
    for (int64_t d = 0; d < of_.student.n; ++d) {
      const double difference = (s[d] - t[d]) * shrink;
      total += difference * difference;
    }
    return total;
  }

  // The largest number stands for what overflows.
  Candidate candidate(int64_t i, int64_t j) {
    return {std::min((*this)(i, j, 1), std::numeric_limits<double>::max()), j};
  }

  bool is_finite(const Rows& rows, int64_t row) {
    const double* x = rows.read(row, 0, rows.n, s_.data());
    return std::all_of(x, x + rows.n, [](double value) { return std::isfinite(value); });
  }

 private:
  const Neighbours& of_;
  std::vector<double> s_, t_;
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

void Neighbours::measure_one(int64_t bank_row, const std::vector<int64_t>& rows) const {
  if (student.type == Type::kDouble) {
    measure_row<double>(*this, bank_row, rows);
  } else {
    measure_row<float>(*this, bank_row, rows);
  }
}

double Neighbours::choose(int64_t row, int64_t k, int64_t* nearest) const {
  std::fill(nearest, nearest + k, -1);
  Exact exact(*this);
  std::vector<Candidate> found;
  bool overflows = false;
  for (int64_t j = 0; j < M; ++j) {
    const double d = distances[row * M + j];
    if (d == kNone) continue;
    overflows = overflows || !std::isfinite(d);
    found.push_back({d, j});
  }
  if (found.empty()) return 0;
  if (overflows) {  // of a square, or of a number that is none
    for (const Candidate& one : found) {
      if (std::isfinite(one.distance)) continue;
      if (!exact.is_finite(student, row) || !exact.is_finite(teacher, one.place)) {
        return std::numeric_limits<double>::quiet_NaN();
      }
    }
    for (Candidate& one : found) one = exact.candidate(row, one.place);
  }
  if (int64_t(found.size()) > k) {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
    const bool wide = student.type == Type::kDouble || overflows;
    // Of a sum over a block's lanes, and the differences in it.
    const double part = (kBlock / 8 + 8) * (wide ? 1.2e-16 : 6e-8);
    const double limit = found[k - 1].distance * (1 + 4 * part) +
                         (wide ? 0 : 4 * double(student.n) * std::numeric_limits<float>::min());
    const auto near = [=](const Candidate& one) { return one.distance <= limit; };
    found.erase(std::partition(found.begin(), found.end(), near), found.end());
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
