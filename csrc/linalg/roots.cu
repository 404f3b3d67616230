// Eigenvectors of symmetric matrices on CUDA: one block per matrix, or one warp for small matrices. The host never
// waits for the device. A matrix and its eigenvectors are in shared memory if they fit.
#include "base/module.h"

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <mutex>
#include <set>
#include <utility>

#include "linalg/roots.h"
#include "linalg/roots_tensors.h"

namespace fastkd {

// Largest n, and largest n² for each matrix of a batch, of the kernel.
constexpr int64_t kLargest = 256, kLargestSquare = 5500;

struct WarpLanes {
  static constexpr int kWarp = 32, count = kWarp;
  static constexpr bool kOneWarp = true;
  int index;

  __device__ void sync() const { __syncwarp(); }

  __device__ double warp_sum(double x) const {
    for (int other = kWarp / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
  }

  __device__ double warp_max(double x) const {
    for (int other = kWarp / 2; other > 0; other /= 2) {
      x = larger(x, __shfl_xor_sync(~0u, x, other));
    }
    return x;
  }

  __device__ int first(bool mine) const {
    const unsigned all = __ballot_sync(~0u, mine);
    return all ? __ffs(all) - 1 : kWarp;
  }

  template <typename Body>
  __device__ void each(int n, const Body& body) const {
    if (index < n) body(index);
  }
};

struct BlockLanes : WarpLanes {
  static constexpr int count = 512;
  static constexpr bool kOneWarp = false;

  __device__ void sync() const { __syncthreads(); }
};

// ``scratch`` (batch, bytes) holds what does not fit into shared memory: nothing, the matrices or
// everything.
template <typename Lanes>
__global__ void __launch_bounds__(Lanes::count, 1)
    eigen_kernel(const double* __restrict__ in, int64_t n, double* __restrict__ values,
                 double* __restrict__ vectors, unsigned char* scratch, int64_t bytes,
                 bool vectors_in_shared) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int64_t item = blockIdx.x, size = n * n;
  const Lanes lanes{int(threadIdx.x)};
  const bool all_in_shared = Lanes::kOneWarp || !scratch;
  unsigned char* matrices = all_in_shared ? memory : scratch + item * bytes;
  unsigned char* rest = matrices + EigenScratch::matrices_size(n);
  if (!all_in_shared && vectors_in_shared) rest = memory;
  decompose(in + item * size, values + item * n, vectors + item * size,
            EigenScratch(n, matrices, rest), lanes);
}

// Lets launches of a kernel use ``most`` bytes of shared memory. The setting is process-wide:
// setting it in each call would race with launches by other threads.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int device, int most) {
  static std::mutex mutex;
  static std::set<std::pair<Kernel*, int>> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device})) return;
  STD_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  allowed.insert({kernel, device});
}

void launch(const Tensor& a, const double* in, int64_t batch, int64_t n, double* values,
            double* vectors) {
  const bool small = n <= WarpLanes::kWarp;
  const auto kernel = small ? eigen_kernel<WarpLanes> : eigen_kernel<BlockLanes>;
  const int lanes = small ? WarpLanes::count : BlockLanes::count;
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const size_t vectors_size = EigenScratch::vectors_size(n);
  const size_t bytes = EigenScratch::matrices_size(n) + vectors_size;
  const bool vectors_in_shared = vectors_size <= size_t(most);
  size_t shared = bytes;
  Tensor memory;
  unsigned char* scratch = nullptr;
  if (bytes > size_t(most)) {
    shared = vectors_in_shared ? vectors_size : 0;
    const int64_t size = batch * int64_t(bytes);
    memory = torch::stable::new_empty(a, {&size, 1}, torch::headeronly::ScalarType::Byte);
    scratch = static_cast<unsigned char*>(memory.mutable_data_ptr());
  }
  allow_shared_memory(kernel, device, most);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  kernel<<<unsigned(batch), lanes, shared, cudaStream_t(stream)>>>(
      in, n, values, vectors, scratch, int64_t(bytes), vectors_in_shared);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Whether the GPU runs the kernel, and a block for each matrix is worth it.
bool has_kernel(const Tensor& a) {
  const int64_t n = a.size(-1), batch = n ? a.numel() / (n * n) : 0;
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                        a.get_device_index()));
  return major >= 8 && n <= kLargest && n * n <= kLargestSquare * std::max<int64_t>(batch, 1);
}

Eigen eigh_cuda(const Tensor& a) {
  check_matrices(a);
  if (!has_kernel(a)) return eigh_by_pytorch(a);
  const stable::accelerator::DeviceGuard guard(a.get_device_index());
  return decompose_all(a, [&](auto... arguments) { launch(a, arguments...); });
}

Roots symmetric_roots_cuda(const Tensor& a, const std::optional<Tensor> zero, bool digits) {
  return in_float64(a, zero, [&](const Tensor& a, const auto& zero) {
    return has_kernel(a) ? roots_of(eigh_cuda(a), zero) : by_pytorch(a, zero, digits);
  });
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY_IMPL(fastkd, CUDA, m) {
  m.impl("eigh", TORCH_BOX(&fastkd::eigh_cuda));
  m.impl("symmetric_roots", TORCH_BOX(&fastkd::symmetric_roots_cuda));
}

FASTKD_PYTHON_MODULE(_C_cuda)
