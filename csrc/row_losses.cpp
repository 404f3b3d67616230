// The operators of the row kernels: named as the launchers in kernels/, with the same arguments.
#include "layer_norm_mse.h"
#include "soft_targets.h"
#include "tensors.h"

namespace fastkd {
namespace {

double total(const std::vector<double>& losses) {
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum;
}

std::tuple<Tensor, Tensor> layer_norm_mse_forward(const Tensor& x, const Tensor& y, double eps,
                                                  int64_t divisor) {
  const Tensor stats = new_rows(x, x.size(0), 4, ScalarType::Double);
  const LayerNormMSE of{rows_of(x), rows_of(y), eps, data<double>(stats)};
  std::vector<double> losses(of.x.n ? x.size(0) : 0);
  each_row(losses.size(), 2 * of.x.n * x.element_size(), [&](int64_t begin, int64_t end) {
    of.forward(begin, end, losses.data());
  });
  return {scalar(total(losses) / double(divisor), x), stats};
}

std::vector<Tensor> layer_norm_mse_backward(const Tensor& x, const Tensor& y, const Tensor& stats,
                                            const Tensor& dloss, double eps, int64_t divisor,
                                            bool needs_dx, bool needs_dy) {
  const LayerNormMSE of{rows_of(x), rows_of(y), eps, data<double>(stats)};
  std::vector<Tensor> results;
  const auto gradient = [&](bool needed) {
    Rows rows{nullptr, of.x.n, of.x.n, of.x.type};
    if (needed) {
      results.push_back(new_rows(x, x.size(0), of.x.n, x.scalar_type()));
      rows.data = data<char>(results.back());
    }
    return rows;
  };
  const Rows dx = gradient(needs_dx), dy = gradient(needs_dy);
  const double scale = value_of(dloss) / double(divisor);
  each_row(of.x.n ? x.size(0) : 0, 4 * of.x.n * x.element_size(), [&](int64_t begin, int64_t end) {
    of.backward(begin, end, scale, dx, dy);
  });
  return results;
}

using Mask = std::optional<Tensor>;  // (R,) bool

// Which rows count; the bytes are kept by ``holder``.
const bool* bytes_of(const Mask& mask, Tensor& holder) {
  if (!mask) return nullptr;
  holder = torch::stable::contiguous(*mask);
  return data<const bool>(holder);
}

SoftTargets soft_targets(const Tensor& student, const Tensor& teacher,
                         const std::string& divergence, double temperature) {
  const Divergence kind = divergence == "forward_kl"   ? Divergence::kForwardKl
                          : divergence == "reverse_kl" ? Divergence::kReverseKl
                          : divergence == "js"         ? Divergence::kJs
                                                       : Divergence::kAdaptiveKl;
  return {rows_of(student), rows_of(teacher), kind, 1 / temperature};
}

constexpr int64_t kSoftTargetStats = sizeof(SoftTargetStats) / sizeof(double);

std::tuple<Tensor, Tensor> soft_target_forward(const Tensor& student, const Tensor& teacher,
                                               const Mask& mask, const std::string& divergence,
                                               double temperature, double scale) {
  const int64_t R = student.size(0);
  const Tensor loss = torch::stable::new_empty(student, {R}, working_type(student));
  const Tensor stats = new_rows(student, R, kSoftTargetStats, ScalarType::Double);
  const SoftTargets of = soft_targets(student, teacher, divergence, temperature);
  const Rows losses = numbers_of(loss);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  each_row(R, 2 * of.student.n * student.element_size(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto& row = data<SoftTargetStats>(stats)[i];
      row = {0, 1, 0, 1, 0, 0};
      losses.put(i, real && !real[i] ? 0 : of.forward(i, row) * scale);
    }
  });
  return {loss, stats};
}

std::tuple<Tensor, Tensor> soft_target_reduce(const Tensor& loss, const Mask& mask,
                                              const std::optional<Tensor>& denominator,
                                              bool counts) {
  const int64_t R = loss.size(0);
  const Rows losses = numbers_of(loss);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  double sum = 0, count = 0;
  for (int64_t i = 0; i < R; ++i) {
    sum += losses.get(i);
    count += !real || real[i];
  }
  double divisor = counts ? std::max(count, 1.0) : 1;
  if (denominator) divisor = value_of(*denominator);
  return {scalar(sum / divisor, loss), scalar(divisor, loss)};
}

void fill_gradient(const Tensor& dstudent, const Tensor& student, const Tensor& teacher,
                   const Mask& mask, const Tensor& stats, const std::optional<Tensor>& divisor,
                   const Tensor& dloss, const std::string& divergence, double temperature,
                   double scale) {
  const SoftTargets of = soft_targets(student, teacher, divergence, temperature);
  const Rows gradient = rows_of(dstudent), weights = numbers_of(dloss);
  const double factor = scale / temperature / (divisor ? value_of(*divisor) : 1);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const int64_t bytes = 3 * of.student.n * student.element_size();
  each_row(student.size(0), bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (real && !real[i]) {
        std::memset(gradient.place(i, 0), 0, gradient.n * size_of(gradient.type));
      } else {
        of.backward(i, data<SoftTargetStats>(stats)[i], weights.get(i) * factor, gradient);
      }
    }
  });
}

Tensor soft_target_backward(const Tensor& student, const Tensor& teacher, const Mask& mask,
                            const Tensor& stats, const std::optional<Tensor>& divisor,
                            const Tensor& dloss, const std::string& divergence, double temperature,
                            double scale) {
  const Tensor dstudent =
      new_rows(student, student.size(0), student.size(1), student.scalar_type());
  fill_gradient(dstudent, student, teacher, mask, stats, divisor, dloss, divergence, temperature,
                scale);
  return dstudent;
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd_cpp, m) {
  m.def(
      "layer_norm_mse_forward(Tensor x, Tensor y, float eps, SymInt divisor)"
      " -> (Tensor loss, Tensor stats)");
  m.def(
      "layer_norm_mse_backward(Tensor x, Tensor y, Tensor stats, Tensor dloss, float eps,"
      " SymInt divisor, bool needs_dx, bool needs_dy) -> Tensor[]");
  m.def(
      "soft_target_forward(Tensor student, Tensor teacher, Tensor? mask, str divergence,"
      " float temperature, float scale) -> (Tensor loss, Tensor stats)");
  m.def(
      "soft_target_reduce(Tensor loss, Tensor? mask, Tensor? denominator, bool counts)"
      " -> (Tensor total, Tensor divisor)");
  m.def(
      "soft_target_backward(Tensor student, Tensor teacher, Tensor? mask, Tensor stats,"
      " Tensor? divisor, Tensor dloss, str divergence, float temperature, float scale) -> Tensor");
  m.def(
      "fill_gradient(Tensor(a!) dstudent, Tensor student, Tensor teacher, Tensor? mask,"
      " Tensor stats, Tensor? divisor, Tensor dloss, str divergence, float temperature,"
      " float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("layer_norm_mse_forward", TORCH_BOX(&fastkd::layer_norm_mse_forward));
  m.impl("layer_norm_mse_backward", TORCH_BOX(&fastkd::layer_norm_mse_backward));
  m.impl("soft_target_forward", TORCH_BOX(&fastkd::soft_target_forward));
  m.impl("soft_target_reduce", TORCH_BOX(&fastkd::soft_target_reduce));
  m.impl("soft_target_backward", TORCH_BOX(&fastkd::soft_target_backward));
  m.impl("fill_gradient", TORCH_BOX(&fastkd::fill_gradient));
}
