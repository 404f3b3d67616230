// Data path. Each pair of rows is read from memory once, and three times more from the first cache:
// for sums; squares around the mean; the difference and the products that the gradients need; the
// gradients. With E = R·D elements of s bytes memory moves 4Es bytes, and 6Es where a write loads
// its line first.
//
// Rows of at most kShortRow columns, and rows whose squares leave the range of float32, are
// computed in float64: where a few terms cancel, nothing but their rounding error would be left.
#include "losses/layer_norm_mse/layer_norm_mse.h"

#include <cmath>

#define FASTKD_KERNELS "losses/layer_norm_mse/layer_norm_mse_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

constexpr int64_t kShortRow = 64;

}  // namespace

void LayerNormMSE::rows(int64_t begin, int64_t end, double* losses) const {
  Copies<float> narrow{x.type, x.n};
  Copies<double> wide{x.type, x.n};
  const auto row = [&](int64_t i, auto& copies) {
    const auto *a = x.read(i, 0, x.n, copies[0]), *b = y.read(i, 0, x.n, copies[1]);
    auto *da = dx.write(i, 0, copies[2]), *db = dy.write(i, 0, copies[3]);
    const bool done = FASTKD_CALL(visit, a, b, x.n, eps, scale, losses + i, da, db);
    if (done) dx.written(i, 0, x.n, da), dy.written(i, 0, x.n, db);
    return done;
  };
  for (int64_t i = begin; i < end; ++i) {
    const bool short_or_double = x.type == Type::kDouble || x.n <= kShortRow;
    if (short_or_double || !row(i, narrow)) row(i, wide);
  }
}

}  // namespace fastkd
