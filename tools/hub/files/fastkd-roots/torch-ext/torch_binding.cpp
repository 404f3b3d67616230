#include "registration.h"
#include "torch_binding.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("sqrtm(Tensor a) -> (Tensor root, Tensor values, Tensor vectors)");
  ops.def("inv_sqrtm(Tensor a, float ridge) -> (Tensor root, Tensor values, Tensor vectors)");
}

#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cpu));
  ops.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cpu));
}
#elif defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cuda));
  ops.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cuda));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
