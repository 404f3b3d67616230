// Squared differences of attention maps on a CPU, and their gradient.
#pragma once

#include "base/rows.h"

namespace fastkd {

// Contiguous maps (B, H, N, N). With ``mean`` the heads are averaged first.
struct AttentionMaps {
  Rows student, teacher;  // (B·H·N, N)
  int64_t heads_s, heads_t, N;
  bool mean;
  const bool* mask;  // (B, N), or null

  // Number of map pairs of a sample.
  int64_t groups() const { return mean ? 1 : heads_s; }

  // Returns Σ d² over the pairs of real tokens. Stores factor·d, 0 at padding, in ``dx`` (B·H·N, N)
  // of every head of the map, unless that is null.
  double compare(int64_t sample, int64_t group, double factor, const Rows& dx) const;
};

}  // namespace fastkd
