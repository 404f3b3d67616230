// Soft targets on a CPU: divergences between softened teacher and student logits, and their
// gradient.
#pragma once

#include "base/rows.h"

namespace fastkd {

enum class Divergence { kForwardKl, kReverseKl, kJs, kAdaptiveKl };

struct SoftTargets {
  Rows student, teacher;
  Divergence divergence;
  double slope, scale;  // 1/τ, and the factor of the divergence
  Rows gradient;        // of the student; null: not computed; may be the student's own rows

  // Computes the losses of rows begin to end, and their gradients times ``weights`` (rows of one
  // number). Rows that are not ``real`` are not read; their loss and gradient are 0.
  void fill(int64_t begin, int64_t end, const bool* real, const Rows& weights,
            double* losses) const;
};

}  // namespace fastkd
