// The nearest rows of the same label on a CPU, by direct difference of all pairs.
#pragma once

#include <memory>
#include <vector>

#include "base/rows.h"

namespace fastkd {

// Student rows that share their label, and the bank rows of it.
struct LabelGroup {
  std::vector<int64_t> students, bank;
};

struct Neighbours {
  static constexpr int64_t kRange = 1 << 13;  // of D, a task's at most

  Rows student, teacher;  // (N, D), (M, D), of one type
  int64_t N, M;
  std::vector<LabelGroup> groups{};
  std::vector<int64_t> group_of{};        // (N)
  // (ranges of D, N, M): parts of a row's distances to its group's bank, in its order
  std::unique_ptr<double[]> distances{};

  // Some bank rows of a group, in a range of D.
  struct Tile {
    int64_t group, begin, end, range;
  };

  // Makes ``groups``, as yet without bank rows, of students whose labels have the same bounds, each
  // 8 bytes of whatever type.
  void group(const int64_t* low, const int64_t* high);

  // All ranges of all bank rows, those of a group apart, so that threads have as much to do, and
  // room for their distances.
  std::vector<Tile> tiles();

  // Σ (s − t)² of a tile's rows and its group's students.
  void measure(const Tile& tile) const;

  // weight·loss of a student row, NaN where a row with a NaN or an inf is among those of its label,
  // and the gradient in the same visit, unless ``dx`` has no data.
  double row(int64_t row, int64_t k, double weight, const Rows& dx) const;

 private:
  // The k nearest bank rows, the first of equals, or as many as there are; false where one is no
  // number.
  bool choose(int64_t row, int64_t k, std::vector<int64_t>& nearest) const;

  int64_t ranges() const;

  template <typename W>
  void measure_as(const Tile& tile) const;
};

}  // namespace fastkd
