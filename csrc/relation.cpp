// Data path of a group, whose buffers stay in a thread's own cache: each row is read once from
// memory, made one of length 1 and added to the mean, which is then taken from all; their products;
// three reads of both (N, N), the last writing A; rows of A times the rows, and their gradient.
//
// Relations come from centred rows, see fastkd/relation.py. Rows are added up less the first of
// them, so rows that are equal have no difference from their mean.
#include "relation.h"

#include <algorithm>
#include <cmath>

#include "row_norms.h"
#include "vectors.h"

namespace fastkd {
namespace {

constexpr double kShortest = 1e-12;  // torch.nn.functional.normalize divides by max(‖x‖, this)
constexpr int64_t kRowsAtATime = 8, kRowsAhead = 4;  // added up, fetched

template <typename W>
using Wide = VectorN<double, kLanes<W>>;

template <typename W>
inline double wide_sum(Wide<W> x) {
  Vector<double> folded{};
  for (int i = 0; i < kLanes<W>; ++i) folded[i % kLanes<double>] += x[i];
  return sum<double>(folded);
}

template <typename W>
inline void times_each(const W* x, W factor, int64_t D, W* y) {
  each<W>(D, [&](int64_t i, int64_t count) { store<W>(y + i, load(x + i, count) * factor, count); });
}

// sums += Σ (row − first)
template <typename W>
inline void sum_of(const W* const* rows, int64_t n, const W* first, int64_t D, double* sums) {
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> base = load(first + i, count);
    Vector<W> total{};
    for (int64_t k = 0; k < n; ++k) total += load(rows[k] + i, count) - base;
    // Whole vectors, since behind the end there is room and the total is 0.
    Wide<W> part;
    std::memcpy(&part, sums + i, sizeof(part));
    part += __builtin_convertvector(total, Wide<W>);
    std::memcpy(sums + i, &part, sizeof(part));
  });
}

// first + sums/count, and its square
template <typename W>
inline double mean_of(const W* first, const double* sums, double share, int64_t room, W* mean) {
  Wide<W> total{};
  each<W>(room, [&](int64_t i, int64_t) {
    Wide<W> part;
    std::memcpy(&part, sums + i, sizeof(part));
    part = part * share + __builtin_convertvector(load(first + i), Wide<W>);
    const Vector<W> rounded = __builtin_convertvector(part, Vector<W>);
    store<W>(mean + i, rounded);
    part = __builtin_convertvector(rounded, Wide<W>);
    total += part * part;
  });
  return wide_sum<W>(total);
}

// row −= mean; what is left, times the mean
template <typename W>
inline double less_mean(W* row, const W* mean, int64_t D) {
  Vector<W> total{};
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> of_mean = load(mean + i, count), rest = load(row + i, count) - of_mean;
    store<W>(row + i, rest, count);
    total += rest * of_mean;
  });
  return sum<W>(total);
}

// dx (+)= factor·(h + y·along) of y = row + mean, where along takes out what of h lies along y
template <typename W>
inline void project(const W* h, const W* row, const W* mean, int64_t D, double factor, double along,
                    bool removes, bool add, W* dx) {
  if (removes) {
    Vector<W> total{};
    each<W>(D, [&](int64_t i, int64_t count) {
      total += load(h + i, count) * (load(row + i, count) + load(mean + i, count));
    });
    along -= sum<W>(total);
  }
  const W of_h = W(factor), of_y = W(along);
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> y = load(row + i, count) + load(mean + i, count);
    Vector<W> x = (load(h + i, count) + y * of_y) * of_h;
    if (add) x += load(dx + i, count);
    store<W>(dx + i, x, count);
  });
}

// A row of both relations, centred, from the products and the offsets u; 0 where there is none.
template <typename W>
struct RelationRow {
  const W *products, *u, *real;
  W own;

  Vector<W> at(int64_t j, int64_t count) const {
    return (load(products + j, count) + (load(u + j, count) + own)) * load(real + j, count);
  }
};

