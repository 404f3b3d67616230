// Kernels of cca.cpp; see base/each_processor.h.

FASTKD_KERNEL double norm_of(const double* x, int64_t n) {
  Vector<double> total{};
  each<double>(n, [&](int64_t i, int64_t count) {
    const Vector<double> part = load(x + i, count);
    total += part * part;
  });
  return std::sqrt(sum<double>(total));
}

FASTKD_KERNEL void times(double* x, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

FASTKD_KERNEL void round_to(const double* x, double factor, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = float(x[i] * factor);
}

// Subtracts the mean of the columns of x from each.
FASTKD_KERNEL void centre(const Matrix& x, double* mean) {
  const int64_t n = x.rows;
  std::fill_n(mean, n, 0.0);
  for (int j = 0; j < x.columns; ++j) {
    const double* column = x.column(j);
    for (int64_t i = 0; i < n; ++i) mean[i] += column[i];
  }
  const double count = std::max(x.columns, 1);
  for (int64_t i = 0; i < n; ++i) mean[i] /= count;
  for (int j = 0; j < x.columns; ++j) {
    double* column = x.column(j);
    for (int64_t i = 0; i < n; ++i) column[i] -= mean[i];
  }
}
