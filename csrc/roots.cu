// The same on CUDA: one block per matrix, no answer from the device is waited for. A matrix and its
// eigenvectors lie in shared memory if they fit.
#include <Python.h>
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include "roots.h"

namespace fastkd {

struct BlockLanes {
  static constexpr int kWarp = 32;
  int index, count;

  __device__ void sync() const { __syncthreads(); }

  __device__ double warp_sum(double x) const {
    for (int other = kWarp / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
  }
};

// A warp at least for finding rotations and one for applying them; more for more rows.
inline int lanes_for(int64_t n) { return n <= 16 ? 64 : n <= 32 ? 128 : 512; }

// ``scratch`` (batch, 2, n, n), or null: then the matrices are in shared memory.
template <typename T>
__global__ void __launch_bounds__(512, 1)
    eigen_roots_kernel(const T* __restrict__ in, int64_t n, Options options, T* __restrict__ root,
                       T* __restrict__ values, T* __restrict__ vectors, double* scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int64_t item = blockIdx.x, size = n * n;
  const BlockLanes lanes{int(threadIdx.x), int(blockDim.x)};
  void* matrices = memory;
  if (scratch) matrices = scratch + item * 2 * EigenScratch::matrix(n);
  void* rest = scratch ? memory : memory + EigenScratch::matrices_size(n);
  decompose<T>(in + item * size, options, root ? root + item * size : root, values + item * n,
               vectors + item * size, EigenScratch(n, matrices, rest), lanes);
}

template <typename T>
void launch(const Tensor& a, Sizes sizes, Options options, T* root, const Tensor& values,
            const Tensor& vectors) {
  const auto [batch, n] = sizes;
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  size_t shared = EigenScratch::matrices_size(n) + EigenScratch::vectors_size(n);
  Tensor memory;
  double* scratch = nullptr;
  if (shared > size_t(most)) {
    shared = EigenScratch::vectors_size(n);
    const int64_t size[] = {batch, 2, n, n};
    memory = torch::stable::new_empty(a, {size, 4}, torch::headeronly::ScalarType::Double);
    scratch = memory.mutable_data_ptr<double>();
  }
  STD_TORCH_CHECK(shared <= size_t(most), "n = ", n, " is too large: ", shared,
                  " bytes of shared memory, and this GPU has ", most);
  STD_CUDA_CHECK(cudaFuncSetAttribute(eigen_roots_kernel<T>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  eigen_roots_kernel<T><<<unsigned(batch), lanes_for(n), shared, cudaStream_t(stream)>>>(
      a.const_data_ptr<T>(), n, options, root, values.mutable_data_ptr<T>(),
      vectors.mutable_data_ptr<T>(), scratch);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Roots roots_cuda(const Tensor& input, Options options) {
  const Sizes sizes = check_square(input);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor a = torch::stable::contiguous(input);
  const Roots roots = allocate(a);
  if (sizes.batch == 0 || sizes.n == 0) return roots;
  const auto& [root, values, vectors] = roots;
  if (a.scalar_type() == torch::headeronly::ScalarType::Double) {
    launch<double>(a, sizes, options, root.mutable_data_ptr<double>(), values, vectors);
  } else {
    launch<float>(a, sizes, options, root.mutable_data_ptr<float>(), values, vectors);
  }
  return roots;
}

Roots sqrtm_cuda(const Tensor& a) { return roots_cuda(a, {false, 0}); }

Roots inv_sqrtm_cuda(const Tensor& a, double ridge) { return roots_cuda(a, {true, ridge}); }

Eigen eigh_cuda(const Tensor& input) {
  const Sizes sizes = check_square_float64(input);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor a = torch::stable::contiguous(input);
  const Eigen eigen = allocate_eigen(a);
  if (sizes.batch == 0 || sizes.n == 0) return eigen;
  const auto& [values, vectors] = eigen;
  launch<double>(a, sizes, {}, nullptr, values, vectors);
  return eigen;
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY_IMPL(fastkd, CUDA, m) {
  m.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cuda));
  m.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cuda));
  m.impl("eigh", TORCH_BOX(&fastkd::eigh_cuda));
}

FASTKD_PYTHON_MODULE(_C_cuda)
