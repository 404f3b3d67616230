// Data path. Each pair of rows is read from memory once and the gradient is written; the cosine
// reads its rows three times more from the first cache. With E = R·D elements of s bytes memory
// moves 3Es bytes, and 4Es where a write loads its line first.
//
// Rows whose squares leave the range of float32 are computed in float64.
#include "losses/hidden_states/hidden_states.h"

#include <cmath>
#include <limits>

#include "base/row_norms.h"

#define FASTKD_KERNELS "losses/hidden_states/hidden_states_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

// 1/norm; 0 for a zero row, NaN for an infinite norm.
double reciprocal(double norm) {
  if (norm == 0) return 0;
  return std::isinf(norm) ? std::numeric_limits<double>::quiet_NaN() : 1 / norm;
}

// Whether rows of this norm can be divided by it, and by each other's, in this type.
bool fits(double norm, float) { return norm == 0 || (norm > 1e-15 && norm < 1e15); }
bool fits(double, double) { return true; }

}  // namespace

void HiddenStates::rows(int64_t begin, int64_t end, double* losses) const {
  const int64_t D = pairs.x.n;
  pairs.each(begin, end, losses,
             [&](int64_t i, const auto* a, const auto* b, double scale, double* loss, auto* da,
                 auto*) {
               if (distance == Distance::kMse) {
                 return FASTKD_CALL(squares, a, b, D, scale, loss, da);
               }
               if (distance == Distance::kSmoothL1) {
                 return FASTKD_CALL(smooth_l1, a, b, D, beta, scale, loss, da);
               }
               const double of_a = row_norm(pairs.x, i), of_b = row_norm(pairs.y, i);
               if (!fits(of_a, *a) || !fits(of_b, *b)) return false;
               FASTKD_CALL(cosine, a, b, D, reciprocal(of_a), reciprocal(of_b), scale, loss, da);
               return true;
             });
}

}  // namespace fastkd
