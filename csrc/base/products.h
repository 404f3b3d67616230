// Products of a group's rows with one another, and differences of rows, by kernels of a few rows at
// a time.
#pragma once

#include <cstdint>

namespace fastkd {

// Rows of D numbers lie so far apart, 0 behind their end: whole vectors, and no power of two, by
// which many rows would share a few places of a cache.
template <typename W>
constexpr int64_t room_of(int64_t D) {
  constexpr int64_t kLine = 128 / sizeof(W);
  const int64_t room = (D + kLine - 1) / kLine * kLine;
  return room % (8 * kLine) ? room : room + kLine;
}

constexpr int64_t kBlock = 32;  // rows of a product, which one thread makes

// R (N, N) = rows·rowsᵀ, on and above the diagonal: what the rows of a block have with themselves
// and with those behind them.
void multiply_rows(const float* rows, int64_t N, int64_t D, int64_t block, float* R);
void multiply_rows(const double* rows, int64_t N, int64_t D, int64_t block, double* R);

// The rows of a block of A·rows, each with the room of one of ``rows``.
void combine_rows(const float* A, const float* rows, int64_t N, int64_t D, int64_t block, float* h);
void combine_rows(const double* A, const double* rows, int64_t N, int64_t D, int64_t block,
                  double* h);

// Rows that are read next, ``stride`` bytes of each for a number of the rows at hand. To be fetched
// in passing: of more at once than a few lines a processor would wait.
struct Ahead {
  const char* const* rows;
  int64_t count, stride;
};

// sums (A, B): Σ (a − b)² of n numbers of each of the rows.
void compare_rows(const float* const* a, int64_t A, const float* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, float* sums);
void compare_rows(const double* const* a, int64_t A, const double* const* b, int64_t B, int64_t n,
                  const Ahead& ahead, double* sums);

}  // namespace fastkd
