// Operator of the attention loss.
#include <algorithm>

#include "losses/attention/attention.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// One layer's part of the mean over ``layers``: the loss, () or with reduction "none" (B,), and if
// requested the student's gradient (B, H, N, N). A sample's loss is multiplied by its weight.
std::vector<Tensor> attention(const Tensor& student, const Tensor& teacher, const Mask& mask,
                              const std::optional<Tensor>& weights, bool mean, int64_t layers,
                              const std::string& reduction, bool gradient) {
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize, kAnySize, kAnySize}, Strides::kContiguous);
  const int64_t B = student.size(0), H = student.size(1), N = student.size(3);
  check(student, "student", type, {B, H, N, N}, Strides::kAny);
  check(teacher, "teacher", type, {B, mean ? kAnySize : H, N, N}, Strides::kContiguous);
  check(mask, "mask", ScalarType::Bool, {B, N});
  check_numbers(weights, "weights", B);
  const auto rows = [=](const Tensor& x) { return Rows{data<char>(x), N, N, type_of(x)}; };
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const AttentionMaps of{rows(student), rows(teacher), H, teacher.size(1), N, mean, real};
  std::vector<Tensor> results{new_losses(student, reduction, {B})};
  if (gradient) {
    results.push_back(new_large(student, {B, H, N, N}, gradient_type(student)));
  }
  const Rows dx = gradient ? rows(results.back()) : Rows{};
  std::vector<double> factors(B);  // of a sample's sum over all heads
  int64_t compared = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = real ? std::count(real + b * N, real + (b + 1) * N, true) : N;
    const double side = double(std::max<int64_t>(n, 1));
    factors[b] = (weights ? numbers_of(*weights).get(b) : 1) / (side * side * double(layers));
    compared += !real || n > 0;
  }
  const double divisor = divisor_of(reduction, compared);
  const int64_t groups = of.groups();
  std::vector<double> maps(B * groups), losses(B);
  each_row(B * groups, 3 * N * N * student.element_size(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double factor = factors[i / groups] / divisor;
      maps[i] = factor / double(groups) *
                of.compare(i / groups, i % groups, 2 * factor / double(H), dx);
    }
  });
  for (int64_t i = 0; i < B * groups; ++i) losses[i / groups] += maps[i];
  put_losses(losses, results[0]);
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(attention,
    "(Tensor student, Tensor teacher, Tensor? mask, Tensor? weights, bool mean, int layers,"
    " str reduction, bool gradient) -> Tensor[]")
