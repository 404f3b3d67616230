// Data path. Blocks of some bank rows stay in the nearest caches while every student row is compared
// with those of its label, four at a time, so the bank is read once. Distances are sums of squared
// differences, right to a known part of themselves; rows as near as the k-th within that are
// measured again in float64, which makes the choice exact. A row and those chosen are then read once
// more, for the loss and the gradient.
#include "knn.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int kAtOnce = 4;
// Bank rows of which the nearest cache holds a block; more where student rows come from memory, or
// are widened, for each tile.
constexpr int64_t kTile = 8, kLargeTile = 16;

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

// As many numbers as a vector has in float64.
template <typename W>
inline Vector<double> load_wide(const W* p, int64_t count) {
  VectorN<W, kLanes<double>> x{};
  if (count == kLanes<double>) {
    std::memcpy(&x, p, sizeof(x));
  } else {
    std::memcpy(&x, p, count * sizeof(W));
  }
  return __builtin_convertvector(x, Vector<double>);
}

// ‖(a − b)·shrink‖² in float64
template <typename W>
inline double exactly(const W* a, const W* b, int64_t n, double shrink) {
  constexpr int64_t kHalf = kLanes<double>;
  Vector<double> low{}, high{};  // of the lanes of W
  each<W>(n, [&](int64_t i, int64_t count) {
    const auto add = [&](int64_t first, int64_t some, Vector<double>& total) {
      const Vector<double> d = (load_wide(a + first, some) - load_wide(b + first, some)) * shrink;
      total += d * d;
    };
    add(i, std::min(count, kHalf), low);
    if (count > kHalf) add(i + kHalf, count - kHalf, high);
  });
  return sum<double>(low + high);
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

// Rows that are read next. Each step fetches a few of their lines: for many a processor would wait.
struct Ahead {
  std::vector<const char*> rows{};
  int64_t lines = 0, share = 0, at = 0;  // of a row, of a step, fetched so far

  void share_among(int64_t steps, int64_t bytes) {
    lines = (bytes + 63) / 64;
    share = (int64_t(rows.size()) * lines + steps - 1) / steps;
  }

  void fetch() {
    const int64_t end = std::min(at + share, int64_t(rows.size()) * lines);
    while (at < end) {
      const int64_t line = at % lines, some = std::min(end - at, lines - line);
      fetch_all(rows[at / lines] + line * 64, some * 64);
      at += some;
    }
  }
};

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

// Σ ‖(s − t)·shrink‖² over the rows chosen, and factor·Σ (s − t).
template <typename W>
double compare(const Neighbours& of, int64_t row, const std::vector<int64_t>& nearest,
               double shrink, double factor, const Rows& dx) {
  W s_copy[kBlock], t_copy[kBlock], sums[kBlock];
  double total = 0;
  for (int64_t start = 0; start < of.student.n; start += kBlock) {
    const int64_t count = std::min(kBlock, of.student.n - start);
    const W* s = of.student.read(row, start, count, s_copy);
    std::fill(sums, sums + count, W(0));
    for (const int64_t place : nearest) {
      const W* t = of.teacher.read(place, start, count, t_copy);
      total += exact_of(s, t, count, shrink);
      if (dx.data) add_to(s, t, count, sums);
    }
    if (dx.data == nullptr) continue;
    W* out = dx.write(row, start, s_copy);
    scale_to(sums, count, W(factor), out);
    dx.written(row, start, count, out);
  }
  return total;
}

}  // namespace

void Neighbours::group(const int64_t* low, const int64_t* high) {
  const auto bounds = [=](int64_t i) { return std::make_pair(low[i], high[i]); };
  std::vector<int64_t> order(N);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return bounds(i) < bounds(j); });
  group_of.resize(N);
  for (int64_t place = 0; place < N; ++place) {
    const int64_t i = order[place];
    if (place == 0 || bounds(i) != bounds(order[place - 1])) groups.emplace_back();
    groups.back().students.push_back(i);
    group_of[i] = int64_t(groups.size()) - 1;
  }
}

std::vector<Neighbours::Tile> Neighbours::tiles() const {
  const bool large = student.n > kBlock || student.type < Type::kFloat;
  const int64_t size = large ? kLargeTile : kTile;
  std::vector<Tile> found;
  for (int64_t begin = 0; begin < M; begin += size) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const int64_t count = int64_t(groups[g].bank.size());
      if (begin < count) found.push_back({int64_t(g), begin, std::min(count, begin + size)});
    }
  }
  return found;
}

