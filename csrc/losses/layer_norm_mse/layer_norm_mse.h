// LayerNorm-MSE on a CPU: ½‖norm(x) − norm(y)‖² of every row, and its gradients.
#pragma once

#include "base/rows.h"

namespace fastkd {

struct LayerNormMSE {
  Rows x, y;
  double eps, scale;
  Rows dx, dy;  // gradients of scale·loss; null: not computed

  void rows(int64_t begin, int64_t end, double* losses) const;
};

}  // namespace fastkd