template <typename W>
inline double squares_of(const RelationRow<W>& row, int64_t N, double factor) {
  Wide<W> total{};
  each<W>(N, [&](int64_t j, int64_t count) {
    const Wide<W> r = __builtin_convertvector(row.at(j, count), Wide<W>) * factor;
    total += r * r;
  });
  return wide_sum<W>(total);
}

template <typename W>
inline double differences_of(const RelationRow<W>& s, const RelationRow<W>& t, W to_a, W to_b,
                             int64_t N) {
  Wide<W> total{};
  each<W>(N, [&](int64_t j, int64_t count) {
    const Vector<W> d = t.at(j, count) * to_b - s.at(j, count) * to_a;
    const Wide<W> wide = __builtin_convertvector(d, Wide<W>);
    total += wide * wide;
  });
  return wide_sum<W>(total);
}

// A = b − ρa, and its sum
template <typename W>
inline double derivatives_of(const RelationRow<W>& s, const RelationRow<W>& t, W to_a, W to_b,
                             W loss, int64_t N, W* A) {
  Vector<W> total{};
  each<W>(N, [&](int64_t j, int64_t count) {
    const Vector<W> a = s.at(j, count) * to_a, d = t.at(j, count) * to_b - a;
    const Vector<W> of = d + a * loss;
    total += of;
    store<W>(A + j, of, count);
  });
  return sum<W>(total);
}

FASTKD_CLONES void times(const float* x, float factor, int64_t D, float* y) {
  times_each(x, factor, D, y);
}
FASTKD_CLONES void times(const double* x, double factor, int64_t D, double* y) {
  times_each(x, factor, D, y);
}
FASTKD_CLONES void add_up(const float* const* rows, int64_t n, const float* first, int64_t D,
                          double* sums) {
  sum_of(rows, n, first, D, sums);
}
FASTKD_CLONES void add_up(const double* const* rows, int64_t n, const double* first, int64_t D,
                          double* sums) {
  sum_of(rows, n, first, D, sums);
}
FASTKD_CLONES double subtract(float* row, const float* mean, int64_t D) {
  return less_mean(row, mean, D);
}
FASTKD_CLONES double subtract(double* row, const double* mean, int64_t D) {
  return less_mean(row, mean, D);
}
FASTKD_CLONES double find_mean(const float* first, const double* sums, double share, int64_t room,
                               float* mean) {
  return mean_of(first, sums, share, room, mean);
}
FASTKD_CLONES double find_mean(const double* first, const double* sums, double share,
                               int64_t room, double* mean) {
  return mean_of(first, sums, share, room, mean);
}
FASTKD_CLONES void project_out(const float* h, const float* row, const float* mean, int64_t D,
                               double factor, double along, bool removes, bool add, float* dx) {
  project(h, row, mean, D, factor, along, removes, add, dx);
}
FASTKD_CLONES void project_out(const double* h, const double* row, const double* mean, int64_t D,
                               double factor, double along, bool removes, bool add, double* dx) {
  project(h, row, mean, D, factor, along, removes, add, dx);
}
FASTKD_CLONES double squares(const RelationRow<float>& row, int64_t N, double factor) {
  return squares_of(row, N, factor);
}
FASTKD_CLONES double squares(const RelationRow<double>& row, int64_t N, double factor) {
  return squares_of(row, N, factor);
}
FASTKD_CLONES double differences(const RelationRow<float>& s, const RelationRow<float>& t,
                                 float to_a, float to_b, int64_t N) {
  return differences_of(s, t, to_a, to_b, N);
}
FASTKD_CLONES double differences(const RelationRow<double>& s, const RelationRow<double>& t,
                                 double to_a, double to_b, int64_t N) {
  return differences_of(s, t, to_a, to_b, N);
}
FASTKD_CLONES double derivatives(const RelationRow<float>& s, const RelationRow<float>& t,
                                 float to_a, float to_b, float loss, int64_t N, float* A) {
  return derivatives_of(s, t, to_a, to_b, loss, N, A);
}
FASTKD_CLONES double derivatives(const RelationRow<double>& s, const RelationRow<double>& t,
                                 double to_a, double to_b, double loss, int64_t N, double* A) {
  return derivatives_of(s, t, to_a, to_b, loss, N, A);
}

