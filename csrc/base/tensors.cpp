// The checks of operators' tensors.
#include "base/tensors.h"

#include <sstream>

namespace fastkd {
namespace {

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

bool is_floating(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float ||
         type == ScalarType::Double;
}

template <typename List>
void put_sizes(std::ostringstream& text, const List& sizes) {
  const char* between = "(";
  for (const int64_t size : sizes) {
    text << between;
    size == kAnySize ? text << "any" : text << size;
    between = ", ";
  }
  text << (sizes.size() ? ")" : "()");
}

bool has_sizes(const Tensor& x, Shape sizes) {
  const auto found = x.sizes();
  if (found.size() != sizes.size()) return false;
  return std::equal(sizes.begin(), sizes.end(), found.begin(),
                    [](int64_t size, int64_t own) { return size == kAnySize || size == own; });
}

bool has_strides(const Tensor& x, Strides strides) {
  const int64_t last = x.dim() - 1;
  if (strides == Strides::kAny || last < 0 || x.numel() == 0) return true;
  if (strides == Strides::kContiguous) return x.is_contiguous();
  if (x.size(last) > 1 && x.stride(last) != 1) return false;
  return strides == Strides::kRows || last == 0 || x.size(0) < 2 || x.stride(0) >= x.size(last);
}

}  // namespace

void check(const Tensor& x, const char* name, ScalarType type, Shape sizes, Strides strides) {
  if (x.scalar_type() != type || !has_sizes(x, sizes)) {
    std::ostringstream text;
    text << name << ": " << name_of(x.scalar_type()) << " ";
    put_sizes(text, x.sizes());
    text << ", but this operator needs " << name_of(type) << " ";
    put_sizes(text, sizes);
    throw std::runtime_error(text.str());
  }
  if (!has_strides(x, strides)) {
    throw std::runtime_error(std::string(name) + ": strides that this operator can't take; pass " +
                             name + ".contiguous()");
  }
}

ScalarType check_floating(const Tensor& x, const char* name) {
  const ScalarType type = x.scalar_type();
  if (is_floating(type)) return type;
  throw std::runtime_error(std::string(name) + ": " + name_of(type) +
                           ", but this operator needs bfloat16, float16, float32 or float64");
}

void check_numbers(const std::optional<Tensor>& x, const char* name, int64_t rows) {
  if (!x) return;
  const ScalarType type = x->scalar_type();
  const bool is_scalar = x->dim() == 0;
  if ((is_scalar && rows == kAnySize && type == ScalarType::Long) ||
      (is_floating(type) && (is_scalar || (x->dim() == 1 && x->size(0) == rows)))) {
    return;
  }
  throw std::runtime_error(std::string(name) + ": a scalar" +
                           (rows == kAnySize ? "" : " or a number for each row") +
                           " of a floating dtype is needed");
}

void check_places(const std::optional<Tensor>& x, const char* name, int64_t count, int64_t end) {
  if (!x) return;
  check(*x, name, ScalarType::Long, {count}, Strides::kAny);
  const int64_t stride = x->stride(0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = data<int64_t>(*x)[i * stride];
    if (place < 0 || place >= end) {
      throw std::runtime_error(std::string(name) + ": " + std::to_string(place) +
                               " is not an index below " + std::to_string(end));
    }
  }
}

}  // namespace fastkd
