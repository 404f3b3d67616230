// LayerNorm-MSE on a CPU: ½‖norm(x) − norm(y)‖² of every row, and its gradient to both sides.
#pragma once

#include "base/rows.h"

namespace fastkd {

struct LayerNormMSE {
  Rows x, y;
  double eps, scale;
  Rows dx, dy;  // gradients of scale times the losses; those with null data are not made

  void rows(int64_t begin, int64_t end, double* losses) const;
};

}  // namespace fastkd
