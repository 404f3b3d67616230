// What the CPU and CUDA parts of the matrix roots share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <tuple>

#ifdef __CUDACC__
#define FASTKD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTKD_HOST_DEVICE inline
#endif

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
// up to eight roundings (of the matrix's type T) of the largest count as zero; so in linalg.py.
template <typename T>
FASTKD_HOST_DEVICE double root_of(double value, double largest, Options options) {
  if (!options.inverse) return sqrt(value);
  const double zero = options.ridge > 0 ? 0 : 8 * std::numeric_limits<T>::epsilon() * largest;
  return value > zero ? 1 / sqrt(value) : 0;
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

inline Roots allocate(const Tensor& a) {
  const auto dims = a.sizes();
  const torch::headeronly::IntHeaderOnlyArrayRef rows(dims.data(), dims.size() - 1);
  return {torch::stable::new_empty(a, dims), torch::stable::new_empty(a, rows),
          torch::stable::new_empty(a, dims)};
}

}  // namespace fastkd

// An empty Python module: importing it loads the library, which registers the operators.
#define FASTKD_PYTHON_MODULE(name)                                                   \
  PyMODINIT_FUNC PyInit_##name() {                                                   \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, \
                                 nullptr,               nullptr, nullptr, nullptr};  \
    return PyModule_Create(&module);                                                 \
  }
