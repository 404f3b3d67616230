// Data path. Pieces of some bank rows stay in the first cache while all student rows of their label
// are compared with them, a few at a time, and the next rows are prefetched: the bank is read once.
// Distances are sums of squared differences with a known relative error. Rows as near as the k-th
// within that error are measured again in float64, which makes the choice exact. A student row and
// its nearest rows are then read once more, for the loss and the gradient.
#include "losses/knn/knn.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/products.h"

#define FASTKD_KERNELS "losses/knn/knn_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

// Features that are summed in float32; longer sums are float64.
constexpr int64_t kPiece = 1024;
// Bank rows of a tile, whose pieces stay in the first cache (more for half precision, since student
// rows are converted once for each tile), and student rows that are compared with them at a time.
constexpr int64_t kTile = 8, kTileOfHalves = 16, kStudents = 8;

struct Candidate {
  double distance;
  int64_t place;
  bool operator<(const Candidate& other) const {
    return distance != other.distance ? distance < other.distance : place < other.place;
  }
};

// Returns Σ ‖(s − t)·shrink‖² over some bank rows t, in float64; stores factor·Σ (s − t) unless
// ``dx`` is null.
template <typename W>
double compare_as(const Neighbours& of, int64_t row, const std::vector<int64_t>& places,
                  double shrink, double factor, const Rows& dx) {
  const int64_t K = int64_t(places.size());
  const int64_t room = is_of(of.teacher.type, W()) ? 0 : kPiece;
  W s_copy[kPiece];
  std::vector<W> t_copies(K * room);
  std::vector<const W*> t(K);
  double total = 0;
  for (int64_t start = 0; start < of.student.n; start += kPiece) {
    const int64_t n = std::min(kPiece, of.student.n - start);
    const W* s = of.student.read(row, start, n, s_copy);
    for (int64_t k = 0; k < K; ++k) {
      t[k] = of.teacher.read(places[k], start, n, t_copies.data() + k * room);
    }
    W* out = dx.write(row, start, s_copy);
    total += FASTKD_CALL(visit, s, t.data(), K, n, shrink, W(factor), out);
    dx.written(row, start, n, out);
  }
  return total;
}

double compare(const Neighbours& of, int64_t row, const std::vector<int64_t>& places,
               double shrink, double factor = 0, const Rows& dx = {}) {
  return of.student.type == Type::kDouble
             ? compare_as<double>(of, row, places, shrink, factor, dx)
             : compare_as<float>(of, row, places, shrink, factor, dx);
}

// The distance in float64, or the largest number if it overflows.
Candidate candidate(const Neighbours& of, int64_t row, int64_t place) {
  return {std::min(compare(of, row, {place}, 1), std::numeric_limits<double>::max()), place};
}

