// Kernels of layer_norm_mse.cpp; see base/each_processor.h.

// 1/√var; 0 for a constant row, NaN for an infinite variance.
inline double reciprocal_deviation(double var) {
  const double rstd = var == 0 ? 0 : 1 / std::sqrt(var);
  return rstd == 0 && var != 0 ? std::numeric_limits<double>::quiet_NaN() : rstd;
}

// The mean as a sum of two numbers of type W, and 1/√(var + eps).
template <typename W>
struct Normal {
  W mean, rest, rstd;

  Normal(double mean_of, double rstd_of)
      : mean(W(mean_of)), rest(W(mean_of - mean)), rstd(W(rstd_of)) {}

  Vector<W> of(const W* x, int64_t count) const {
    return keep<W>(((load(x, count) - mean) - rest) * rstd, count);
  }
};

// Stores ½‖norm(x) − norm(y)‖² and the gradients of scale times it. Returns false, without results,
// if the squares leave the range of W.
template <typename W>
FASTKD_KERNEL bool visit(const W* x, const W* y, int64_t D, double eps, double scale, double* loss,
                         W* dx, W* dy) {
  const auto totals = sums_of<W, 2>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    sums[0] += load(x + i, count);
    sums[1] += load(y + i, count);
  });
  const W mean_x = W(totals[0] / D), mean_y = W(totals[1] / D);
  const auto around = sums_of<W, 4>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> a = keep<W>(load(x + i, count) - mean_x, count);
    const Vector<W> b = keep<W>(load(y + i, count) - mean_y, count);
    sums[0] += a, sums[1] += b;
    sums[2] += a * a, sums[3] += b * b;
  });
  // Rounding errors of the means.
  const double left_x = around[0] / D, left_y = around[1] / D;
  const double var_x = around[2] / D - left_x * left_x;
  const double var_y = around[3] / D - left_y * left_y;
  if (sizeof(W) == sizeof(float)) {
    const auto fits = [=](double var) { return var > 1e-25 && var + eps < 1e24; };
    if (!fits(var_x) || !fits(var_y)) return false;
  }
  const double rstd_x = reciprocal_deviation(var_x + eps);
  const double rstd_y = reciprocal_deviation(var_y + eps);
  const Normal<W> norm_x(mean_x + left_x, rstd_x), norm_y(mean_y + left_y, rstd_y);
  const auto found = sums_of<W, 4>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> a = norm_x.of(x + i, count), b = norm_y.of(y + i, count);
    sums[0] += (a - b) * (a - b);
    sums[1] += a * b, sums[2] += a * a, sums[3] += b * b;
    fetch(x + D + i), fetch(y + D + i);  // prefetch the next rows, if rows are contiguous
  });
  *loss = found[0] / 2;
  if (!dx && !dy) return true;
  // The gradient is the difference without its component along the normalised row, of which only a
  // fraction due to eps stays. The component is divided by norm·norm, which D exceeds if eps is not
  // 0.
  const double along = found[1];
  const auto factor = [=](double squares, double rstd) {
    const double part = along / (squares == 0 ? 1 : squares);
    return W((part - 1) * (eps * rstd * rstd) - part);
  };
  const W factor_x = factor(found[2], rstd_x), factor_y = factor(found[3], rstd_y);
  const W scale_x = W(-scale * rstd_x), scale_y = W(-scale * rstd_y);
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> a = norm_x.of(x + i, count), b = norm_y.of(y + i, count);
    if (dx) store<W>(dx + i, (b + a * factor_x) * scale_x, count);
    if (dy) store<W>(dy + i, (a + b * factor_y) * scale_y, count);
  });
  return true;
}
