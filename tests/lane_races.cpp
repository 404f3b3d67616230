// csrc/linalg/eigen_lanes.h on threads, for ThreadSanitizer, with repeated, zero and distinct
// eigenvalues.
#include <cstdio>
#include <vector>

#include "linalg/eigen_lanes.h"
#include "thread_lanes.h"

template <typename Lanes>
void solve(int64_t n, int warps) {
  std::vector<double> in(n * n);
  for (int64_t e = 0; e < n * n; ++e) in[e] = double((e / n) * (e % n) % 5) + (e / n == e % n);
  std::vector<char> matrices(fastkd::EigenScratch::matrices_size(n));
  std::vector<char> vectors(fastkd::EigenScratch::vectors_size(n));
  const fastkd::EigenScratch scratch(n, matrices.data(), vectors.data());
  Lanes::run(warps * Lanes::kWarp, [&](const Lanes& lanes) {
    if (!(fastkd::eigen(in.data(), scratch, lanes) > 0)) std::printf("n = %d failed\n", int(n));
  });
}

int main() {
  for (const int64_t n : {1, 2, 3, 9, 14}) {
    for (const int warps : {1, 3}) solve<fastkd::ThreadLanes<2>>(n, warps);
    solve<fastkd::ThreadLanes<2, true>>(n, 1);
  }
}
