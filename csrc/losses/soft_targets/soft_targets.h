// Soft targets on a CPU: divergences between softened teacher and student logits, and their
// gradient.
#pragma once

#include <vector>

#include "base/rows.h"

namespace fastkd {

enum class Divergence {
  kForwardKl,
  kReverseKl,
  kJs,  // of the mean
  kAdaptiveKl,
  kMixed,
  kGeneralizedJs,
  kSkewKl,
  kSkewReverseKl,
  kTotalVariation,
  kNegativeLogAcceptance,
  kLk,
};

// Terms of a row besides its loss, at temperature 1; those of labels are 0 without labels.
enum Term {
  kEntropy,
  kAccuracy,  // 1 where the label is the first of the largest logits
  kTotalVariationTerm,
  kTeacherEntropy,
  kTeacherLogProb,  // of the label
  kLogProb,
  kTerms,
};

// What becomes of the unmatched tokens of two vocabularies; see `soft_target_loss` in Python.
enum class Unmatched { kRenormalise, kBucket, kSorted };

// Two vocabularies.
struct Match {
  static constexpr int64_t kBlock = 1024;  // tokens that are computed at a time
  static constexpr int kPadding = 16;

  Unmatched unmatched;
  std::vector<int32_t> teacher;  // the matched tokens, in the student's order, and kPadding others
  std::vector<uint16_t> in_student, in_teacher;  // a bit for each token: whether it is matched
  std::vector<int64_t> starts;  // in ``teacher``, of each kBlock tokens of the student, and the end
};

constexpr int kColumns = 16;  // bits in each number of `Match`

struct SoftTargets {
  Rows student, teacher;  // logits; for a teacher of k tokens their log-probabilities
  Divergence divergence;
  double coefficient;   // β, the skew, the share of forward KL or the rate; see Divergence in Python
  double slope, scale;  // 1/τ, and the factor of the divergence
  Rows gradient;        // of the student; null: not computed; may be the student's own rows
  const int64_t* ids = nullptr;  // (R, k), below V, for a teacher of k tokens
  bool bucket = false;           // whether all other tokens are one more outcome
  // Logarithms of the teacher's probabilities of all these tokens, rows of one number, if it has
  // more of them; null: 1. For total variation and the negative log acceptance.
  Rows log_masses{};
  const int64_t* teacher_rows = nullptr;  // (R,), rows of the teacher's logits; null: the same row
  const int64_t* labels = nullptr;        // (R,), below V
  double* terms = nullptr;                // (R, kTerms); null: not computed
  const Match* match = nullptr;           // of two vocabularies, without terms and masses

  // Computes the losses of rows begin to end, and their gradients times ``weights`` (rows of one
  // number). Rows that are not ``real`` are not read; their loss and gradient are 0.
  void fill(int64_t begin, int64_t end, const bool* real, const Rows& weights,
            double* losses) const;
};

// Stores log Σ exp(slope·z) of rows begin to end.
void log_row_totals(const Rows& logits, double slope, int64_t begin, int64_t end, double* totals);

}  // namespace fastkd
