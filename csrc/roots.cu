// The same on CUDA for small matrices: one block per matrix, Jacobi rotations in shared memory, no
// answer from the device is waited for.
#include <Python.h>
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include "jacobi.h"
#include "roots.h"

namespace fastkd {

struct BlockLanes {
  int index, count;
  __device__ void sync() const { __syncthreads(); }
};

template <typename T>
__global__ void jacobi_roots_kernel(const T* __restrict__ in, int n, Options options,
                                    T* __restrict__ root, T* __restrict__ values,
                                    T* __restrict__ vectors) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int64_t item = blockIdx.x, size = int64_t(n) * n;
  const BlockLanes lanes{int(threadIdx.x), int(blockDim.x)};
  jacobi_roots<T>(in + item * size, n, options, root + item * size, values + item * n,
                  vectors + item * size, JacobiScratch(memory, n, lanes.count), lanes);
}

template <typename T>
void launch(const Tensor& a, Sizes sizes, Options options, const Roots& roots) {
  const int n = int(sizes.n);
  const int lanes = n <= 8 ? 32 : n <= 32 ? 128 : 512;
  const size_t shared = JacobiScratch::bytes(n, lanes);
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  STD_TORCH_CHECK(shared <= size_t(most), "matrices of n = ", n, " need ", shared,
                  " bytes of shared memory, and this GPU has ", most);
  STD_CUDA_CHECK(cudaFuncSetAttribute(jacobi_roots_kernel<T>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  jacobi_roots_kernel<T><<<unsigned(sizes.batch), lanes, shared, cudaStream_t(stream)>>>(
      a.const_data_ptr<T>(), n, options, std::get<0>(roots).mutable_data_ptr<T>(),
      std::get<1>(roots).mutable_data_ptr<T>(), std::get<2>(roots).mutable_data_ptr<T>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Roots roots_cuda(const Tensor& input, Options options) {
  const Sizes sizes = check_square(input);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor a = torch::stable::contiguous(input);
  const Roots roots = allocate(a);
  if (sizes.batch == 0 || sizes.n == 0) return roots;
  if (a.scalar_type() == torch::headeronly::ScalarType::Double) {
    launch<double>(a, sizes, options, roots);
  } else {
    launch<float>(a, sizes, options, roots);
  }
  return roots;
}

Roots sqrtm_cuda(const Tensor& a) { return roots_cuda(a, {false, 0}); }

Roots inv_sqrtm_cuda(const Tensor& a, double ridge) { return roots_cuda(a, {true, ridge}); }

}  // namespace fastkd

STABLE_TORCH_LIBRARY_IMPL(fastkd, CUDA, m) {
  m.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cuda));
  m.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cuda));
}

FASTKD_PYTHON_MODULE(_C_cuda)
