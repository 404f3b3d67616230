// Tensors of the root operators, on CPU and GPU: calls of PyTorch's operators, and roots from
// eigenvectors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

namespace fastkd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace stable = torch::stable;

// (values, vectors) of float64 matrices: values ascend, eigenvectors are columns.
using Eigen = std::tuple<Tensor, Tensor>;
// (root, inverse root, rank).
using Roots = std::tuple<Tensor, Tensor, Tensor>;

// Eigenvalues up to this fraction of the largest are zero: in float64, where the solver rounds,
// zeros have up to twenty rounding errors, in covariances of float32 and half precision up to four.
constexpr double kZero = 64 * std::numeric_limits<double>::epsilon();
constexpr double kZeroInFloat32 = 8 * std::numeric_limits<float>::epsilon();

// The first ``results`` results of an operator of PyTorch or of this package.
template <size_t results = 1, typename... Arguments>
auto call(const char* name, const char* overload, const Arguments&... arguments) {
  constexpr size_t size = std::max(results, sizeof...(Arguments));
  std::array<StableIValue, size> stack{stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  if constexpr (results == 1) {
    return stable::detail::to<Tensor>(stack[0]);
  } else if constexpr (results == 2) {
    return Eigen{stable::detail::to<Tensor>(stack[0]), stable::detail::to<Tensor>(stack[1])};
  } else {
    return Roots{stable::detail::to<Tensor>(stack[0]), stable::detail::to<Tensor>(stack[1]),
                 stable::detail::to<Tensor>(stack[2])};
  }
}

inline Tensor add(const Tensor& x, const Tensor& y, double times = 1) {
  return stable::subtract(x, y, -times);
}

inline Tensor number(const Tensor& like, double value) {
  return stable::full({}, value, ScalarType::Double, std::nullopt, like.device());
}

inline void check_square(const Tensor& a) {
  const int64_t d = a.dim();
  STD_TORCH_CHECK(d >= 2, "a must have at least 2 dimensions, got ", d);
  STD_TORCH_CHECK(a.size(d - 2) == a.size(d - 1),
                  "a must hold square matrices, got the last dimensions ", a.size(d - 2), " and ",
                  a.size(d - 1));
}

inline void check_matrices(const Tensor& a) {
  check_square(a);
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::Double, "a must be float64");
}

// Allocates results and calls solve(in, batch, n, values, vectors) with their memory, unless
// ``input`` is empty.
template <typename Solve>
Eigen decompose_all(const Tensor& input, const Solve& solve) {
  const Tensor a = stable::contiguous(input);
  const auto dims = a.sizes();
  const int64_t n = dims[dims.size() - 1];
  const torch::headeronly::IntHeaderOnlyArrayRef rows(dims.data(), dims.size() - 1);
  const Tensor values = stable::new_empty(a, rows), vectors = stable::new_empty(a, dims);
  if (a.numel() > 0) {
    solve(a.const_data_ptr<double>(), a.numel() / (n * n), n, values.mutable_data_ptr<double>(),
          vectors.mutable_data_ptr<double>());
  }
  return {values, vectors};
}

// PyTorch's eigenvectors. It rejects a batch for one NaN, so zeros replace the matrix.
inline Eigen eigh_by_pytorch(const Tensor& a) {
  const std::array<int64_t, 2> last{-2, -1};
  const Tensor size = call("aten::abs", "", a);
  const Tensor largest = a.numel() ? stable::amax(size, last, true) : stable::sum(size, last, true);
  const Tensor finite = call("aten::isfinite", "", largest);
  const Tensor symmetric = call("aten::lerp", "Tensor", a, stable::transpose(a, -1, -2),
                                number(a, 0.5));
  const Tensor clean = call("aten::where", "self", finite, symmetric, number(a, 0));
  const auto [values, vectors] = call<2>("aten::linalg_eigh", "", clean, std::string("L"));
  const Tensor bad = call("aten::logical_not", "", finite);
  const Tensor nan = number(a, std::numeric_limits<double>::quiet_NaN());
  return {call("aten::masked_fill_", "Tensor", values, stable::squeeze(bad, -1), nan),
          call("aten::masked_fill_", "Tensor", vectors, bad, nan)};
}

