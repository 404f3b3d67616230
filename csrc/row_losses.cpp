// The operators of the row kernels: named as the launchers in kernels/, with the same arguments.
#include "layer_norm_mse.h"
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
  const double scale = value_at(dloss) / double(divisor);
  each_row(of.x.n ? x.size(0) : 0, 4 * of.x.n * x.element_size(), [&](int64_t begin, int64_t end) {
    of.backward(begin, end, scale, dx, dy);
  });
  return results;
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
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("layer_norm_mse_forward", TORCH_BOX(&fastkd::layer_norm_mse_forward));
  m.impl("layer_norm_mse_backward", TORCH_BOX(&fastkd::layer_norm_mse_backward));
}
