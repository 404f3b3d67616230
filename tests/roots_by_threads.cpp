// The matrix roots as a CUDA block or warp computes them, with lanes that are threads: a C function
// for tests without a GPU.
#include <vector>

#include "linalg/roots.h"
#include "thread_lanes.h"

namespace {

using namespace fastkd;

constexpr int kWarp = 3;  // threads; small, so that several warps are cheap

template <typename Lanes, typename T>
void each_matrix(const T* in, int64_t batch, int64_t n, Options options, int lanes, T* root,
                 T* values, T* vectors) {
  std::vector<char> memory(EigenScratch::matrices_size(n) + EigenScratch::vectors_size(n));
  const EigenScratch scratch(n, memory.data(), memory.data() + EigenScratch::matrices_size(n));
  for (int64_t i = 0; i < batch; ++i) {
    Lanes::run(lanes, [&](const Lanes& lanes) {
      decompose(in + i * n * n, options, root + i * n * n, values + i * n, vectors + i * n * n,
                scratch, lanes);
    });
  }
}

template <typename T>
void run(const void* in, int64_t batch, int64_t n, bool inverse, double ridge, int warps,
         void* root, void* values, void* vectors) {
  const auto of = [](void* x) { return static_cast<T*>(x); };
  const T* const a = static_cast<const T*>(in);
  const Options options{inverse, ridge};
  if (warps == 0) {
    each_matrix<ThreadLanes<kWarp, true>>(a, batch, n, options, kWarp, of(root), of(values),
                                          of(vectors));
  } else {
    each_matrix<ThreadLanes<kWarp>>(a, batch, n, options, warps * kWarp, of(root), of(values),
                                    of(vectors));
  }
}

}  // namespace

// Matrices (batch, n, n) of float32, or of float64 if ``wide``; ``warps`` of a block, 0 for one
// warp without a block.
extern "C" void roots_by_threads(const void* in, int64_t batch, int64_t n, bool wide, bool inverse,
                                 double ridge, int warps, void* root, void* values, void* vectors) {
  const auto run_as = wide ? run<double> : run<float>;
  run_as(in, batch, n, inverse, ridge, warps, root, values, vectors);
}
