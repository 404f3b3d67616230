// Data path of a group, whose buffers stay in the second cache: each row is read once from memory,
// normalised and added to the mean; the mean is subtracted from all rows; their products; three
// reads of both (N, N), the last of which writes A; the product of A with the rows, and the
// gradient.
//
// Relations are computed from centred rows, see fastkd/losses/relation.py. The mean is computed from
// differences to the first row, so that equal rows equal their mean exactly.
#include "losses/relation/relation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/row_norms.h"

namespace fastkd {
namespace {

// Row i of a centred relation: products[j] + u[j] + own, and 0 where row j is not real.
template <typename W>
struct RelationRow {
  const W *products, *u, *real;
  W own;
};

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "losses/relation/relation_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

constexpr double kShortest = 1e-12;  // torch.nn.functional.normalize divides by max(‖x‖, this)
constexpr int64_t kRowsAtATime = 8, kRowsAhead = 3;  // added up together; prefetch distance

UnitRow unit_of(const Rows& x, int64_t i) {
  const double norm = row_norm(x, i);
  const double scale = std::isfinite(norm) ? 1 / std::max(norm, kShortest) : std::nan("");
  return {norm < kShortest, scale, 0, 0};
}

template <typename W>
void unit_row(const Rows& x, int64_t i, double scale, W* y, Next next) {
  if (!(scale < std::numeric_limits<W>::min())) {
    FASTKD_CALL(times, x.read(i, 0, x.n, y), W(scale), x.n, y, next);
    return;
  }
  std::vector<double> wide(x.n);  // W would lose digits of 1/‖x‖
  const double* row = x.read(i, 0, x.n, wide.data());
  for (int64_t j = 0; j < x.n; ++j) y[j] = W(row[j] * scale);
}

// Offsets u (N) of the centred relation, minus their mean.
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

// Copies the upper triangle of x (N, N) to the lower one, in squares that stay in the cache.
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
  std::vector<double> sums(room);
  const W *first = nullptr, *some[kRowsAtATime];
  int64_t waiting = 0;
  const auto add = [&] {
    FASTKD_CALL(add_up, some, waiting, first, D, sums.data());
    waiting = 0;
  };
  for (int64_t i = 0; i < N; ++i) {
    W* row = rows + i * room;
    std::fill(row + (real[i] ? D : 0), row + room, W(0));
    of[i] = {};
    if (!real[i]) continue;
    // Hardware does not prefetch across a page.
    const bool more = i + kRowsAhead < N;
    of[i] = unit_of(x, i);
    unit_row(x, i, of[i].scale, row, {more ? x.place(i + kRowsAhead, 0) : nullptr, size_of(x.type)});
    if (first == nullptr) first = row;
    some[waiting++] = row;
    if (waiting == kRowsAtATime) add();
  }
  if (first == nullptr) return;
  add();
  const double length = FASTKD_CALL(find_mean, first, sums.data(), 1 / double(count), room, mean);
  far = !(length < 0.5);
  for (int64_t i = 0; i < N; ++i) {
    if (!real[i]) continue;
    of[i].offset = FASTKD_CALL(subtract, rows + i * room, mean, D) + (far ? (length - 1) / 2 : 0);
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
  const auto norm_of = [&](const auto& row) {
    return std::sqrt(sum_of_rows([&](int64_t i) { return FASTKD_CALL(squares, row(i), N); }));
  };
  const double sigma_s = norm_of(row_s), sigma_t = norm_of(row_t);
  const W to_a = reciprocal<W>(sigma_s), to_b = reciprocal<W>(sigma_t);
  // 1 − cov/(σ_sσ_t + eps) without cancellation, by ½‖a − b‖² of a = R̃_s/σ_s and b = R̃_t/σ_t.
  const double apart = sum_of_rows(
      [&](int64_t i) { return FASTKD_CALL(differences, row_s(i), row_t(i), to_a, to_b, N); });
  const double denominator = sigma_s * sigma_t + eps;
  const double loss = (sigma_s * sigma_t * (apart / 2) + eps) / denominator;
  if (gradient) {
    for (int64_t i = 0; i < N; ++i) {
      W* A = products_s + i * N;
      if (s.real[i]) {
        s.of[i].row_sum = FASTKD_CALL(derivatives, row_s(i), row_t(i), to_a, to_b, W(loss), N, A);
        A[i] -= W(s.of[i].row_sum);
      } else {
        std::fill_n(A, N, W(0));
      }
    }
  }
  return {loss, -sigma_t / denominator};
}

template <typename W>
void RelationSide<W>::gradient(int64_t i, const W* h, double factor, bool add, W* dx,
                               const W* next) const {
  if (!real[i]) {
    if (!add) std::fill_n(dx, x.n, W(0));
    return;
  }
  const UnitRow& unit = of[i];
  const double along = unit.short_ ? unit.row_sum : 0;
  // 1/kShortest is beyond float16: there a short row gets the gradient of its normalised row.
  if (!unit.short_ || x.type != Type::kHalf) factor *= unit.scale;
  FASTKD_CALL(project_out, h, rows + i * room_of<W>(x.n), mean, x.n, factor, along, !unit.short_,
              add, dx, {reinterpret_cast<const char*>(next), sizeof(W)});
}

template struct RelationSide<float>;
template struct RelationSide<double>;
template RelationLoss pearson(const RelationSide<float>&, const RelationSide<float>&, float*,
                              float*, int64_t, double, bool);
template RelationLoss pearson(const RelationSide<double>&, const RelationSide<double>&, double*,
                              double*, int64_t, double, bool);

}  // namespace fastkd
