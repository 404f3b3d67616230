// Input and output tensors of `eigh`, on CPU and GPU.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastkd {

using torch::stable::Tensor;

// (values, vectors) of float64 matrices: values ascend, eigenvectors are columns.
using Eigen = std::tuple<Tensor, Tensor>;

// Allocates results and calls solve(in, batch, n, values, vectors) with their memory, unless
// ``input`` is empty.
template <typename Solve>
Eigen decompose_all(const Tensor& input, const Solve& solve) {
  const int64_t d = input.dim();
  STD_TORCH_CHECK(d >= 2, "a must have at least 2 dimensions, got ", d);
  const int64_t n = input.size(d - 1);
  STD_TORCH_CHECK(input.size(d - 2) == n, "a must hold square matrices, got the last dimensions ",
                  input.size(d - 2), " and ", n);
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Double,
                  "a must be float64");
  const Tensor a = torch::stable::contiguous(input);
  const auto dims = a.sizes();
  const torch::headeronly::IntHeaderOnlyArrayRef rows(dims.data(), dims.size() - 1);
  const Tensor values = torch::stable::new_empty(a, rows);
  const Tensor vectors = torch::stable::new_empty(a, dims);
  int64_t batch = 1;
  for (int64_t i = 0; i + 2 < d; ++i) batch *= dims[i];
  if (batch > 0 && n > 0) {
    solve(a.const_data_ptr<double>(), batch, n, values.mutable_data_ptr<double>(),
          vectors.mutable_data_ptr<double>());
  }
  return {values, vectors};
}

}  // namespace fastkd
