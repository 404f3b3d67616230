// Data path. Each pair of rows is read from memory once, and three times more from the first cache:
// for sums; squares around the mean; the difference and the products that the gradients need; the
// gradients. With E = R·D elements of s bytes memory moves 4Es bytes, and 6Es where a write loads
// its line first.
//
// Rows whose squares leave the range of float32 are computed in float64.
#include "losses/layer_norm_mse/layer_norm_mse.h"

#include <cmath>

#define FASTKD_KERNELS "losses/layer_norm_mse/layer_norm_mse_kernels.h"
#include "base/each_processor.h"

namespace fastkd {

void LayerNormMSE::rows(int64_t begin, int64_t end, double* losses) const {
  pairs.each(begin, end, losses,
             [&](int64_t, const auto* a, const auto* b, double scale, double* loss, auto* da,
                 auto* db) {
               return FASTKD_CALL(visit, a, b, pairs.x.n, eps, scale, loss, da, db);
             });
}

}  // namespace fastkd