// A row in float64, times a power of 2 by which its squares are far from the largest number.
double power_of_row(const Rows& x, int64_t i, std::vector<double>& wide) {
  wide.resize(x.n);
  const double* row = x.read(i, 0, x.n, wide.data());
  double peak = 0;
  for (int64_t j = 0; j < x.n; ++j) peak = std::max(peak, std::abs(row[j]));
  const double power = std::ldexp(1.0, -std::ilogb(peak));
  for (int64_t j = 0; j < x.n; ++j) wide[j] = row[j] * power;
  return power;
}

template <typename W>
UnitRow unit_of(const Rows& x, int64_t i, std::vector<double>& wide) {
  UnitRow of{};
  double norm = row_norm(x, i);
  of.power = 1;
  bool finite = std::isfinite(norm);
  if (norm > (sizeof(W) == sizeof(float) ? 1e37 : 1e300)) {
    W peak = 0;
    Copies<W> copies{x.type, x.n};
    const W* row = x.read(i, 0, x.n, copies[0]);
    for (int64_t j = 0; j < x.n; ++j) peak = std::max(peak, std::abs(row[j]));
    finite = std::isfinite(peak);
    if (finite) {
      of.power = power_of_row(x, i, wide);
      norm = row_norm({reinterpret_cast<char*>(wide.data()), 0, x.n, Type::kDouble}, 0);
    }
  }
  of.short_ = norm < kShortest;
  of.scale = finite ? 1 / std::max(norm, kShortest) : std::nan("");
  // float16 could not hold 1e12: there a row too short gets the gradient of its normalised row.
  of.derivative = of.short_ && x.type == Type::kHalf ? 1 : of.scale * of.power;
  return of;
}

template <typename W>
void unit_row(const Rows& x, int64_t i, const UnitRow& of, W* y) {
  if (of.power == 1) {
    times(x.read(i, 0, x.n, y), W(of.scale), x.n, y);
    return;
  }
  std::vector<double> wide;
  power_of_row(x, i, wide);
  for (int64_t j = 0; j < x.n; ++j) y[j] = W(wide[j] * of.scale);
}

// Offsets (N) of the centred relations, less their mean.
template <typename W>
std::vector<W> offsets(const RelationSide<W>& side, const W* products, int64_t N) {
  std::vector<double> h(N);
  double total = 0;
  for (int64_t i = 0; i < N; ++i) {
    if (!side.real[i]) continue;
    const UnitRow& of = side.of[i];
    const double square = double(products[i * N + i]);
    h[i] = side.far && !of.short_ ? -square / 2 : of.offset;
    total += h[i];
  }
  std::vector<W> u(N);
  for (int64_t i = 0; i < N; ++i) {
    if (side.real[i]) u[i] = W(h[i] - total / double(side.count));
  }
  return u;
}

// What is above the diagonal of x (N, N), below it too; in squares that stay in the cache.
template <typename W>
void mirror(W* x, int64_t N) {
  constexpr int64_t kSide = 16;
  for (int64_t top = 0; top < N; top += kSide) {
    for (int64_t left = 0; left <= top; left += kSide) {
      for (int64_t i = top; i < std::min(N, top + kSide); ++i) {
        for (int64_t j = left; j < std::min(i, left + kSide); ++j) x[i * N + j] = x[j * N + i];
      }
    }
  }
}

// 1/x where x > 0, else 0: the derivative of a norm at 0 is taken as 0.
template <typename W>
W reciprocal(double x) {
  return x > std::numeric_limits<W>::min() ? W(1 / x) : 0;
}

}  // namespace

