// Distances of hidden states on a CPU: squared difference, cosine or smooth ℓ1 of every row, and
// the student's gradient.
#pragma once

#include "losses/row_pairs.h"

namespace fastkd {

enum class Distance { kMse, kCosine, kSmoothL1 };

struct HiddenStates {
  RowPairs pairs;  // student x and teacher y
  Distance distance;
  double beta;  // of smooth ℓ1

  void rows(int64_t begin, int64_t end, double* losses) const;
};

}  // namespace fastkd
