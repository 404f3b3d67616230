// LayerNorm-MSE on a CPU: ½‖norm(x) − norm(y)‖² of every row, and its gradients.
#pragma once

#include "losses/row_pairs.h"

namespace fastkd {

struct LayerNormMSE {
  RowPairs pairs;
  double eps;

  void rows(int64_t begin, int64_t end, double* losses) const;
};

}  // namespace fastkd
