// Canonical correlations and their gradient, one item per thread, by LAPACK in float64: the
// equations of `fastkd.linalg.cca_solver` with covariances. LAPACK computes eigenvectors on one
// thread anyway, so items of a few hundred dimensions are best solved side by side.
//
// torch's stable functions stop at matrix products; `Mkl` has LAPACK's functions, from torch's own
// library. Each call runs on one thread, so results have the same bits on any number of threads.
//
// Matrices are stored by columns, as in LAPACK, so features are stored transposed.
#include <cmath>
#include <memory>

#include "base/tensors.h"

#if defined(__linux__) || defined(__APPLE__)
#include <dlfcn.h>
#define FASTKD_DLFCN
#endif

namespace fastkd {
namespace {

struct Matrix {
  double* data;
  int rows, columns;

  double* column(int i) const { return data + int64_t(i) * rows; }
  Matrix first(int count) const { return {data, rows, count}; }
  Matrix from(int start) const { return {column(start), rows, columns - start}; }
  int64_t size() const { return int64_t(rows) * columns; }
};

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "linalg/cca_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kRounding = std::numeric_limits<double>::epsilon();
// SMALL_SQUARE of cca_solver.py: singular values whose squares are below this fraction of the
// largest are computed again.
constexpr double kSmallSquare = 1e-3;

// The functions of torch's own MKL. They are looked up in torch's library and its dependencies: in
// the global scope a preloaded BLAS would be found first.
struct Mkl {
  int (*set_threads)(int count) = nullptr;
  void (*dgemm)(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
                const double* alpha, const double* a, const int* lda, const double* b,
                const int* ldb, const double* beta, double* c, const int* ldc) = nullptr;
  void (*sgemm)(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
                const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                const float* beta, float* c, const int* ldc) = nullptr;
  void (*dtrsm)(const char* side, const char* uplo, const char* trans, const char* diag,
                const int* m, const int* n, const double* alpha, const double* a, const int* lda,
                double* b, const int* ldb) = nullptr;
  void (*dpotrf)(const char* uplo, const int* n, double* a, const int* lda, int* info) = nullptr;
  void (*dsyevd)(const char* jobz, const char* uplo, const int* n, double* a, const int* lda,
                 double* w, double* work, const int* lwork, int* iwork, const int* liwork,
                 int* info) = nullptr;
  void (*dgesdd)(const char* jobz, const int* m, const int* n, double* a, const int* lda, double* s,
                 double* u, const int* ldu, double* vt, const int* ldvt, double* work,
                 const int* lwork, int* iwork, int* info) = nullptr;
  bool complete = false;  // all were found

  Mkl() {
#ifdef FASTKD_DLFCN
    Dl_info torch;
    if (!dladdr(reinterpret_cast<void*>(&torch_parallel_for), &torch)) return;
    void* const library = dlopen(torch.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function != nullptr;
    };
    find(set_threads, "MKL_Set_Num_Threads_Local");
    find(dgemm, "dgemm_");
    find(sgemm, "sgemm_");
    find(dtrsm, "dtrsm_");
    find(dpotrf, "dpotrf_");
    find(dsyevd, "dsyevd_");
    find(dgesdd, "dgesdd_");
    dlclose(library);  // torch keeps it
#endif
  }
};

const Mkl& mkl() {
  static const Mkl found;
  return found;
}

bool has_mkl() { return mkl().complete; }

// Checks a size for LAPACK, whose integers have 32 bits.
int lapack_size(int64_t size) {
  constexpr int kMost = std::numeric_limits<int>::max();
  STD_TORCH_CHECK(size <= kMost, "features: too many for LAPACK's 32-bit sizes; reduce them first");
  return int(size);
}

// While an object exists, MKL uses one thread for calls from this thread.
class Alone {
 public:
  Alone() : before_(mkl().set_threads(1)) {}
  ~Alone() { mkl().set_threads(before_); }

 private:
  const int before_;
};

// Memory aligned to cache lines: MKL's order of sums, and so the bits, depends on the alignment.
template <typename T>
class Room {
 public:
  explicit Room(int64_t n) : memory_(new T[n + kLine]) {
    const auto start = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = memory_.get() + (64 - start % 64) % 64 / sizeof(T);
  }
  T* data() const { return data_; }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  std::unique_ptr<T[]> memory_;
  T* data_;
};

class NewMatrix : public Matrix {
 public:
  NewMatrix(int rows, int columns) : room_(int64_t(rows) * columns) {
    data = room_.data(), this->rows = rows, this->columns = columns;
  }

