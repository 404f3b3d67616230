// Eigenvectors of batches of symmetric matrices on the CPU, one matrix per thread at a time. Also
// the operator's schema.
#include <vector>

#include "base/parallel.h"
#include "linalg/roots.h"
#include "linalg/roots_tensors.h"

#define FASTKD_KERNELS "linalg/roots_kernels.h"
#include "base/each_processor.h"

namespace fastkd {

Eigen eigh_cpu(const Tensor& input) {
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

}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd, m) { m.def("eigh(Tensor a) -> (Tensor values, Tensor vectors)"); }

STABLE_TORCH_LIBRARY_IMPL(fastkd, CPU, m) { m.impl("eigh", TORCH_BOX(&fastkd::eigh_cpu)); }
