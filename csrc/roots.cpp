// Batched square roots and inverse square roots of symmetric matrices on the CPU: the operators'
// schemas, and one matrix at a time on each thread.
#include <Python.h>

#include <vector>

#include "roots.h"
#include "thread_lanes.h"
#include "tridiagonal.h"

// One binary for every x86-64: the loader picks the clone that the processor can run.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTKD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define FASTKD_CLONES
#endif

namespace fastkd {

// The CPU's own: (values, eigenvectors in rows) of the symmetric part of ``in``, the matrix itself
// left in ruins. scratch: 2n² + 4n. False if the matrix holds NaN or inf.
template <typename T>
inline bool decompose_rows(const T* in, int64_t n, double* scratch) {
  double* a = scratch;
  double* spectrum = scratch + 2 * n * n;
  double largest = 0, poison = 0;  // 0·x is NaN for NaN and inf
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double x = double(in[i * n + j]) / 2 + double(in[j * n + i]) / 2;
      a[i * n + j] = x;
      largest = std::max(largest, std::abs(x));
      poison += 0 * x;
    }
  }
  if (poison != poison) return false;
  // Scaled to at most 1, so that no square overflows or vanishes.
  const double inverse_scale = largest > 0 ? 1 / largest : 1;
  for (int64_t i = 0; i < n * n; ++i) a[i] *= inverse_scale;
  if (!eigen_tridiagonal(a, spectrum, a + n * n, spectrum + n, n)) return false;
  for (int64_t k = 0; k < n; ++k) spectrum[k] *= largest;
  return true;
}

template <typename T>
inline bool decompose_and_root(const T* in, int64_t n, Options options, T* root, T* values,
                               T* vectors, double* scratch) {
  if (!decompose_rows(in, n, scratch)) return false;
  double *sum = scratch, *rows = sum + n * n, *spectrum = rows + n * n;
  if (root) {
    std::fill(sum, sum + n * n, 0.0);  // the upper triangle
    for (int64_t k = 0; k < n; ++k) spectrum[k] = std::max(spectrum[k], 0.0) + options.ridge;
  }
  for (int64_t k = 0; k < n; ++k) {
    const double* row = rows + k * n;
    values[k] = T(spectrum[k]);
    for (int64_t i = 0; i < n; ++i) vectors[i * n + k] = T(row[i]);
    if (!root) continue;
    const double factor = root_of<T>(spectrum[k], spectrum[n - 1], options);
    for (int64_t i = 0; i < n; ++i) {
      const double left = factor * row[i];
      double* out = sum + i * n;
#pragma omp simd
      for (int64_t j = i; j < n; ++j) out[j] += left * row[j];
    }
  }
  if (!root) return true;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) root[i * n + j] = root[j * n + i] = T(sum[i * n + j]);
  }
  return true;
}

FASTKD_CLONES bool roots_of(const float* in, int64_t n, Options options, float* root,
                            float* values, float* vectors, double* scratch) {
  return decompose_and_root(in, n, options, root, values, vectors, scratch);
}

FASTKD_CLONES bool roots_of(const double* in, int64_t n, Options options, double* root,
                            double* values, double* vectors, double* scratch) {
  return decompose_and_root(in, n, options, root, values, vectors, scratch);
}

// One matrix after the other on each thread; ``root`` may be null.
template <typename T>
void each_matrix(const T* in, Sizes sizes, Options options, T* root, T* values, T* vectors) {
  const auto [batch, n] = sizes;
  const int64_t grain = std::max<int64_t>(1, 50000 / (n * n * n));  // tens of microseconds
  torch::stable::parallel_for(0, batch, grain, [&, n = n](int64_t begin, int64_t end) {
    std::vector<double> scratch(2 * n * n + 4 * n);
    const T nan = std::numeric_limits<T>::quiet_NaN();
    for (int64_t i = begin; i < end; ++i) {
      T* here[] = {root ? root + i * n * n : nullptr, values + i * n, vectors + i * n * n};
      if (roots_of(in + i * n * n, n, options, here[0], here[1], here[2], scratch.data())) continue;
      if (root) std::fill(here[0], here[0] + n * n, nan);
      std::fill(here[1], here[1] + n, nan);
      std::fill(here[2], here[2] + n * n, nan);
    }
  });
}

