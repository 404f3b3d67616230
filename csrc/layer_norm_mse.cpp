// Data path. Forward: both rows are read from memory once and twice more from the cache: sums,
// squares around the mean, the difference. It leaves mean and 1/√(var + eps) of each side.
// Backward: the rows are read once more, and both gradients written. With E = R·D elements of s
// bytes that is 6Es bytes, and 8Es where a write reads its line first.
//
// Rows of at most kShortRow columns, and those whose squares leave the range of float32, are
// computed in float64: where a few terms cancel, their rounding would be all that is left.
#include "layer_norm_mse.h"

#include <cmath>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kShortRow = 64;

// 1/√var; 0 of a constant row, but NaN where 1/∞ would pass a row off as constant.
double reciprocal_deviation(double var) {
  const double rstd = var == 0 ? 0 : 1 / std::sqrt(var);
  return rstd == 0 && var != 0 ? std::numeric_limits<double>::quiet_NaN() : rstd;
}

// The mean in two parts of which the first is rounded to W, and 1/√(var + eps).
template <typename W>
struct Normal {
  W mean, rest, rstd;

  explicit Normal(const double* stats)
      : mean(W(stats[0])), rest(W(stats[0] - mean)), rstd(W(stats[1])) {}

  Vector<W> of(const W* x, int64_t count) const {
    return keep<W>(((load(x, count) - mean) - rest) * rstd, count);
  }
};

// ½‖norm(x) − norm(y)‖² and the statistics; false where W is too narrow for the squares.
template <typename W>
inline bool row_loss(const W* x, const W* y, int64_t D, double eps, double* stats, double* loss) {
  Vector<W> sum_x{}, sum_y{};
  each<W>(D, [&](int64_t i, int64_t count) {
    sum_x += load(x + i, count);
    sum_y += load(y + i, count);
  });
  const W mean_x = W(sum<W>(sum_x) / D), mean_y = W(sum<W>(sum_y) / D);
  Vector<W> rest_x{}, rest_y{}, squares_x{}, squares_y{};
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> a = keep<W>(load(x + i, count) - mean_x, count);
    const Vector<W> b = keep<W>(load(y + i, count) - mean_y, count);
    rest_x += a, rest_y += b;
    squares_x += a * a, squares_y += b * b;
  });
  // What rounding left of the means.
  const double left_x = sum<W>(rest_x) / D, left_y = sum<W>(rest_y) / D;
  const double var_x = sum<W>(squares_x) / D - left_x * left_x;
  const double var_y = sum<W>(squares_y) / D - left_y * left_y;
  if (sizeof(W) == sizeof(float)) {
    const bool fits = var_x > 1e-25 && var_y > 1e-25 && var_x < 1e25 && var_y < 1e25;
    if (!fits) return false;
  }
  stats[0] = mean_x + left_x, stats[1] = reciprocal_deviation(var_x + eps);
  stats[2] = mean_y + left_y, stats[3] = reciprocal_deviation(var_y + eps);
  const Normal<W> norm_x(stats), norm_y(stats + 2);
  Vector<W> total{};
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> difference = norm_x.of(x + i, count) - norm_y.of(y + i, count);
    total += difference * difference;
  });
  *loss = sum<W>(total) / 2;
  return true;
}

template <typename W>
inline void row_gradient(const W* x, const W* y, int64_t D, double eps, const double* stats,
                         double scale, W* dx, W* dy) {
  const Normal<W> norm_x(stats), norm_y(stats + 2);
  Vector<W> products{}, squares_x{}, squares_y{};
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> a = norm_x.of(x + i, count), b = norm_y.of(y + i, count);
    products += a * b, squares_x += a * a, squares_y += b * b;
  });
  // The gradient is the difference without its part along the row itself, but for that part's
  // share of eps. The part is divided by norm·norm and not by D, which is larger by eps.
  const double along = sum<W>(products);
  const auto factor = [&](double squares, double rstd) {
    const double part = along / (squares == 0 ? 1 : squares);
    return W((part - 1) * (eps * rstd * rstd) - part);
  };
  const W factor_x = factor(sum<W>(squares_x), stats[1]);
  const W factor_y = factor(sum<W>(squares_y), stats[3]);
  const W scale_x = W(-scale * stats[1]), scale_y = W(-scale * stats[3]);
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> a = norm_x.of(x + i, count), b = norm_y.of(y + i, count);
    if (dx) store<W>(dx + i, (b + a * factor_x) * scale_x, count);
    if (dy) store<W>(dy + i, (a + b * factor_y) * scale_y, count);
  });
}

FASTKD_CLONES bool loss_of(const float* x, const float* y, int64_t D, double eps, double* stats,
                           double* loss) {
  return row_loss(x, y, D, eps, stats, loss);
}

FASTKD_CLONES bool loss_of(const double* x, const double* y, int64_t D, double eps, double* stats,
                           double* loss) {
  return row_loss(x, y, D, eps, stats, loss);
}

FASTKD_CLONES void gradient_of(const float* x, const float* y, int64_t D, double eps,
                               const double* stats, double scale, float* dx, float* dy) {
  row_gradient(x, y, D, eps, stats, scale, dx, dy);
}

FASTKD_CLONES void gradient_of(const double* x, const double* y, int64_t D, double eps,
                               const double* stats, double scale, double* dx, double* dy) {
  row_gradient(x, y, D, eps, stats, scale, dx, dy);
}


bool fits_float(const Rows& x, const double* stats) {
  const auto usual = [](double rstd) { return rstd > 1e-12 && rstd < 3e12; };
  return x.type != Type::kDouble && x.n > kShortRow && usual(stats[1]) && usual(stats[3]);
}

}  // namespace

void LayerNormMSE::forward(int64_t begin, int64_t end, double* losses) const {
  Copies<float> narrow{x.type, x.n};
  Copies<double> wide{x.type, x.n};
  const auto row = [&](int64_t i, auto& copies) {
    const auto *a = x.read(i, 0, x.n, copies[0]), *b = y.read(i, 0, x.n, copies[1]);
    return loss_of(a, b, x.n, eps, stats + 4 * i, losses + i);
  };
  for (int64_t i = begin; i < end; ++i) {
    const bool short_or_double = x.type == Type::kDouble || x.n <= kShortRow;
    if (short_or_double || !row(i, narrow)) row(i, wide);
  }
}

void LayerNormMSE::backward(int64_t begin, int64_t end, double scale, const Rows& dx,
                            const Rows& dy) const {
  Copies<float> narrow{x.type, x.n};
  Copies<double> wide{x.type, x.n};
  const auto row = [&](int64_t i, auto& copies) {
    const auto *a = x.read(i, 0, x.n, copies[0]), *b = y.read(i, 0, x.n, copies[1]);
    auto *da = dx.write(i, 0, copies[2]), *db = dy.write(i, 0, copies[3]);
    gradient_of(a, b, x.n, eps, stats + 4 * i, scale, da, db);
    dx.written(i, 0, x.n, da);
    dy.written(i, 0, x.n, db);
  };
  for (int64_t i = begin; i < end; ++i) {
    fits_float(x, stats + 4 * i) ? row(i, narrow) : row(i, wide);
  }
}

}  // namespace fastkd
