// Square roots of symmetric positive semi-definite matrices: the operators, and what runs on a CPU
// or by PyTorch's operators on any device.
#include <vector>

#include "base/parallel.h"
#include "linalg/roots.h"
#include "linalg/roots_tensors.h"

#define FASTKD_KERNELS "linalg/roots_kernels.h"
#include "base/each_processor.h"

namespace fastkd {

// Largest n for which a core decomposes matrices faster by itself than LAPACK does.
constexpr int64_t kLargest = 96;

Eigen eigh_cpu(const Tensor& input) {
  check_matrices(input);
  if (input.size(-1) > kLargest) return eigh_by_pytorch(input);
  return decompose_all(input, [](const double* in, int64_t batch, int64_t n, double* values,
                                 double* vectors) {
    const int64_t grain = std::max<int64_t>(1, 50000 / (n * n * n));  // tens of microseconds
    parallel_for(0, batch, grain, [=](int64_t begin, int64_t end) {
      std::vector<char> memory(EigenScratch::matrices_size(n) + EigenScratch::vectors_size(n));
      const EigenScratch scratch(n, memory.data(), memory.data() + EigenScratch::matrices_size(n));
      for (int64_t i = begin; i < end; ++i) {
        FASTKD_CALL(eigen_of, in + i * n * n, values + i * n, vectors + i * n * n, scratch);
      }
    });
  });
}

Eigen eigh(const Tensor& a) {
  check_matrices(a);
  return eigh_by_pytorch(a);
}

// ``digits`` on a CPU: a test of what a GPU runs.
Roots symmetric_roots_cpu(const Tensor& a, const std::optional<Tensor> zero, bool digits) {
  return in_float64(a, zero, [&](const Tensor& a, const auto& zero) {
    return digits ? by_pytorch(a, zero, digits) : roots_of(eigh_cpu(a), zero);
  });
}

// Coefficients (a, b, c) of polynomials x(a + bx² + cx⁴), for x = √λ: the first stretch small
// values most while the others stay below 2, with a margin of 1% for rounding (Amsel et al. 2025,
// "The Polar Express"), the next gather large values at 1. The last send small values to 0.
constexpr double kStretch[3] = {4.1199, -2.8752, 0.5167}, kGather[3] = {0, 2.5, -1.5};
const std::vector<const double*>& steps() {
  static constexpr double first[3] = {7.5657, -17.8052, 10.7894};
  static constexpr double last[3][3] = {
      {2.7983, -1.7271, 0.3015}, {2.1328, -1.5145, 0.4028}, {1.879, -1.2542, 0.3752}};
  static const std::vector<const double*> all = [] {
    std::vector<const double*> steps{first};
    steps.insert(steps.end(), 8, kStretch);
    for (const auto& step : last) steps.push_back(step);
    steps.insert(steps.end(), 4, kGather);
    return steps;
  }();
  return all;
}

// Roots by products alone, which never make the host wait for a GPU: with Y₀ = A, Z₀ = I and the
// polynomial p of G = ZY, Y ← Yp and Z ← pZ converge to A^½ and A^{−½}. √λ from 1e-6 of the norm on
// are regular, those below 1e-7 zero. ``digits``: the products are those of `fastkd.kernels.cca`.
Roots roots_by_products(const Tensor& a, bool digits) {
  check_matrices(a);
  const int64_t n = a.size(-1);
  if (a.numel() == 0) {
    return roots_of({stable::sum(a, std::array<int64_t, 1>{-1}), a}, std::nullopt);
  }
  Tensor x = stable::reshape(a, std::array<int64_t, 3>{-1, n, n});
  const auto times = [](const Tensor& x, const Tensor& y) {
    return call("aten::mul", "Tensor", x, y);
  };
  const auto product = [&](const Tensor& x, const Tensor& y) {
    if (digits) return call("fastkd::digit_product", "", x, y, false);
    return call("aten::bmm", "", x, y);
  };
  const std::array<int64_t, 2> last{-2, -1};
  const Tensor least = number(a, std::numeric_limits<double>::min()), one = number(a, 1);
  const Tensor largest = stable::amax(call("aten::abs", "", x), last, true);
  const Tensor size = call("aten::maximum", "", largest, least);
  x = call("aten::where", "self", call("aten::lt", "Tensor", largest, least), number(a, 0),
           call("aten::div", "Tensor", x, size));
  const Tensor squares = stable::sum(times(x, x), last, true);
  const Tensor norm = call("aten::maximum", "", call("aten::sqrt", "", squares), one);
  Tensor y = call("aten::div", "Tensor", x, norm), z, polynomial;
  const Tensor eye = call("aten::diag_embed", "",
                          stable::full({n}, 1, ScalarType::Double, std::nullopt, a.device()),
                          int64_t(0), int64_t(0), int64_t(1));
  bool begins = true;
  for (const double* step : steps()) {
    const Tensor gram = begins ? y : product(z, y);
    const Tensor curved = add(times(gram, number(a, step[1])), product(gram, gram), step[2]);
    polynomial = add(curved, eye, step[0]);
    y = product(y, polynomial);
    z = begins ? polynomial : product(polynomial, z);
    begins = false;
  }
  // The last polynomial is a projection: rounding errors along zero directions are left on one side.
  polynomial = stable::transpose(polynomial, -1, -2);
  y = product(polynomial, y);
  z = product(z, polynomial);
  const Tensor scale = times(call("aten::sqrt", "", size), call("aten::sqrt", "", norm));
  const Tensor rank = call("aten::round", "", stable::sum(times(y, z), last));
  const auto shaped = [&](const Tensor& root) {
    const Tensor skew = stable::subtract(root, stable::transpose(root, -1, -2));
    return stable::reshape(add(root, skew, -0.5), a.sizes());
  };
  return {shaped(times(y, scale)), shaped(call("aten::div", "Tensor", z, scale)),
          stable::reshape(stable::to(rank, ScalarType::Long), {a.sizes().data(), a.sizes().size() - 2})};
}

// On a GPU without the CUDA part.
Roots symmetric_roots(const Tensor& a, const std::optional<Tensor> zero, bool digits) {
  return in_float64(a, zero, [&](const Tensor& a, const auto& zero) {
    return by_pytorch(a, zero, digits);
  });
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd, m) {
  m.def("eigh(Tensor a) -> (Tensor values, Tensor vectors)");
  m.def(
      "symmetric_roots(Tensor a, Tensor? zero=None, bool digits=False) "
      "-> (Tensor root, Tensor inverse, Tensor rank)");
  m.def("roots_by_products(Tensor a, bool digits=False) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd, CPU, m) {
  m.impl("eigh", TORCH_BOX(&fastkd::eigh_cpu));
  m.impl("symmetric_roots", TORCH_BOX(&fastkd::symmetric_roots_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(fastkd, CompositeExplicitAutograd, m) {
  m.impl("eigh", TORCH_BOX(&fastkd::eigh));
  m.impl("symmetric_roots", TORCH_BOX(&fastkd::symmetric_roots));
  m.impl("roots_by_products", TORCH_BOX(&fastkd::roots_by_products));
}
