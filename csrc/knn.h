// The nearest rows of the same label on a CPU, by direct difference of all pairs.
#pragma once

#include <limits>

#include "rows.h"

namespace fastkd {

struct Neighbours {
  Rows student, teacher;  // (N, D), (M, D)
  int64_t N, M;
  double* distances;  // (N, M), of pairs of the same label; kNone of others

  static constexpr double kNone = std::numeric_limits<double>::max();

  // Σ (s − t)² of some bank rows and every student row of their label, as ``same(i, j)`` says.
  template <typename Same>
  void measure(int64_t begin, int64_t end, const Same& same) const {
    std::vector<uint16_t> pairs(N);
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const int64_t count = end - tile < kTile ? end - tile : kTile;
      for (int64_t i = 0; i < N; ++i) {
        pairs[i] = 0;
        for (int64_t j = 0; j < count; ++j) {
          const bool is_pair = same(i, tile + j);
          pairs[i] |= uint16_t(is_pair << j);
          distances[i * M + tile + j] = is_pair ? 0 : kNone;
        }
      }
      measure_tile(tile, count, pairs);
    }
  }

  // The k nearest bank rows of a student row, the first of equals; -1 where there are none left.
  // Returns the row's loss, NaN where a row with a NaN or an inf is among those of its label.
  double choose(int64_t row, int64_t k, int64_t* nearest) const;

  // factor·Σ (s − t) over the rows chosen.
  void gradient(int64_t row, int64_t k, const int64_t* nearest, double factor,
                const Rows& out) const;

 private:
  static constexpr int64_t kTile = 16;  // bank rows of which the nearest cache holds a block

  // ``pairs`` has a bit for each of the tile's rows.
  void measure_tile(int64_t tile, int64_t count, const std::vector<uint16_t>& pairs) const;

  template <typename W>
  void measure_as(int64_t tile, int64_t count, const std::vector<uint16_t>& pairs) const;
};

}  // namespace fastkd