template <typename W>
void RelationSide<W>::centre(int64_t N) {
  const int64_t D = x.n, room = room_of<W>(D);
  std::vector<double> sums(room), wide;
  const W *first = nullptr, *some[kRowsAtATime];
  int64_t waiting = 0;
  const auto add = [&] {
    add_up(some, waiting, first, D, sums.data());
    waiting = 0;
  };
  for (int64_t i = 0; i < N; ++i) {
    W* row = rows + i * room;
    std::fill(row + (real[i] ? D : 0), row + room, W(0));
    of[i] = {};
    if (!real[i]) continue;
    // One at a time they would wait for memory: no processor looks beyond a page by itself.
    if (i + kRowsAhead < N) fetch_all(x.place(i + kRowsAhead, 0), D * size_of(x.type));
    of[i] = unit_of<W>(x, i, wide);
    unit_row(x, i, of[i], row);
    if (first == nullptr) first = row;
    some[waiting++] = row;
    if (waiting == kRowsAtATime) add();
  }
  if (first == nullptr) return;
  add();
  const double length = find_mean(first, sums.data(), 1 / double(count), room, mean);
  far = !(length < 0.5);
  for (int64_t i = 0; i < N; ++i) {
    if (!real[i]) continue;
    of[i].offset = subtract(rows + i * room, mean, D) + (far ? (length - 1) / 2 : 0);
  }
}

template <typename W>
RelationLoss pearson(const RelationSide<W>& s, const RelationSide<W>& t, W* products_s,
                     W* products_t, int64_t N, double eps, bool gradient) {
  mirror(products_s, N);
  mirror(products_t, N);
  const std::vector<W> u_s = offsets(s, products_s, N), u_t = offsets(t, products_t, N);
  const std::vector<W> real(s.real, s.real + N);
  const auto row_s = [&](int64_t i) {
    return RelationRow<W>{products_s + i * N, u_s.data(), real.data(), u_s[i]};
  };
  const auto row_t = [&](int64_t i) {
    return RelationRow<W>{products_t + i * N, u_t.data(), real.data(), u_t[i]};
  };
  const auto sum_of_rows = [&](const auto& number) {
    double total = 0;
    for (int64_t i = 0; i < N; ++i) {
      if (s.real[i]) total += number(i);
    }
    return total;
  };
  const double sigma_s = std::sqrt(sum_of_rows([&](int64_t i) { return squares(row_s(i), N, 1); }));
  const double sigma_t = std::sqrt(sum_of_rows([&](int64_t i) { return squares(row_t(i), N, 1); }));
  const W to_a = reciprocal<W>(sigma_s), to_b = reciprocal<W>(sigma_t);
  // With a = R̃_s/σ_s and b = R̃_t/σ_t: 1 − cov/(σ_sσ_t + eps) without cancellation.
  const double apart = sum_of_rows(
      [&](int64_t i) { return differences(row_s(i), row_t(i), to_a, to_b, N); });
  const double denominator = sigma_s * sigma_t + eps;
  const double loss = (sigma_s * sigma_t * (apart / 2) + eps) / denominator;
  if (gradient) {
    for (int64_t i = 0; i < N; ++i) {
      W* A = products_s + i * N;
      if (s.real[i]) {
        s.of[i].row_sum = derivatives(row_s(i), row_t(i), to_a, to_b, W(loss), N, A);
        A[i] -= W(s.of[i].row_sum);
      } else {
        std::fill_n(A, N, W(0));
      }
    }
  }
  return {loss, -sigma_t / denominator};
}

template <typename W>
void RelationSide<W>::gradient(int64_t i, const W* h, double factor, bool add, W* dx) const {
  if (!real[i]) {
    if (!add) std::fill_n(dx, x.n, W(0));
    return;
  }
  const UnitRow& unit = of[i];
  const double along = unit.short_ ? unit.row_sum : 0;
  project_out(h, rows + i * room_of<W>(x.n), mean, x.n, factor * unit.derivative, along,
              !unit.short_, add, dx);
}

template struct RelationSide<float>;
template struct RelationSide<double>;
template RelationLoss pearson(const RelationSide<float>&, const RelationSide<float>&, float*,
                              float*, int64_t, double, bool);
template RelationLoss pearson(const RelationSide<double>&, const RelationSide<double>&, double*,
                              double*, int64_t, double, bool);

}  // namespace fastkd
