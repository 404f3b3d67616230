// One read of the row. Blocks are summed in float64, so no sum is longer than a block; rows whose
// squares leave the range of their type are divided by their largest number first.
#include "row_norms.h"

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 2048;

template <int kParts, typename W>
inline double squares(const W* x, int64_t n) {
  constexpr int64_t kSums = 4;  // so that none waits for the last
  Carried<W, kParts> totals[kSums];
  const int64_t rest = n - n % (kSums * kLanes<W>);
  for (int64_t i = 0; i < rest; i += kSums * kLanes<W>) {
    for (int64_t k = 0; k < kSums; ++k) {
      const Vector<W> part = load(x + i + k * kLanes<W>);
      totals[k] += part * part;
    }
  }
  each<W>(n - rest, [&](int64_t i, int64_t count) {
    const Vector<W> part = load(x + rest + i, count);
    totals[0] += part * part;
  });
  totals[0] += totals[1], totals[2] += totals[3], totals[0] += totals[2];
  return sum<W>(totals[0]);
}

FASTKD_CLONES double squares_of(const float* x, int64_t n) {
  return with_parts([&](auto parts) { return squares<parts()>(x, n); });
}
FASTKD_CLONES double squares_of(const double* x, int64_t n) {
  return with_parts([&](auto parts) { return squares<parts()>(x, n); });
}

// body(block, count) along a row
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
  const auto add = [&](const auto* x, int64_t count) { total += squares_of(x, count); };
  if (rows.type == Type::kDouble) {
    each_block<double>(rows, row, add);
    return total > 1e-290 && total < 1e290 ? std::sqrt(total) : scaled_norm(rows, row);
  }
  each_block<float>(rows, row, add);
  return total > 1e-30 && total < 1e30 ? std::sqrt(total) : scaled_norm(rows, row);
}

}  // namespace fastkd