// XYᵀ (*, n, n), which must be symmetric: for large n only the lower blocks are multiplied.
inline Tensor symmetric_product(const Tensor& x, const Tensor& y) {
  const int64_t n = x.size(-2);
  const Tensor right = stable::transpose(y, -1, -2);
  if (n < 256 || !x.is_cpu()) return stable::matmul(x, right);
  const Tensor product = stable::new_empty(x, x.sizes());
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t start = i * n / 4, size = (i + 1) * n / 4 - start;
    Tensor left = stable::narrow(const_cast<Tensor&>(x), -2, start, n - start);
    Tensor columns = stable::narrow(const_cast<Tensor&>(right), -1, start, size);
    const Tensor block = stable::matmul(left, columns);
    Tensor whole = product, below = stable::narrow(whole, -2, start, n - start);
    Tensor to = stable::narrow(below, -1, start, size);
    stable::copy_(to, block);
    Tensor above = stable::narrow(whole, -2, start, size);
    to = stable::narrow(above, -1, start, n - start);
    stable::copy_(to, stable::transpose(block, -1, -2));
  }
  return product;
}

// Q diag(√λ) Qᵀ and Q diag(1/√λ) Qᵀ. Eigenvalues up to ``zero`` (*) times the largest are zero.
inline Roots roots_of(const Eigen& eigen, const std::optional<Tensor>& zero) {
  const auto& [values, vectors] = eigen;
  if (values.numel() == 0) {
    const Tensor rank = stable::sum(values, std::array<int64_t, 1>{-1}, false, ScalarType::Long);
    return {stable::empty_like(vectors), stable::empty_like(vectors), rank};
  }
  Tensor all = values;
  const Tensor largest = stable::narrow(all, -1, values.size(-1) - 1, 1);
  Tensor fraction = zero ? *zero : number(values, kZero);
  if (fraction.dim()) fraction = stable::unsqueeze(fraction, -1);
  Tensor least = call("aten::mul", "Tensor", largest, fraction);
  least = call("aten::maximum", "", least, number(values, std::numeric_limits<double>::min()));
  const Tensor dropped = call("aten::le", "Tensor", values, least);  // not NaN
  const Tensor root = call("aten::sqrt", "", call("aten::where", "self", dropped,
                                                  number(values, 0), values));
  const Tensor inverse = call("aten::where", "self", dropped, root, call("aten::reciprocal", "",
                                                                         root));
  const auto form = [&](const Tensor& factors) {
    return symmetric_product(
        call("aten::mul", "Tensor", vectors, stable::unsqueeze(factors, -2)), vectors);
  };
  const Tensor kept = call("aten::logical_not", "", dropped);
  return {form(root), form(inverse), stable::sum(kept, std::array<int64_t, 1>{-1}, false)};
}

// Roots without a kernel of this package: where the choice of zeros matters PyTorch's eigenvectors,
// for which the host waits for a GPU, else products.
inline Roots by_pytorch(const Tensor& a, const std::optional<Tensor>& zero, bool digits) {
  if (zero) return roots_of(eigh_by_pytorch(a), zero);
  return call<3>("fastkd::roots_by_products", "", a, digits);
}

// solve(a, zero) with ``a`` and its results in float64; float32 and half precision get float32.
template <typename Solve>
Roots in_float64(const Tensor& a, std::optional<Tensor> zero, const Solve& solve) {
  check_square(a);
  if (a.scalar_type() == ScalarType::Double) return solve(a, zero);
  if (!zero) zero = number(a, kZeroInFloat32);
  const auto [root, inverse, rank] = solve(stable::to(a, ScalarType::Double), zero);
  return {stable::to(root, ScalarType::Float), stable::to(inverse, ScalarType::Float), rank};
}

}  // namespace fastkd
