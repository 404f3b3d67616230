// All kernels keep a tile of sums in registers. Vectors run along the rows, so nothing is packed,
// and each vector of sums is added up at the end. Products of a group are computed for tiles on and
// above the diagonal; the columns of two tiles stay in the first cache while the rows of a block
// pass.
//
// A tile's shape depends on the number of registers, so each kind of processor has its own.
#include "base/products.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastkd {
namespace {

// Bytes of a row, and rows of a strip, that stay in the first cache.
constexpr int64_t kDepth = 4352, kStrip = 64;

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "base/products_kernels.h"
#include "base/each_processor.h"

namespace fastkd {

void multiply_rows(const float* rows, int64_t N, int64_t D, int64_t block, float* R) {
  FASTKD_CALL(multiply_block, rows, N, D, block, R);
}
void multiply_rows(const double* rows, int64_t N, int64_t D, int64_t block, double* R) {
  FASTKD_CALL(multiply_block, rows, N, D, block, R);
}
void combine_rows(const float* A, const float* rows, int64_t N, int64_t D, int64_t block,
                  float* h) {
  FASTKD_CALL(combine_block, A, rows, N, D, block, h);
}
void combine_rows(const double* A, const double* rows, int64_t N, int64_t D, int64_t block,
                  double* h) {
  FASTKD_CALL(combine_block, A, rows, N, D, block, h);
}

void compare_rows(const float* const* a, int64_t A, const float* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, float* sums) {
  FASTKD_CALL(compare_all, a, A, b, B, n, ahead, sums);
}
void compare_rows(const double* const* a, int64_t A, const double* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, double* sums) {
  FASTKD_CALL(compare_all, a, A, b, B, n, ahead, sums);
}

}  // namespace fastkd
