// Operators of soft targets from logits.
#include <algorithm>

#include "losses/soft_targets/soft_targets.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// Losses (R,) of logits (R, V). Gradients times ``weights`` are stored in ``gradient``, unless it
// is null.
std::vector<double> soft_targets(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                 const std::string& divergence, double temperature, double scale,
                                 const Rows& gradient, const Rows& weights) {
  const int64_t R = student.size(0), V = student.size(1);
  check(teacher, "teacher", student.scalar_type(), {R, V});
  check(mask, "mask", ScalarType::Bool, {R});
  const Divergence kind = divergence == "forward_kl"   ? Divergence::kForwardKl
                          : divergence == "reverse_kl" ? Divergence::kReverseKl
                          : divergence == "js"         ? Divergence::kJs
                                                       : Divergence::kAdaptiveKl;
  const SoftTargets of{rows_of(student), rows_of(teacher), kind, 1 / temperature, scale, gradient};
  std::vector<double> losses(R);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const int64_t bytes = 3 * of.student.n * student.element_size();
  each_row(losses.size(), bytes, [&](int64_t begin, int64_t end) {
    of.fill(begin, end, real, weights, losses.data());
  });
  return losses;
}

Tensor vector_of(const std::vector<double>& numbers, const Tensor& like) {
  const Tensor result =
      torch::stable::new_empty(like, {int64_t(numbers.size())}, working_type(like));
  for (size_t i = 0; i < numbers.size(); ++i) numbers_of(result).put(i, numbers[i]);
  return result;
}

// The loss, () or with reduction "none" (R,), and if requested the student's gradient (R, V).
std::vector<Tensor> soft_target_loss(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                     const std::optional<Tensor>& denominator,
                                     const std::string& divergence, double temperature,
                                     double scale, const std::string& reduction, bool gradient) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize});
  check_numbers(denominator, "denominator");
  double divisor = 1;
  if (denominator) {
    divisor = value_of(*denominator);
  } else if (reduction == "batchmean") {
    Tensor holder;
    const bool* real = bytes_of(mask, holder);
    const int64_t R = student.size(0);
    divisor = double(std::max<int64_t>(1, real ? std::count(real, real + R, true) : R));
  }
  double weight = 1 / divisor;
  const Rows weights{reinterpret_cast<char*>(&weight), 0, 1, Type::kDouble};
  const Tensor dstudent =
      new_large(student, {gradient ? student.size(0) : 0, student.size(1)}, working_type(student));
  const std::vector<double> losses =
      soft_targets(student, teacher, mask, divergence, temperature, scale,
                   gradient ? rows_of(dstudent) : Rows{}, weights);
  std::vector<Tensor> results{reduction == "none" ? vector_of(losses, student)
                                                  : scalar(total(losses) / divisor, student)};
  if (gradient) results.push_back(dstudent);
  return results;
}

// Losses (R,). With weights (R,) the gradient of Σ weight·loss overwrites the student's logits.
Tensor soft_target_rows(const Tensor& student, const Tensor& teacher, const Mask& mask,
                        const std::optional<Tensor>& weights, const std::string& divergence,
                        double temperature, double scale) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize},
        weights ? Strides::kWritten : Strides::kRows);
  check_numbers(weights, "weights", student.size(0));
  const Rows gradient = weights ? rows_of(student) : Rows{};
  const Rows given = weights ? numbers_of(*weights) : Rows{};
  return vector_of(soft_targets(student, teacher, mask, divergence, temperature, scale, gradient,
                                given),
                   student);
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) {
  m.def(
      "soft_target_loss(Tensor student, Tensor teacher, Tensor? mask, Tensor? denominator,"
      " str divergence, float temperature, float scale, str reduction, bool gradient) -> Tensor[]");
  m.def(
      "soft_target_rows(Tensor(a!) student, Tensor teacher, Tensor? mask, Tensor? weights,"
      " str divergence, float temperature, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("soft_target_loss", TORCH_BOX(&fastkd::soft_target_loss));
  m.impl("soft_target_rows", TORCH_BOX(&fastkd::soft_target_rows));
}
