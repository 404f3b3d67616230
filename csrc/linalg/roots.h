// Ordered eigenvalues and eigenvectors of one symmetric matrix, of which `fastkd.linalg.roots` forms
// roots. One source for a CPU's thread and a GPU's warp or block.
#pragma once

#include "linalg/eigen_lanes.h"

namespace fastkd {

// values (n) ascending, vectors (n, n) in columns; NaN if `eigen` fails.
template <typename Lanes>
FASTKD_HOST_DEVICE void decompose(const double* in, double* values, double* vectors,
                                  const EigenScratch& s, const Lanes& lanes) {
  const int64_t n = s.n;
  const double scale = eigen(in, s, lanes);
  if (scale != scale) {
    for (int64_t e = lanes.index; e < n * n; e += lanes.count) vectors[e] = scale;
    for (int64_t i = lanes.index; i < n; i += lanes.count) values[i] = scale;
    return;
  }
  int64_t* places = reinterpret_cast<int64_t*>(s.reflectors);
  for (int64_t i = lanes.index; i < n; i += lanes.count) {
    places[i] = place_of(s.diagonal, i, n);
    values[places[i]] = s.diagonal[i] * scale;
  }
  lanes.sync();
  const int lane = lanes.index % Lanes::kWarp;
  for (int64_t i = lanes.index / Lanes::kWarp; i < n; i += lanes.count / Lanes::kWarp) {
    for (int64_t j = lane; j < n; j += Lanes::kWarp) vectors[j * n + places[i]] = s.rows[i * n + j];
  }
}

}  // namespace fastkd
