// Products and squared differences of rows with rows, a few rows at a time.
#pragma once

#include <cstdint>

namespace fastkd {

// Stride of rows of D numbers, with zeros behind their end: whole vectors, and no power of two,
// which would let many rows compete for a few cache sets.
template <typename W>
constexpr int64_t room_of(int64_t D) {
  constexpr int64_t kLine = 128 / sizeof(W);
  const int64_t room = (D + kLine - 1) / kLine * kLine;
  return room % (8 * kLine) ? room : room + kLine;
}

constexpr int64_t kBlock = 32;  // rows of a product that one call computes

// R (N, N) = rows·rowsᵀ on and above the diagonal, for the rows of one block.
void multiply_rows(const float* rows, int64_t N, int64_t D, int64_t block, float* R);
void multiply_rows(const double* rows, int64_t N, int64_t D, int64_t block, double* R);

// h = rows of one block of A·rows, with the stride of ``rows``.
void combine_rows(const float* A, const float* rows, int64_t N, int64_t D, int64_t block, float* h);
void combine_rows(const double* A, const double* rows, int64_t N, int64_t D, int64_t block,
                  double* h);

// Rows to prefetch while others are compared, ``stride`` bytes of each for a number of these: a
// processor has few outstanding loads, so many lines at once would stall it.
struct Ahead {
  const char* const* rows;
  int64_t count, stride;
};

// sums (A, B): Σ (a − b)² over n numbers of each pair of rows.
void compare_rows(const float* const* a, int64_t A, const float* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, float* sums);
void compare_rows(const double* const* a, int64_t A, const double* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, double* sums);

}  // namespace fastkd