template <typename T>
void each_root(const Tensor& a, Sizes sizes, Options options, const Roots& roots) {
  each_matrix(a.const_data_ptr<T>(), sizes, options, std::get<0>(roots).mutable_data_ptr<T>(),
              std::get<1>(roots).mutable_data_ptr<T>(), std::get<2>(roots).mutable_data_ptr<T>());
}

Roots roots_cpu(const Tensor& input, Options options) {
  const Sizes sizes = check_square(input);
  const Tensor a = torch::stable::contiguous(input);
  const Roots roots = allocate(a);
  if (sizes.batch == 0 || sizes.n == 0) return roots;
  if (a.scalar_type() == torch::headeronly::ScalarType::Double) {
    each_root<double>(a, sizes, options, roots);
  } else {
    each_root<float>(a, sizes, options, roots);
  }
  return roots;
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

template <typename T>
void each_block(const Tensor& a, Sizes sizes, Options options, int64_t warps, const Roots& roots) {
  using Lanes = ThreadLanes<3>;
  const auto [batch, n] = sizes;
  std::vector<char> matrices(EigenScratch::matrices_size(n)), vectors(EigenScratch::vectors_size(n));
  const EigenScratch scratch(n, matrices.data(), vectors.data());
  for (int64_t i = 0; i < batch; ++i) {
    T* root = std::get<0>(roots).mutable_data_ptr<T>() + i * n * n;
    Lanes::run(int(warps) * Lanes::kWarp, [&, n = n](const Lanes& lanes) {
      decompose<T>(a.const_data_ptr<T>() + i * n * n, options, root,
                   std::get<1>(roots).mutable_data_ptr<T>() + i * n,
                   std::get<2>(roots).mutable_data_ptr<T>() + i * n * n, scratch, lanes);
    });
  }
}

// The CUDA kernel's algorithm on threads, so that it is tested without a GPU.
Roots roots_by_threads(const Tensor& input, bool inverse, double ridge, int64_t warps) {
  const Sizes sizes = check_square(input);
  STD_TORCH_CHECK(warps >= 1 && warps <= kMostWarps, "warps must be 1 to ", kMostWarps);
  const Tensor a = torch::stable::contiguous(input);
  const Roots roots = allocate(a);
  if (sizes.batch == 0 || sizes.n == 0) return roots;
  if (a.scalar_type() == torch::headeronly::ScalarType::Double) {
    each_block<double>(a, sizes, {inverse, ridge}, warps, roots);
  } else {
    each_block<float>(a, sizes, {inverse, ridge}, warps, roots);
  }
  return roots;
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd, m) {
  m.def("sqrtm(Tensor a) -> (Tensor root, Tensor values, Tensor vectors)");
  m.def("inv_sqrtm(Tensor a, float ridge) -> (Tensor root, Tensor values, Tensor vectors)");
  m.def("eigh(Tensor a) -> (Tensor values, Tensor vectors)");
  m.def(
      "roots_by_threads(Tensor a, bool inverse, float ridge, int warps)"
      " -> (Tensor root, Tensor values, Tensor vectors)");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd, CPU, m) {
  m.impl("sqrtm", TORCH_BOX(&fastkd::sqrtm_cpu));
  m.impl("inv_sqrtm", TORCH_BOX(&fastkd::inv_sqrtm_cpu));
  m.impl("eigh", TORCH_BOX(&fastkd::eigh_cpu));
  m.impl("roots_by_threads", TORCH_BOX(&fastkd::roots_by_threads));
}

FASTKD_PYTHON_MODULE(_C)
