// Square root or inverse square root of one symmetric matrix, from its eigenvalues and
// eigenvectors. One source for a CPU's thread, a GPU's warp or block, and the threads of the tests.
#pragma once

#include <algorithm>
#include <limits>

#include "linalg/eigen_lanes.h"

namespace fastkd {

struct Options {
  bool inverse;
  double ridge;
};

// √λ or 1/√λ of an eigenvalue λ that includes the ridge. For the inverse without a ridge,
// eigenvalues below kRoundings·eps (of the matrix's type T) of the largest count as zero, as in
// linalg.py.
template <typename T>
FASTKD_HOST_DEVICE double root_of(double value, double largest, Options options) {
  if (!options.inverse) return sqrt(value);
  constexpr double kRoundings = sizeof(T) == sizeof(double) ? 64 : 8;
  const double least = kRoundings * std::numeric_limits<T>::epsilon();
  const double zero = options.ridge > 0 ? 0 : least * largest;
  return value > zero ? 1 / sqrt(value) : 0;
}

// root ← rowsᵀ·diag(factors)·rows
template <typename T, typename Lanes>
FASTKD_HOST_DEVICE void multiply(const EigenScratch& s, const double* factors, T* root,
                                 const Lanes& lanes) {
  const int64_t n = s.n;
  for (int64_t i = lanes.index / Lanes::kWarp; i < n; i += lanes.count / Lanes::kWarp) {
    for (int64_t j = i + lanes.index % Lanes::kWarp; j < n; j += Lanes::kWarp) {
      double sum = 0;
      for (int k = 0; k < n; ++k) sum += factors[k] * s.rows[k * n + i] * s.rows[k * n + j];
      root[i * n + j] = root[j * n + i] = T(sum);
    }
  }
}

// The same on a CPU, with loops along rows.
template <typename T>
void multiply(const EigenScratch& s, const double* factors, T* root, const OneLane&) {
  const int64_t n = s.n;
  for (int64_t i = 0; i < n; ++i) {
    std::fill(s.a + i, s.a + n, 0.0);
    for (int64_t k = 0; k < n; ++k) {
      const double left = factors[k] * s.rows[k * n + i];
#pragma omp simd
      for (int64_t j = i; j < n; ++j) s.a[j] += left * s.rows[k * n + j];
    }
    for (int64_t j = i; j < n; ++j) root[i * n + j] = root[j * n + i] = T(s.a[j]);
  }
}

// (root, values, vectors) of one matrix. Without ``root`` values are the plain eigenvalues, without
// ridge.
template <typename T, typename Lanes>
FASTKD_HOST_DEVICE void decompose(const T* in, Options options, T* root, T* values, T* vectors,
                                  const EigenScratch& s, const Lanes& lanes) {
  const int64_t n = s.n;
  const double scale = eigen(in, s, lanes);
  if (scale != scale) {
    for (int64_t e = lanes.index; e < n * n; e += lanes.count) {
      vectors[e] = T(scale);
      if (root) root[e] = T(scale);
    }
    for (int64_t i = lanes.index; i < n; i += lanes.count) values[i] = T(scale);
    return;
  }
  int64_t* places = reinterpret_cast<int64_t*>(s.reflectors);
  double* factors = s.products;
  double top = 0;
  for (int64_t i = 0; i < n; ++i) top = s.diagonal[i] > top ? s.diagonal[i] : top;
  for (int64_t i = lanes.index; i < n; i += lanes.count) {
    places[i] = place_of(s.diagonal, i, n);
    double value = s.diagonal[i] * scale;
    if (root) {
      value = (value > 0 ? value : 0) + options.ridge;
      factors[i] = root_of<T>(value, top * scale + options.ridge, options);
    }
    values[places[i]] = T(value);
  }
  lanes.sync();
  const int lane = lanes.index % Lanes::kWarp;
  for (int64_t i = lanes.index / Lanes::kWarp; i < n; i += lanes.count / Lanes::kWarp) {
    for (int64_t j = lane; j < n; j += Lanes::kWarp) {
      vectors[j * n + places[i]] = T(s.rows[i * n + j]);
    }
  }
  if (root) multiply(s, factors, root, lanes);
}

}  // namespace fastkd
