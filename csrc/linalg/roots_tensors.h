// Input and output tensors of the matrix roots, on CPU and GPU.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastkd {

using torch::stable::Tensor;

// (root, values, vectors): a = vectors·diag(values)·vectorsᵀ. Values ascend, are at least 0 and
// include the ridge; eigenvectors are columns. The backward pass reads values and vectors.
using Roots = std::tuple<Tensor, Tensor, Tensor>;

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

// (values, vectors) of the eigendecomposition of float64 matrices.
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

// Allocates results and calls solve(a, sizes, root, values, vectors) with pointers of a's dtype,
// unless a is empty.
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
