// One read of the row. Blocks are summed in W, and their sums in float64. Rows whose squares leave
// the range of their type are divided by their largest number first.
#include "base/row_norms.h"

#include <algorithm>
#include <cmath>

#define FASTKD_KERNELS "base/row_norms_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 2048;

// Calls body(block, count) along a row.
template <typename W, typename Body>
void each_block(const Rows& rows, int64_t row, const Body& body) {
  W copy[kBlock];
  for (int64_t start = 0; start < rows.n; start += kBlock) {
    const int64_t count = std::min(kBlock, rows.n - start);
    body(rows.read(row, start, count, copy), count);
  }
}

double scaled_norm(const Rows& rows, int64_t row) {
  double peak = 0, total = 0;
  each_block<double>(rows, row, [&](const double* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) peak = std::max(peak, std::abs(x[i]));
  });
  each_block<double>(rows, row, [&](const double* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) total += x[i] == 0 ? 0 : (x[i] / peak) * (x[i] / peak);
  });
  return peak == 0 ? std::sqrt(total) : std::sqrt(total) * peak;
}

}  // namespace

double row_norm(const Rows& rows, int64_t row) {
  double total = 0;
  const auto add = [&](const auto* x, int64_t count) {
    total += FASTKD_CALL(squares_of, x, count);
  };
  if (rows.type == Type::kDouble) {
    each_block<double>(rows, row, add);
    return total > 1e-290 && total < 1e290 ? std::sqrt(total) : scaled_norm(rows, row);
  }
  each_block<float>(rows, row, add);
  return total > 1e-30 && total < 1e30 ? std::sqrt(total) : scaled_norm(rows, row);
}

}  // namespace fastkd