 private:
  Room<double> room_;
};

void multiply(char trans_a, char trans_b, double alpha, const Matrix& a, const Matrix& b,
              double beta, const Matrix& c) {
  const int depth = trans_a == 'N' ? a.columns : a.rows;
  if (c.size() == 0) return;
  mkl().dgemm(&trans_a, &trans_b, &c.rows, &c.columns, &depth, &alpha, a.data, &a.rows, b.data,
              &b.rows, &beta, c.data, &c.rows);
}

// The lower triangle of c = alpha·AAᵀ ("N") or alpha·AᵀA ("T"), in blocks of columns.
void square(char trans, double alpha, const Matrix& a, const Matrix& c) {
  const double nothing = 0;
  const char other = trans == 'N' ? 'T' : 'N';
  const int n = c.rows, depth = trans == 'N' ? a.columns : a.rows, parts = n < 128 ? 1 : 4;
  for (int i = 0; i < parts; ++i) {
    const int start = i * n / parts, left = n - start, width = (i + 1) * n / parts - start;
    const double* from = trans == 'N' ? a.data + start : a.column(start);
    mkl().dgemm(&trans, &other, &left, &width, &depth, &alpha, from, &a.rows, from, &a.rows,
                &nothing, c.column(start) + start, &n);
  }
}

// x ← L⁻¹x, with side and transpose as in BLAS.
void solve(char side, char trans, const Matrix& lower, const Matrix& x) {
  const double one = 1;
  mkl().dtrsm(&side, "L", &trans, "N", &x.rows, &x.columns, &one, lower.data, &lower.rows, x.data,
              &x.rows);
}

// Singular value decomposition of M (rows ≥ columns), values ascending. ``found`` is false if
// LAPACK failed.
class Singular {
 public:
  explicit Singular(const Matrix& m) : left(m.rows, m.columns), right(m.columns, m.columns),
                                       values(m.columns) {
    const int n = m.columns;
    square('T', 1, m, right);
    if (!eigenvectors()) return;
    int low = 0;
    while (low < n && values[low] < kSmallSquare * values[n - 1]) ++low;
    if (4 * low > n) {
      std::copy_n(m.data, m.size(), left.data);
      std::fill_n(right.data, right.size(), 0.0);
      for (int i = 0; i < n; ++i) right.column(i)[i] = 1;
      found = decompose_again(n);
      return;
    }
    multiply('N', 'N', 1, m, right, 0, left);
    for (int i = low; i < n; ++i) {
      values[i] = FASTKD_CALL(norm_of, left.column(i), m.rows);
      const double least = std::numeric_limits<double>::min();
      FASTKD_CALL(times, left.column(i), 1 / std::max(values[i], least), m.rows);
    }
    if (low) {
      // M times the vectors of small values, minus the components along the large ones due to
      // rounding.
      const NewMatrix share(n - low, low);
      multiply('T', 'N', 1, left.from(low), left.first(low), 0, share);
      multiply('N', 'N', -1, left.from(low), share, 1, left.first(low));
    }
    found = decompose_again(low);
  }

  NewMatrix left, right;
  std::vector<double> values;
  bool found = false;

 private:
  bool eigenvectors() {
    const int n = right.rows, places = lapack_size(3 + 5 * int64_t(n));
    const int size = lapack_size(1 + 6 * int64_t(n) + 2 * int64_t(n) * n);
    const Room<double> work(size);
    std::vector<int> more(places);
    int info;
    mkl().dsyevd("V", "L", &n, right.data, &n, values.data(), work.data(), &size, more.data(),
                 &places, &info);
    return info == 0;
  }

  // Decomposes the first ``count`` columns of ``left`` again, and rotates those of ``right``
  // accordingly.
  bool decompose_again(int count) {
    if (count == 0) return true;
    const int rows = left.rows;
    const int64_t n = count;
    const int size = lapack_size(std::max(7 * n + 4 * n * n, 4 * n + 128 * int64_t(rows)));
    const NewMatrix u(rows, count), turn(count, count), span(right.rows, count);
    const Room<double> work(size);
    std::vector<int> more(8 * n);
    std::vector<double> found(count);
    int info;
    mkl().dgesdd("S", &rows, &count, left.data, &rows, found.data(), u.data, &rows, turn.data,
                 &count, work.data(), &size, more.data(), &info);
    multiply('N', 'T', 1, right.first(count), turn, 0, span);
    for (int i = 0; i < count; ++i) {
      const int to = count - 1 - i;
      values[to] = found[i];
      std::copy_n(u.column(i), rows, left.column(to));
      std::copy_n(span.column(i), right.rows, right.column(to));
    }
    return info == 0;
  }
};

// Student or teacher of an item: centred features (D, m), and L with LLᵀ = Σ + r·I.
struct Side {
  Side(const Rows& features, int count, double ridge)
      : rows(features), ridge(ridge), centred(int(features.n), count),
        factor(int(features.n), int(features.n)) {}

