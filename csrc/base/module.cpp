// The Python module fastkd._C, and an operator that reports the width of the CPU kernels' vectors.
#include "base/module.h"

#include "base/processors.h"
#include "base/tensors.h"

namespace fastkd {

int64_t vector_bytes() {
  switch (processor) {
    case Processor::kAvx512: return 64;
    case Processor::kAvx2: return 32;
    default: return kBaselineBytes;
  }
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) { m.def("vector_bytes() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CompositeExplicitAutograd, m) {
  m.impl("vector_bytes", TORCH_BOX(&fastkd::vector_bytes));
}

FASTKD_PYTHON_MODULE(_C)
