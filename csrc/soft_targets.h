// Soft targets on a CPU: divergence of softened teacher and student logits, and its gradient.
#pragma once

#include "rows.h"

namespace fastkd {

enum class Divergence { kForwardKl, kReverseKl, kJs, kAdaptiveKl };

// Of one row: maximum and sum of exponentials of both sides, the expectation that the gradient
// subtracts, and the head's share of the gaps.
struct SoftTargetStats {
  double top_s, total_s, top_t, total_t, expectation, share;
};

struct SoftTargets {
  Rows student, teacher;
  Divergence divergence;
  double slope;  // 1/τ

  // The divergence of a row.
  double forward(int64_t row, SoftTargetStats& stats) const;

  // weight times its gradient with respect to z/τ; ``gradient`` may be the student's own rows.
  void backward(int64_t row, const SoftTargetStats& stats, double weight,
                const Rows& gradient) const;

 private:
  bool is_wide() const;  // in float64
};

}  // namespace fastkd
