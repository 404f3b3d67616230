#pragma once

#include "linalg/roots.h"
#include "linalg/roots_tensors.h"

namespace fastkd {

#if defined(CPU_KERNEL)
Roots sqrtm_cpu(const Tensor& a);
Roots inv_sqrtm_cpu(const Tensor& a, double ridge);
#elif defined(CUDA_KERNEL)
Roots sqrtm_cuda(const Tensor& a);
Roots inv_sqrtm_cuda(const Tensor& a, double ridge);
#endif

}  // namespace fastkd
