// Eigenvectors as a CUDA block or warp computes them, with lanes that are threads: a C function for
// tests without a GPU.
#include <vector>

#include "linalg/roots.h"
#include "thread_lanes.h"

namespace {

using namespace fastkd;

constexpr int kWarp = 3;  // threads; small, so that several warps are cheap

template <typename Lanes>
void each_matrix(const double* in, int64_t batch, int64_t n, int lanes, double* values,
                 double* vectors) {
  std::vector<char> memory(EigenScratch::matrices_size(n) + EigenScratch::vectors_size(n));
  const EigenScratch scratch(n, memory.data(), memory.data() + EigenScratch::matrices_size(n));
  for (int64_t i = 0; i < batch; ++i) {
    Lanes::run(lanes, [&](const Lanes& lanes) {
      decompose(in + i * n * n, values + i * n, vectors + i * n * n, scratch, lanes);
    });
  }
}

}  // namespace

// Float64 matrices (batch, n, n); ``warps`` of a block, 0 for one warp without a block.
extern "C" void eigh_by_threads(const double* in, int64_t batch, int64_t n, int warps,
                                double* values, double* vectors) {
  if (warps == 0) {
    each_matrix<ThreadLanes<kWarp, true>>(in, batch, n, kWarp, values, vectors);
  } else {
    each_matrix<ThreadLanes<kWarp>>(in, batch, n, warps * kWarp, values, vectors);
  }
}
