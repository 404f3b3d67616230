// What the CPU and CUDA parts of the matrix roots share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "eigen_lanes.h"

namespace fastkd {

using torch::stable::Tensor;

// (root, values, vectors): a = vectors·diag(values)·vectorsᵀ, values ascending, at least 0, with the
// ridge; vectors in columns. The backward pass needs the last two.
using Roots = std::tuple<Tensor, Tensor, Tensor>;

struct Options {
  bool inverse;
  double ridge;
};

// √λ or 1/√λ of an eigenvalue that holds its ridge already. Without a ridge, values of the inverse
// up to so many roundings (of the matrix's type T) of the largest count as zero; so in linalg.py.
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

// The same on a CPU, along rows.
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

// (root, values, vectors) of one matrix; without ``root`` its eigenvalues as they are.
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

struct Sizes {
  int64_t batch;
  int64_t n;
};

inline Sizes check_square(const Tensor& a) {
  const auto dims = a.sizes();
  const int64_t d = a.dim();
  STD_TORCH_CHECK(d >= 2, "a must have at least 2 dimensions, got ", d);
  STD_TORCH_CHECK(dims[d - 1] == dims[d - 2], "a must hold square matrices, got the last dimensions ",
                  dims[d - 2], " and ", dims[d - 1]);
  const auto type = a.scalar_type();
  STD_TORCH_CHECK(type == torch::headeronly::ScalarType::Float ||
                      type == torch::headeronly::ScalarType::Double,
                  "a must be float32 or float64");
  int64_t batch = 1;
  for (int64_t i = 0; i + 2 < d; ++i) batch *= dims[i];
  return {batch, dims[d - 1]};
}

// The eigen decomposition alone: (values, vectors) of float64 matrices of any size.
using Eigen = std::tuple<Tensor, Tensor>;

inline Sizes check_square_float64(const Tensor& a) {
  STD_TORCH_CHECK(a.scalar_type() == torch::headeronly::ScalarType::Double, "a must be float64");
  return check_square(a);
}

inline Eigen allocate_eigen(const Tensor& a) {
  const auto dims = a.sizes();
  const torch::headeronly::IntHeaderOnlyArrayRef rows(dims.data(), dims.size() - 1);
  return {torch::stable::new_empty(a, rows), torch::stable::new_empty(a, dims)};
}

inline Roots allocate(const Tensor& a) {
  const auto [values, vectors] = allocate_eigen(a);
  return {torch::stable::new_empty(a, a.sizes()), values, vectors};
}

// solve(a, sizes, root, values, vectors) with pointers to a's type, unless there is nothing to solve.
template <typename Solve>
Roots each_type(const Tensor& input, const Solve& solve) {
  const Sizes sizes = check_square(input);
  const Tensor a = torch::stable::contiguous(input);
  const Roots roots = allocate(a);
  if (sizes.batch == 0 || sizes.n == 0) return roots;
  const auto& [root, values, vectors] = roots;
  if (a.scalar_type() == torch::headeronly::ScalarType::Double) {
    solve(a.const_data_ptr<double>(), sizes, root.mutable_data_ptr<double>(),
          values.mutable_data_ptr<double>(), vectors.mutable_data_ptr<double>());
  } else {
    solve(a.const_data_ptr<float>(), sizes, root.mutable_data_ptr<float>(),
          values.mutable_data_ptr<float>(), vectors.mutable_data_ptr<float>());
  }
  return roots;
}

}  // namespace fastkd

// torch calls operators without the GIL, so a free-threaded Python needs none for them.
#ifdef Py_GIL_DISABLED
#define FASTKD_WITHOUT_GIL(module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED)
#else
#define FASTKD_WITHOUT_GIL(module)
#endif

// An empty Python module: importing it loads the library, which registers the operators.
#define FASTKD_PYTHON_MODULE(name)                                                   \
  PyMODINIT_FUNC PyInit_##name() {                                                   \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, \
                                 nullptr,               nullptr, nullptr, nullptr};  \
    PyObject* const made = PyModule_Create(&module);                                 \
    FASTKD_WITHOUT_GIL(made);                                                        \
    return made;                                                                     \
  }
