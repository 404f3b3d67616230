// Soft targets on a CPU: divergence of softened teacher and student logits, and its gradient.
#pragma once

#include "base/rows.h"

namespace fastkd {

enum class Divergence { kForwardKl, kReverseKl, kJs, kAdaptiveKl };

struct SoftTargets {
  Rows student, teacher;
  Divergence divergence;
  double slope, scale;  // 1/τ, and by what a divergence is multiplied
  Rows gradient;        // unless null; may be the student's own rows

  // The losses of rows, and ``weights``, rows of one, times their gradients. Rows that are not
  // ``real`` are not read, and get 0.
  void fill(int64_t begin, int64_t end, const bool* real, const Rows& weights,
            double* losses) const;
};

}  // namespace fastkd