// Blocks of rows are summed in float64, so no sum is longer than a block.
template <typename W>
void Neighbours::measure_as(const Tile& tile) const {
  const LabelGroup& group = groups[tile.group];
  const int64_t count = tile.end - tile.begin, students = int64_t(group.students.size());
  // Long rows side by side, since apart they may share a place in the cache.
  const bool is_long = student.n > kBlock;
  std::vector<W> copies(is_long || !is_of(teacher.type, W()) ? count * kBlock : 0);
  W copy[kBlock];
  const W* bank[kLargeTile + kAtOnce];
  for (int64_t start = 0; start < student.n; start += kBlock) {
    const int64_t n = std::min(kBlock, student.n - start);
    for (int64_t j = 0; j < count; ++j) {
      W* to = copies.empty() ? nullptr : copies.data() + j * kBlock;
      bank[j] = teacher.read(group.bank[tile.begin + j], start, n, to);
      if (to && bank[j] != to) std::memcpy(to, bank[j], n * sizeof(W)), bank[j] = to;
    }
    std::fill_n(bank + count, kAtOnce, bank[count - 1]);  // what is left of four, again
    // The next block of these rows, or the next tile.
    Ahead ahead;
    const int64_t next = start + kBlock, rows = int64_t(group.bank.size());
    for (int64_t j = tile.begin; next < student.n && j < tile.end; ++j) {
      ahead.rows.push_back(teacher.place(group.bank[j], next));
    }
    for (int64_t i = 0; next < student.n && i < students; ++i) {
      ahead.rows.push_back(student.place(group.students[i], next));
    }
    for (int64_t j = tile.end; !is_long && j < std::min(rows, tile.end + count); ++j) {
      ahead.rows.push_back(teacher.place(group.bank[j], 0));
    }
    ahead.share_among(students * ((count + kAtOnce - 1) / kAtOnce), n * size_of(student.type));
    for (int64_t i = 0; i < students; ++i) {
      const int64_t row = group.students[i];
      const W* s = student.read(row, start, n, copy);
      double* to = distances.get() + row * M + tile.begin;
      for (int64_t j = 0; j < count; j += kAtOnce) {
        double parts[kAtOnce];
        ahead.fetch();
        distances_of(s, bank + j, n, parts);
        for (int64_t one = j; one < std::min(count, j + kAtOnce); ++one) {
          to[one] = parts[one - j] + (start == 0 ? 0 : to[one]);
        }
      }
    }
  }
}

void Neighbours::measure(const Tile& tile) const {
  student.type == Type::kDouble ? measure_as<double>(tile) : measure_as<float>(tile);
}

bool Neighbours::choose(int64_t row, int64_t k, std::vector<int64_t>& nearest) const {
  const double* of = distances.get() + row * M;
  const std::vector<int64_t>& bank = groups[group_of[row]].bank;
  const int64_t count = int64_t(bank.size());
  if (count == 0) return true;
  const Exact exact(*this);
  std::vector<Candidate> found;
  if (!std::all_of(of, of + count, [](double distance) { return std::isfinite(distance); })) {
    // Of a square, or of a number that is none.
    for (int64_t j = 0; j < count; ++j) {
      const bool is_number = std::isfinite(of[j]) ||
                             (exact.is_finite(student, row) && exact.is_finite(teacher, bank[j]));
      if (!is_number) return false;
      found.push_back(exact.candidate(row, bank[j]));
    }
  } else {
    // The k smallest, the largest in front.
    std::vector<double> smallest(k, std::numeric_limits<double>::max());
    for (int64_t j = 0; j < count; ++j) {
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
    for (int64_t j = 0; j < count; ++j) {
      if (of[j] <= limit) found.push_back({of[j], bank[j]});
    }
    if (int64_t(found.size()) > k) {
      for (Candidate& one : found) one = exact.candidate(row, one.place);
    }
  }
  std::sort(found.begin(), found.end());
  if (int64_t(found.size()) > k) found.resize(k);
  for (const Candidate& one : found) nearest.push_back(one.place);
  return true;
}

double Neighbours::row(int64_t row, int64_t k, double weight, const Rows& dx) const {
  std::vector<int64_t> nearest;
  if (!choose(row, k, nearest)) weight = std::numeric_limits<double>::quiet_NaN();
  // A power of two, at most 1/√D: the sum of squares can't overflow where the loss doesn't.
  const double shrink = std::exp2(-std::ceil(std::log2(double(student.n)) / 2));
  const double share = weight / double(student.n);
  const double total =
      student.type == Type::kDouble
          ? compare<double>(*this, row, nearest, shrink, 2 * share, dx)
          : compare<float>(*this, row, nearest, shrink, 2 * share, dx);
  return total / (shrink * shrink) * share;
}

}  // namespace fastkd
