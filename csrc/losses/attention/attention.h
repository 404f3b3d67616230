// Attention maps on a CPU: squared differences of two maps, and their gradient.
#pragma once

#include "base/rows.h"

namespace fastkd {

// Maps (B, H, N, N), dense; those of all heads are averaged first where ``mean``.
struct AttentionMaps {
  Rows student, teacher;  // (B·H·N, N)
  int64_t heads_s, heads_t, N;
  bool mean;
  const bool* mask;  // (B, N), or null

  // Maps of a sample that are compared.
  int64_t groups() const { return mean ? 1 : heads_s; }

  // Σ d² over the pairs of real tokens. factor·d, 0 at padding, goes to ``dx`` (B·H·N, N), to every
  // head that the map was made of, unless that has no data.
  double compare(int64_t sample, int64_t group, double factor, const Rows& dx) const;
};

}  // namespace fastkd
