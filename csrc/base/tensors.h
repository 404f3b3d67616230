// What the row kernels' operators share: tensors as rows, scalars, threads.
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

// Of a gradient made along with its loss: what a loss scale saves, float16 would have lost by then.
inline ScalarType gradient_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Half ? ScalarType::Float : x.scalar_type();
}

template <typename T>
inline T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// (R, n), the last dimension dense.
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

// Makes the first touch of x, which is new, cost less; no more memory, since pages it shares with
// others stay as they are.
void take_pages(const Tensor& x);

// out (M, N) = a (M, K) of bfloat16, or of float32 rounded to it, times b (K, N) of bfloat16, or
// that is added to it; only where `has_half_product`. Nothing is added to an ``out`` of bfloat16,
// which takes the sums rounded once.
void half_product(const Tensor& out, const Tensor& a, const Tensor& b, bool add,
                  const std::string& unit = "fastest");

// For a gradient as large as what it is of.
inline Tensor new_large(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  const Tensor x = torch::stable::new_empty(like, sizes, type);
  // So much the C library often gives back to the system, and takes from there again in each step.
  if (x.numel() * x.element_size() >= 1 << 22) take_pages(x);
  return x;
}

// A vector, or a scalar, which then is all of its numbers.
inline Rows numbers_of(const Tensor& x) {
  return {data<char>(x), x.dim() ? x.stride(0) : 0, 1, type_of(x)};
}

inline double value_of(const Tensor& scalar) {
  if (scalar.scalar_type() == ScalarType::Long) return double(*data<int64_t>(scalar));
  return numbers_of(scalar).get(0);
}

// A scalar of the type that ``like`` is computed in.
inline Tensor scalar(double value, const Tensor& like) {
  const Tensor result = torch::stable::new_empty(like, {}, working_type(like));
  numbers_of(result).put(0, value);
  return result;
}

// body(begin, end) on the threads, of rows of so many bytes; no less than takes microseconds.
template <typename Body>
inline void each_row(int64_t rows, int64_t bytes, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(bytes, 1));
  parallel_for(0, rows, grain, body);
}

}  // namespace fastkd
