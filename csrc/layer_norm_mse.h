// LayerNorm-MSE on a CPU: ½‖norm(x) − norm(y)‖² of every row, and its gradient to both sides.
#pragma once

#include "rows.h"

namespace fastkd {

struct LayerNormMSE {
  Rows x, y;
  double eps;
  double* stats;  // (R, 4): mean and 1/√(var + eps) of x, then of y

  void forward(int64_t begin, int64_t end, double* losses) const;

  // Gradients of scale times the losses; those of a side with null data are not made.
  void backward(int64_t begin, int64_t end, double scale, const Rows& dx, const Rows& dy) const;
};

}  // namespace fastkd