bool is_finite(const Rows& rows, int64_t row) {
  std::vector<double> copy(rows.n);
  const double* x = rows.read(row, 0, rows.n, copy.data());
  return std::all_of(x, x + rows.n, [](double value) { return std::isfinite(value); });
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

int64_t Neighbours::ranges() const { return (student.n + kRange - 1) / kRange; }

std::vector<Neighbours::Tile> Neighbours::tiles() {
  distances.reset(new double[ranges() * N * M]);
  const int64_t size = student.type < Type::kFloat ? kTileOfHalves : kTile;
  std::vector<Tile> found;
  for (int64_t range = 0; range < ranges(); ++range) {
    // The same part of each group in turn, since the groups' rows share memory pages.
    for (int64_t begin = 0; begin < M; begin += size) {
      for (size_t g = 0; g < groups.size(); ++g) {
        const int64_t end = std::min(int64_t(groups[g].bank.size()), begin + size);
        if (begin < end) found.push_back({int64_t(g), begin, end, range});
      }
    }
  }
  return found;
}

// A piece is summed in W, the pieces in float64.
template <typename W>
void Neighbours::measure_as(const Tile& tile) const {
  const LabelGroup& group = groups[tile.group];
  const int64_t count = tile.end - tile.begin, students = int64_t(group.students.size());
  const int64_t room = is_of(student.type, W()) ? 0 : kPiece;
  const std::unique_ptr<W[]> copies(new W[(kStudents + kTileOfHalves) * room]);
  const int64_t from = tile.range * kRange, to = std::min(student.n, from + kRange);
  double* const found = distances.get() + tile.range * N * M + tile.begin;
  for (int64_t start = from; start < to; start += kPiece) {
    const int64_t n = std::min(kPiece, to - start), next = start + kPiece;
    const W *bank[kTileOfHalves], *some[kStudents];
    for (int64_t j = 0; j < count; ++j) {
      W* copy = copies.get() + (kStudents + j) * room;
      bank[j] = teacher.read(group.bank[tile.begin + j], start, n, copy);
    }
    // Rows to prefetch: the next piece of these, or the next tile.
    std::vector<const char*> ahead;
    for (int64_t j = tile.begin; next < to && j < tile.end; ++j) {
      ahead.push_back(teacher.place(group.bank[j], next));
    }
    for (int64_t i = 0; next < to && i < students; ++i) {
      ahead.push_back(student.place(group.students[i], next));
    }
    const int64_t behind = std::min(tile.end + count, int64_t(group.bank.size()));
    for (int64_t j = tile.end; next >= to && j < behind; ++j) {
      ahead.push_back(teacher.place(group.bank[j], from));
    }
    for (int64_t i = 0; i < students; i += kStudents) {
      const int64_t rows = std::min(kStudents, students - i);
      for (int64_t k = 0; k < rows; ++k) {
        some[k] = student.read(group.students[i + k], start, n, copies.get() + k * room);
      }
      const int64_t skip = ahead.size() * i / students, end = ahead.size() * (i + rows) / students;
      W sums[kTileOfHalves * kStudents];
      compare_rows(bank, count, some, rows, n,
                   {ahead.data() + skip, end - skip, size_of(student.type)}, sums);
      for (int64_t k = 0; k < rows; ++k) {
        double* row = found + group.students[i + k] * M;
        for (int64_t j = 0; j < count; ++j) {
          row[j] = sums[j * rows + k] + (start == from ? 0 : row[j]);
        }
      }
    }
  }
}

void Neighbours::measure(const Tile& tile) const {
  student.type == Type::kDouble ? measure_as<double>(tile) : measure_as<float>(tile);
}

bool Neighbours::choose(int64_t row, int64_t k, std::vector<int64_t>& nearest) const {
  double* of = distances.get() + row * M;
  const std::vector<int64_t>& bank = groups[group_of[row]].bank;
  const int64_t count = int64_t(bank.size());
  for (int64_t range = 1; range < ranges(); ++range) {
    for (int64_t j = 0; j < count; ++j) of[j] += of[range * N * M + j];
  }
  std::vector<Candidate> found;
  if (!std::all_of(of, of + count, [](double distance) { return std::isfinite(distance); })) {
    // A square overflowed, or a feature is NaN or infinite.
    for (int64_t j = 0; j < count; ++j) {
      if (!std::isfinite(of[j]) && !(is_finite(student, row) && is_finite(teacher, bank[j]))) {
        return false;
      }
      found.push_back(candidate(*this, row, bank[j]));
    }
  } else {
    // A heap of the k smallest; its front is the largest.
    std::vector<double> smallest(k, std::numeric_limits<double>::max());
    for (int64_t j = 0; j < count; ++j) {
      if (!(of[j] < smallest.front())) continue;
      std::pop_heap(smallest.begin(), smallest.end());
      smallest.back() = of[j];
      std::push_heap(smallest.begin(), smallest.end());
    }
    // Relative error of a distance: one rounding for each square that a lane of a piece adds up
    // (vectors have at least 16 bytes), up to eight in a square and between lanes, and in float64
    // one for each piece. Two distances may differ by twice that; the factor 4 leaves a margin of
    // two.
    const bool wide = student.type == Type::kDouble;
    const double part = (wide ? (kPiece / 2 + 8) * 1.2e-16 : (kPiece / 4 + 8) * 6e-8) +
                        double(student.n / kPiece) * 1.2e-16;
    const double limit = smallest.front() * (1 + 4 * part) +
                         (wide ? 0 : 4 * double(student.n) * std::numeric_limits<float>::min());
    for (int64_t j = 0; j < count; ++j) {
      if (of[j] <= limit) found.push_back({of[j], bank[j]});
    }
    if (int64_t(found.size()) > k) {
      for (Candidate& one : found) one = candidate(*this, row, one.place);
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
  // A power of two, at most 1/√D: the sum of squares overflows only if the loss does.
  const double shrink = std::exp2(-std::ceil(std::log2(double(student.n)) / 2));
  const double share = weight / double(student.n);
  const double total = compare(*this, row, nearest, shrink, 2 * share, dx);
  return total / (shrink * shrink) * share;
}

}  // namespace fastkd