  // Returns false if the features are not finite.
  bool prepare(const bool* real, int64_t m, double share) {
    for (int64_t i = 0, j = 0; i < m; ++i) {
      if (real && !real[i]) continue;
      double* column = centred.column(int(j++));
      const double* row = rows.read(i, 0, rows.n, column);
      if (row != column) std::copy_n(row, rows.n, column);
    }
    std::vector<double> mean(rows.n);
    FASTKD_CALL(centre, centred, mean.data());
    square('N', share, centred, factor);
    double trace = 0;
    const int D = factor.rows;
    for (int i = 0; i < D; ++i) {
      double& variance = factor.column(i)[i];
      trace += variance;
      // A ridge below the rounding error of the variance would let the factorisation fail.
      variance += std::max(4 * D * kRounding * variance, ridge);
    }
    if (!std::isfinite(trace)) return false;
    int info;
    mkl().dpotrf("L", &D, factor.data, &D, &info);
    return info == 0;
  }

  Rows rows;
  double ridge;
  NewMatrix centred, factor;
};

struct Item {
  Rows student, teacher;
  const bool* real;  // (m,), or null
  int64_t m;
  double ridge_s, ridge_t;
  int top_k;  // 0 for all
  Rows gradient;
};

// Stores the gradient: share times the product of the student's directions (D, k) and ``rows`` (k,
// m).
void put_gradient(const Item& item, const Matrix& directions, const Matrix& rows, double share,
                  const std::vector<double>& values, const Matrix& student, const Matrix& of_teacher,
                  const Matrix& teacher) {
  const int D = directions.rows, k = directions.columns, count = rows.columns;
  const bool wide = item.gradient.type == Type::kDouble;
  const Room<float> narrow_directions(wide ? 0 : directions.size());
  const NewMatrix wide_directions(wide ? D : 0, k);
  // Cancellation happens in ``rows``, in float64; the last product needs the features' precision
  // only.
  if (wide) {
    std::copy_n(directions.data, directions.size(), wide_directions.data);
  } else {
    FASTKD_CALL(round_to, directions.data, share, directions.size(), narrow_directions.data());
  }
  for (int i = 0; i < k; ++i) FASTKD_CALL(times, directions.column(i), -values[i], D);
  multiply('T', 'N', 1, directions, student, 0, rows);
  multiply('T', 'N', 1, of_teacher, teacher, 1, rows);
  const int64_t bytes = D * size_of(item.gradient.type);
  const Room<double> scattered(item.real ? int64_t(D) * count : 0);
  char* out = item.real ? reinterpret_cast<char*>(scattered.data()) : item.gradient.data;
  if (wide) {
    multiply('N', 'N', share, wide_directions, rows, 0, {reinterpret_cast<double*>(out), D, count});
  } else if (count) {
    const Room<float> narrow_rows(rows.size());
    FASTKD_CALL(round_to, rows.data, 1, rows.size(), narrow_rows.data());
    const float one = 1, nothing = 0;
    mkl().sgemm("N", "N", &D, &count, &k, &one, narrow_directions.data(), &D, narrow_rows.data(),
                &k, &nothing, reinterpret_cast<float*>(out), &D);
  }
  if (!item.real) return;
  for (int64_t i = 0; i < item.m; ++i) {
    if (!item.real[i]) continue;
    std::memcpy(item.gradient.place(i, 0), out, bytes);
    out += bytes;
  }
}

// Returns the item's correlation; stores its gradient (m, D) unless that is null.
double correlate(const Item& item) {
  const int count = int(item.real ? std::count(item.real, item.real + item.m, true) : item.m);
  const double share = 1.0 / std::max(count - 1, 1);
  Side s(item.student, count, item.ridge_s), t(item.teacher, count, item.ridge_t);
  if (!s.prepare(item.real, item.m, share) || !t.prepare(item.real, item.m, share)) return kNaN;
  // The side with fewer dimensions is on the right.
  const bool student_right = s.rows.n <= t.rows.n;
  Side &right = student_right ? s : t, &left = student_right ? t : s;
  const NewMatrix whitened(left.factor.rows, right.factor.rows);
  multiply('N', 'T', share, left.centred, right.centred, 0, whitened);
  solve('L', 'N', left.factor, whitened);
  solve('R', 'T', right.factor, whitened);
  Singular of(whitened);
  if (!of.found) return kNaN;
  const int n = whitened.columns, k = item.top_k ? std::min(item.top_k, n) : n;
  const Matrix chosen_left = of.left.from(n - k), chosen_right = of.right.from(n - k);
  const std::vector<double> values(of.values.end() - k, of.values.end());
  double correlation = 0;
  for (const double value : values) correlation += std::min(value, 1.0);
  if (item.gradient.data == nullptr) return correlation;

  solve('L', 'T', left.factor, chosen_left);
  solve('L', 'T', right.factor, chosen_right);
  const Matrix& directions = student_right ? chosen_right : chosen_left;
  const Matrix& of_teacher = student_right ? chosen_left : chosen_right;
  // At singular values of rounding size the loss has a kink; 0 is one of its subgradients.
  const double rounding = is_of(item.gradient.type, double())
                              ? kRounding : double(std::numeric_limits<float>::epsilon());
  const double zero = std::max(whitened.rows * kRounding, rounding);
  std::vector<double> weights(k);
  for (int i = 0; i < k; ++i) {
    weights[i] = std::min(values[i], 1.0);
    if (values[i] <= zero) std::fill_n(of_teacher.column(i), of_teacher.rows, 0.0);
  }
  const NewMatrix rows(k, count);
  put_gradient(item, directions, rows, share, weights, s.centred, of_teacher, t.centred);
  return correlation;
}

// Correlations (batch) of features (batch, m, D) with an optional mask (batch, m), and if requested
// the student's gradient in the working dtype.
std::vector<Tensor> cca(const Tensor& student, const Tensor& teacher,
                        const std::optional<Tensor>& mask, double ridge_s, double ridge_t,
                        int64_t top_k, bool gradient) {
  STD_TORCH_CHECK(has_mkl(), "torch has no MKL here");
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize, kAnySize}, Strides::kAny);
  check(teacher, "teacher", type, {student.size(0), student.size(1), kAnySize}, Strides::kAny);
  check(mask, "mask", ScalarType::Bool, {student.size(0), student.size(1)});
  lapack_size(std::max({student.size(1), student.size(2), teacher.size(2)}));
  const Tensor s = torch::stable::contiguous(student), t = torch::stable::contiguous(teacher);
  Tensor real;
  if (mask) real = torch::stable::contiguous(*mask);
  const int64_t batch = s.size(0), m = s.size(1);
  const auto rows_of_item = [&](const Tensor& x, int64_t i) {
    const int64_t D = x.size(2);
    return Rows{data<char>(x) + i * m * D * x.element_size(), D, D, type_of(x)};
  };
  std::vector<Tensor> results{torch::stable::new_empty(s, {batch}, ScalarType::Double)};
  if (gradient) {
    results.push_back(torch::stable::new_empty(s, {batch, m, s.size(2)}, working_type(s)));
    if (mask) torch::stable::zero_(results.back());
  }
  double* correlations = data<double>(results[0]);
  parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    const Alone alone;
    for (int64_t i = begin; i < end; ++i) {
      const bool* is_real = mask ? data<const bool>(real) + i * m : nullptr;
      const Rows to = gradient ? rows_of_item(results[1], i) : Rows{};
      correlations[i] = correlate({rows_of_item(s, i), rows_of_item(t, i), is_real, m, ridge_s,
                                   ridge_t, int(std::min<int64_t>(top_k, s.size(2))), to});
      if (!gradient || !std::isnan(correlations[i])) continue;
      const std::vector<double> lost(s.size(2), kNaN);
      for (int64_t j = 0; j < m; ++j) {
        if (!is_real || is_real[j]) to.only(j).fill(lost.data());
      }
    }
  });
  return results;
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) {
  m.def("has_mkl() -> bool");
  m.def(
      "cca(Tensor student, Tensor teacher, Tensor? mask, float ridge_s, float ridge_t, int top_k,"
      " bool gradient) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CompositeExplicitAutograd, m) {
  m.impl("has_mkl", TORCH_BOX(&fastkd::has_mkl));
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) { m.impl("cca", TORCH_BOX(&fastkd::cca)); }
