// Operator of the distance of hidden states.
#include <algorithm>

#include "losses/hidden_states/hidden_states.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// The loss, () or with reduction "none" (R,), of rows (R, D), each times its weight, and if
// requested the student's gradient (R, D).
std::vector<Tensor> hidden_states(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                  const std::optional<Tensor>& weights, const std::string& kind,
                                  double beta, const std::string& reduction, bool gradient) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize});
  const int64_t R = student.size(0), D = student.size(1);
  check(teacher, "teacher", student.scalar_type(), {R, D});
  check(mask, "mask", ScalarType::Bool, {R});
  check_numbers(weights, "weights", R);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const double divisor = divisor_of(reduction, real ? std::count(real, real + R, true) : R);
  std::vector<Tensor> results{new_losses(student, reduction, {R})};
  if (gradient) results.push_back(new_large(student, {R, D}, gradient_type(student)));
  const RowPairs pairs{rows_of(student),
                       rows_of(teacher),
                       gradient ? rows_of(results.back()) : Rows{},
                       {},
                       1 / divisor,
                       weights ? numbers_of(*weights) : Rows{},
                       real};
  const HiddenStates of{pairs,
                        kind == "mse"      ? Distance::kMse
                        : kind == "cosine" ? Distance::kCosine
                                           : Distance::kSmoothL1,
                        beta};
  std::vector<double> losses(R);
  each_row(R, 3 * D * student.element_size(), [&](int64_t begin, int64_t end) {
    of.rows(begin, end, losses.data());
  });
  for (double& loss : losses) loss /= divisor;
  put_losses(losses, results[0]);
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(hidden_states,
    "(Tensor student, Tensor teacher, Tensor? mask, Tensor? weights, str kind, float beta,"
    " str reduction, bool gradient) -> Tensor[]")
