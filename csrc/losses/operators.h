// Helpers shared by the operators of the losses.
//
// An operator checks its tensors, reads them as rows, lets threads share the rows, and returns the
// loss and, if requested, its gradient. `reduction` is "none", "sum" or "mean" ("batchmean" for
// soft targets).
#pragma once

#include "base/tensors.h"

namespace fastkd {

using Mask = std::optional<Tensor>;  // bool

inline double total(const std::vector<double>& losses) {
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum;
}

// A scalar, or with reduction "none" a tensor of shape ``samples``.
inline Tensor new_losses(const Tensor& like, const std::string& reduction,
                         std::vector<int64_t> samples) {
  if (reduction != "none") samples.clear();
  return torch::stable::new_empty(like, samples, working_type(like));
}

// Writes the losses, or their sum where ``result`` is a scalar.
inline void put_losses(const std::vector<double>& losses, const Tensor& result) {
  const Rows numbers{data<char>(result), 1, 1, type_of(result)};
  if (result.dim() == 0) return numbers.put(0, total(losses));
  for (size_t i = 0; i < losses.size(); ++i) numbers.put(i, losses[i]);
}

// Divisor of the sum: the number of ``compared`` samples for reduction "mean", at least 1; else 1.
inline double divisor_of(const std::string& reduction, int64_t compared) {
  return reduction == "mean" ? double(std::max<int64_t>(compared, 1)) : 1;
}

// The mask's bytes, or null without a mask. ``holder`` keeps the memory alive.
inline const bool* bytes_of(const Mask& mask, Tensor& holder) {
  if (!mask) return nullptr;
  holder = torch::stable::contiguous(*mask);
  return data<const bool>(holder);
}

// Numbers (R,) below ``end``, or null. ``holder`` keeps the memory alive.
inline const int64_t* places_of(const std::optional<Tensor>& x, const char* name, int64_t R,
                                int64_t end, Tensor& holder) {
  check_places(x, name, R, end);
  if (!x) return nullptr;
  holder = torch::stable::contiguous(*x);
  return data<const int64_t>(holder);
}

// x (samples, positions, D), the last dimension dense.
inline Positions positions_of(const Tensor& x) {
  return {data<char>(x), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), type_of(x)};
}

}  // namespace fastkd
