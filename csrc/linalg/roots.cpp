// Square roots and inverse square roots of batches of symmetric matrices on the CPU, one matrix per
// thread at a time. Also the schemas of the operators.
#include <vector>

#include "base/parallel.h"
#include "linalg/roots.h"
#include "linalg/roots_tensors.h"

#define FASTKD_KERNELS "linalg/roots_kernels.h"
#include "base/each_processor.h"

namespace fastkd {

// ``root`` may be null, see `decompose`.
template <typename T>
void each_matrix(const T* in, Sizes sizes, Options options, T* root, T* values, T* vectors) {
  const auto [batch, n] = sizes;
  const int64_t grain = std::max<int64_t>(1, 50000 / (n * n * n));  // tens of microseconds
  parallel_for(0, batch, grain, [&, n = n](int64_t begin, int64_t end) {
    std::vector<char> memory(EigenScratch::matrices_size(n) + EigenScratch::vectors_size(n));
    const EigenScratch scratch(n, memory.data(), memory.data() + EigenScratch::matrices_size(n));
    for (int64_t i = begin; i < end; ++i) {
      FASTKD_CALL(roots_of, in + i * n * n, options, root ? root + i * n * n : nullptr,
                  values + i * n, vectors + i * n * n, scratch);
    }
  });
}

Roots roots_cpu(const Tensor& input, Options options) {
  return each_type(input, [=](const auto* in, Sizes sizes, auto*... results) {
    each_matrix(in, sizes, options, results...);
  });
}

Roots sqrtm_cpu(const Tensor& a) { return roots_cpu(a, {false, 0}); }

Roots inv_sqrtm_cpu(const Tensor& a, double ridge) { return roots_cpu(a, {true, ridge}); }

Eigen eigh_cpu(const Tensor& input) {
  const Sizes sizes = check_square_float64(input);
  const Tensor a = torch::stable::contiguous(input);
  const auto [values, vectors] = allocate_eigen(a);
  if (sizes.batch > 0 && sizes.n > 0) {
    each_matrix<double>(a.const_data_ptr<double>(), sizes, {}, nullptr,
                        values.mutable_data_ptr<double>(), vectors.mutable_data_ptr<double>());
  }
  return {values, vectors};
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd, m) {
  m.def("sqrtm(Tensor a) -> (Tensor root, Tensor values, Tensor vectors)");
  m.def("inv_sqrtm(Tensor a, float ridge) -> (Tensor root, Tensor values, Tensor vectors)");
  m.def("eigh(Tensor a) -> (Tensor values, Tensor vectors)");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd, CPU, m) {
  m.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cpu));
  m.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cpu));
  m.impl("eigh", TORCH_BOX(&fastkd::eigh_cpu));
}
