// The nearest rows of the same label on a CPU, by direct difference of all pairs.
#pragma once

#include "rows.h"

namespace fastkd {

struct Neighbours {
  Rows student, teacher;  // (N, D), (M, D)
  int64_t N, M;
  double* distances;  // (N, M), of pairs of the same label; kNone of others

  static constexpr double kNone = -1;

  // Σ (s − t)² of some bank rows and every student row of their label; ``same(i, j)`` says which.
  template <typename Same>
  void measure(int64_t begin, int64_t end, const Same& same) const {
    std::vector<int64_t> pairs;
    for (int64_t j = begin; j < end; ++j) {
      pairs.clear();
      for (int64_t i = 0; i < N; ++i) {
        if (same(i, j)) pairs.push_back(i);
        distances[i * M + j] = kNone;
      }
      measure_one(j, pairs);
    }
  }

  // The k nearest bank rows of a student row, the first of equals; -1 where there are none left.
  // Returns the row's loss, NaN where a row with a NaN or an inf is among those of its label.
  double choose(int64_t row, int64_t k, int64_t* nearest) const;

  // factor·Σ (s − t) over the rows chosen.
  void gradient(int64_t row, int64_t k, const int64_t* nearest, double factor,
                const Rows& out) const;

 private:
  void measure_one(int64_t bank_row, const std::vector<int64_t>& rows) const;
};

}  // namespace fastkd
