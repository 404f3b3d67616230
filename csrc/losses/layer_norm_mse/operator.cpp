// Operator of LayerNorm-MSE.
#include "losses/layer_norm_mse/layer_norm_mse.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// The loss () of rows (R, D), each times its weight, and the gradients of x and y that are needed.
std::vector<Tensor> layer_norm_mse(const Tensor& x, const Tensor& y,
                                   const std::optional<Tensor>& weights, double eps,
                                   int64_t divisor, bool needs_dx, bool needs_dy) {
  check(x, "x", check_floating(x, "x"), {kAnySize, kAnySize});
  const int64_t R = x.size(0), D = x.size(1);
  check(y, "y", x.scalar_type(), {R, D});
  check_numbers(weights, "weights", R);
  std::vector<Tensor> results{new_losses(x, "sum", {})};
  const auto gradient = [&](bool needed) {
    if (!needed) return Rows{};
    results.push_back(new_large(x, {R, D}, gradient_type(x)));
    return rows_of(results.back());
  };
  const Rows dx = gradient(needs_dx), dy = gradient(needs_dy);
  const LayerNormMSE of{{rows_of(x), rows_of(y), dx, dy, 1 / double(divisor),
                         weights ? numbers_of(*weights) : Rows{}},
                        eps};
  std::vector<double> losses(D ? R : 0);
  each_row(losses.size(), 4 * D * x.element_size(), [&](int64_t begin, int64_t end) {
    of.rows(begin, end, losses.data());
  });
  for (double& loss : losses) loss /= double(divisor);
  put_losses(losses, results[0]);
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(layer_norm_mse,
    "(Tensor x, Tensor y, Tensor? weights, float eps, SymInt divisor, bool needs_dx,"
    " bool needs_dy) -> Tensor[]")
