// Cross-entropy of rows of logits with labels, and its gradient, in one visit of a row: its largest,
// its exponentials and their sum, their share of it. After the first read a row is in the cache.
#include <cmath>

#include "tensors.h"
#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 1024;  // of which sums are of the row's own type

struct CrossEntropy {
  double label_smoothing, z_loss;
};

// body(block, count) along a row
template <typename Body>
inline void each_block(int64_t n, const Body& body) {
  for (int64_t start = 0; start < n; start += kBlock) body(start, std::min(kBlock, n - start));
}

// The loss of a row, and weight times its gradient in ``dz``, which may be the row, or null.
template <typename W>
inline double row_loss(const W* z, int64_t n, int64_t label, CrossEntropy of, double weight,
                       W* dz) {
  constexpr W kLeast = -std::numeric_limits<W>::infinity();
  const double smoothing = of.label_smoothing, at_label = double(z[label]);
  Vector<W> found = splat(kLeast);
  double mean = 0, total = 0;
  each_block(n, [&](int64_t start, int64_t count) {
    Vector<W> part{};
    each<W>(count, [&](int64_t i, int64_t lanes) {
      found = largest<W>(load(z + start + i, lanes, kLeast), found);
      part += load(z + start + i, lanes);
    });
    mean += sum<W>(part) / double(n);
  });
  const W top = largest<W>(found);
  each_block(n, [&](int64_t start, int64_t count) {
    Vector<W> part{};
    each<W>(count, [&](int64_t i, int64_t lanes) {
      const Vector<W> e = exp<W>(load(z + start + i, lanes, kLeast) - top);
      part += e;
      if (dz) store<W>(dz + start + i, e, lanes);
    });
    total += sum<W>(part);
  });
  const double log_total = std::log(total), log_z = double(top) + log_total;
  double loss = double(top) - at_label;
  if (smoothing != 0) loss = (1 - smoothing) * loss + smoothing * (double(top) - mean);
  loss += log_total;
  if (of.z_loss != 0) loss += of.z_loss * log_z * log_z;
  if (dz) {
    const double slope = of.z_loss != 0 ? 1 + 2 * of.z_loss * log_z : 1;
    const W factor = W(weight * slope / total), other = W(weight * smoothing / double(n));
    each<W>(n, [&](int64_t i, int64_t lanes) {
      store<W>(dz + i, load(dz + i, lanes) * factor - other, lanes);
    });
    dz[label] -= W(weight * (1 - smoothing));
  }
  return loss;
}

FASTKD_CLONES double loss_of(const float* z, int64_t n, int64_t label, CrossEntropy of,
                             double weight, float* dz) {
  return row_loss(z, n, label, of, weight, dz);
}
FASTKD_CLONES double loss_of(const double* z, int64_t n, int64_t label, CrossEntropy of,
                             double weight, double* dz) {
  return row_loss(z, n, label, of, weight, dz);
}

template <typename W>
void each_loss(const Tensor& student, const int64_t* labels, const Rows& weights,
               const std::optional<Tensor>& gradient, CrossEntropy of, const Rows& losses) {
  const int64_t n = student.size(1);
  each_row(student.size(0), 3 * n * int64_t(sizeof(W)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      W* dz = gradient ? data<W>(*gradient) + i * gradient->stride(0) : nullptr;
      const double weight = gradient ? weights.get(i) : 0;
      const W* z = data<W>(student) + i * student.stride(0);
      losses.put(i, loss_of(z, n, labels[i], of, weight, dz));
    }
  });
}

// Losses (R,) of logits (R, V) of float32 or float64 with labels (R,); fills ``gradient`` (R, V) of
// the sum of weights (R,) times them, if there is one.
Tensor cross_entropy(const Tensor& student, const Tensor& labels,
                     const std::optional<Tensor>& gradient, const std::optional<Tensor>& weights,
                     double label_smoothing, double z_loss) {
  const Tensor loss = torch::stable::new_empty(student, {student.size(0)}, working_type(student));
  const Tensor places = torch::stable::contiguous(labels);
  // The public function says this better, but not in a compiled graph.
  for (int64_t i = 0; i < labels.size(0); ++i) {
    const int64_t label = data<int64_t>(places)[i];
    STD_TORCH_CHECK(label >= 0 && label < student.size(1), "a label is no word of the logits");
  }
  const Rows given = weights ? numbers_of(*weights) : Rows{};
  const bool wide = student.scalar_type() == ScalarType::Double;
  const auto run = wide ? each_loss<double> : each_loss<float>;
  run(student, data<int64_t>(places), given, gradient, {label_smoothing, z_loss}, numbers_of(loss));
  return loss;
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) {
  m.def(
      "cross_entropy(Tensor student, Tensor labels, Tensor(a!)? gradient, Tensor? weights,"
      " float label_smoothing, float z_loss) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&fastkd::cross_entropy));
}
