// Eigenvalues and eigenvectors of one small symmetric matrix on the CPU: Householder reflections to
// tridiagonal form, then implicit QL with Wilkinson shifts. Every inner loop runs along rows, so
// that it vectorises; the eigenvectors are kept as rows for the same reason. In double precision
// throughout: a third slower than float here, and float results are then right to their last digit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fastkd {

inline double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// a: (n, n) row-major, symmetric, overwritten. values: (n) ascending. rows: (n, n), row k the
// eigenvector of values[k]. work: 3n. False if the iteration did not converge.
inline bool eigen_tridiagonal(double* a, double* values, double* rows, double* work, int64_t n) {
  double* off = work;          // (n) sub-diagonal, off[i] couples i and i + 1
  double* scales = work + n;   // (n) 2 / uᵀu of reflector k
  double* product = work + 2 * n;

  // Reflector k, u = row k of a from column k + 1 on, zeroes that row beyond its first element.
  for (int64_t k = 0; k + 2 < n; ++k) {
    const int64_t m = n - k - 1;
    double* u = a + k * n + k + 1;
    double largest = 0;
    for (int64_t i = 1; i < m; ++i) largest = std::max(largest, std::abs(u[i]));
    scales[k] = 0;
    off[k] = u[0];
    if (largest == 0) continue;
    largest = std::max(largest, std::abs(u[0]));
    const double inverse = 1 / largest;
#pragma omp simd
    for (int64_t i = 0; i < m; ++i) u[i] *= inverse;
    const double norm = std::sqrt(dot(u, u, m));
    const double alpha = u[0] > 0 ? -norm : norm;
    off[k] = alpha * largest;
    const double scale = 1 / (norm * norm - alpha * u[0]);  // 2 / uᵀu of the reflector
    u[0] -= alpha;
    scales[k] = scale;

    double* block = a + (k + 1) * n + k + 1;  // (m, m) trailing part
    for (int64_t i = 0; i < m; ++i) product[i] = scale * dot(block + i * n, u, m);
    const double half = scale * dot(product, u, m) / 2;
#pragma omp simd
    for (int64_t i = 0; i < m; ++i) product[i] -= half * u[i];
    for (int64_t i = 0; i < m; ++i) {
      double* row = block + i * n;
      const double ui = u[i], pi = product[i];
#pragma omp simd
      for (int64_t j = 0; j < m; ++j) row[j] -= ui * product[j] + pi * u[j];
    }
  }
  if (n > 1) off[n - 2] = a[(n - 2) * n + n - 1];
  off[n - 1] = 0;
  for (int64_t i = 0; i < n; ++i) values[i] = a[i * n + i];

  // rows = Qᵀ, from the last reflector to the first: only the trailing part differs from I.
  std::fill(rows, rows + n * n, 0.0);
  for (int64_t i = 0; i < n; ++i) rows[i * n + i] = 1;
  for (int64_t k = n - 3; k >= 0; --k) {
    if (scales[k] == 0) continue;
    const int64_t m = n - k - 1;
    const double* u = a + k * n + k + 1;
    for (int64_t i = 0; i < m; ++i) {
      double* row = rows + (k + 1 + i) * n + k + 1;
      const double factor = scales[k] * dot(row, u, m);
#pragma omp simd
      for (int64_t j = 0; j < m; ++j) row[j] -= factor * u[j];
    }
  }

  double magnitude = 0;
  for (int64_t i = 0; i < n; ++i) {
    magnitude = std::max(magnitude, std::abs(values[i]) + std::abs(off[i]));
  }
  const double eps = std::numeric_limits<double>::epsilon();
  for (int64_t low = 0; low < n; ++low) {
    for (int iteration = 0;; ++iteration) {
      int64_t end = low;
      for (; end + 1 < n; ++end) {
        const double neighbours = std::abs(values[end]) + std::abs(values[end + 1]);
        if (std::abs(off[end]) <= eps * std::max(neighbours, magnitude / 16)) break;
      }
      if (end == low) break;
      if (iteration == 60) return false;
      double g = (values[low + 1] - values[low]) / (2 * off[low]);
      double r = std::hypot(g, 1.0);
      g = values[end] - values[low] + off[low] / (g + std::copysign(r, g));
      double sine = 1, cosine = 1, shift = 0;
      int64_t i = end - 1;
      for (; i >= low; --i) {
        const double f = sine * off[i], b = cosine * off[i];
        r = std::sqrt(f * f + g * g);
        off[i + 1] = r;
        if (r == 0) {
          values[i + 1] -= shift;
          off[end] = 0;
          break;
        }
        sine = f / r;
        cosine = g / r;
        g = values[i + 1] - shift;
        r = (values[i] - g) * sine + 2 * cosine * b;
        shift = sine * r;
        values[i + 1] = g + shift;
        g = cosine * r - b;
        double* upper = rows + i * n;
        double* lower = rows + (i + 1) * n;
        const double s = sine, c = cosine;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          const double x = upper[j], y = lower[j];
          lower[j] = s * x + c * y;
          upper[j] = c * x - s * y;
        }
      }
      if (r == 0 && i >= low) continue;
      values[low] -= shift;
      off[low] = g;
      off[end] = 0;
    }
  }

  for (int64_t i = 0; i + 1 < n; ++i) {
    const int64_t least = std::min_element(values + i, values + n) - values;
    if (least == i) continue;
    std::swap(values[i], values[least]);
    std::swap_ranges(rows + i * n, rows + (i + 1) * n, rows + least * n);
  }
  return true;
}

}  // namespace fastkd
