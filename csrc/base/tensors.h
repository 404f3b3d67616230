// Tensors in operators: as rows and scalars, checks, allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/parallel.h"
#include "base/rows.h"

// Registers a function of namespace fastkd as an operator for the CPU; ``schema`` lacks its name.
#define FASTKD_OPERATOR(function, schema)                                              \
  STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) { m.def(#function schema); }             \
  STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {                                       \
    m.impl(#function, TORCH_BOX(&fastkd::function));                                    \
  }

namespace fastkd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: return Type::kBFloat16;
    case ScalarType::Half: return Type::kHalf;
    case ScalarType::Double: return Type::kDouble;
    default: return Type::kFloat;
  }
}

inline ScalarType working_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Dtype of a gradient that is computed along with its loss, before the loss scale is known: float16
// would lose the small entries that the scale is meant to save.
inline ScalarType gradient_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Half ? ScalarType::Float : x.scalar_type();
}

template <typename T>
inline T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// x (R, n), the last dimension dense.
inline Rows rows_of(const Tensor& x) {
  return {data<char>(x), x.stride(0), x.size(1), type_of(x)};
}

// Checks of an operator's tensors. Exported and compiled graphs call operators without the public
// functions, which check more and say it better. Device and layout are the dispatcher's to check: a
// tensor that is not a dense one on the CPU takes the call to another kernel.
enum class Strides {
  kRows,        // the last dimension dense
  kWritten,     // and rows that don't overlap
  kContiguous,
  kAny,
};
constexpr int64_t kAnySize = -1;
using Shape = std::initializer_list<int64_t>;

void check(const Tensor& x, const char* name, ScalarType type, Shape sizes,
           Strides strides = Strides::kRows);
inline void check(const std::optional<Tensor>& x, const char* name, ScalarType type, Shape sizes,
                  Strides strides = Strides::kAny) {
  if (x) check(*x, name, type, sizes, strides);
}

// The dtype of x, one of the four that losses take.
ScalarType check_floating(const Tensor& x, const char* name);

// A scalar, or where ``rows`` is not kAnySize (rows,) too.
void check_numbers(const std::optional<Tensor>& x, const char* name, int64_t rows = kAnySize);

// Indices from 0 to ``end`` - 1, as int64 (count,).
void check_places(const std::optional<Tensor>& x, const char* name, int64_t count, int64_t end);

// Makes page faults of x, which is new and contiguous, cheaper. Contents and pages shared with
// other memory stay as they are.
void take_pages(const Tensor& x);

// out (M, N) = a (M, K) · b (K, N), or with ``add`` out += a · b, only where `has_half_product`. b
// is bfloat16; a is bfloat16, or float32 that is rounded to bfloat16. Sums are float32; an ``out``
// of bfloat16, without ``add``, holds them rounded once.
void half_product(const Tensor& out, const Tensor& a, const Tensor& b, bool add,
                  const std::string& unit = "fastest");

// A new tensor that may be large.
inline Tensor new_large(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  const Tensor x = torch::stable::new_empty(like, sizes, type);
  // The C library often returns blocks of this size to the system, and requests them again in each
  // step.
  if (x.numel() * x.element_size() >= 1 << 22) take_pages(x);
  return x;
}

// The numbers of a vector; a scalar repeats.
inline Rows numbers_of(const Tensor& x) {
  return {data<char>(x), x.dim() ? x.stride(0) : 0, 1, type_of(x)};
}

inline double value_of(const Tensor& scalar) {
  if (scalar.scalar_type() == ScalarType::Long) return double(*data<int64_t>(scalar));
  return numbers_of(scalar).get(0);
}

// A scalar of the working dtype of ``like``.
inline Tensor scalar(double value, const Tensor& like) {
  const Tensor result = torch::stable::new_empty(like, {}, working_type(like));
  numbers_of(result).put(0, value);
  return result;
}

// Calls body(begin, end) on threads, for rows of ``bytes`` each. A thread gets work for
// microseconds at least.
template <typename Body>
inline void each_row(int64_t rows, int64_t bytes, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(bytes, 1));
  parallel_for(0, rows, grain, body);
}

}  // namespace fastkd
