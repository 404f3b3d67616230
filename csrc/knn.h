// The nearest rows of the same label on a CPU, by direct difference of all pairs.
#pragma once

#include <memory>
#include <vector>

#include "rows.h"

namespace fastkd {

// Student rows that share their label, and the bank rows of it.
struct LabelGroup {
  std::vector<int64_t> students, bank;
};

struct Neighbours {
  Rows student, teacher;  // (N, D), (M, D)
  int64_t N, M;
  std::vector<LabelGroup> groups{};
  std::vector<int64_t> group_of{};        // (N)
  std::unique_ptr<double[]> distances{};  // (N, M): of a row those to its group's bank, in its order

  // Some bank rows of a group.
  struct Tile {
    int64_t group, begin, end;
  };

  // Makes ``groups``, as yet without bank rows, of students whose labels have the same bounds, each
  // 8 bytes of whatever type.
  void group(const int64_t* low, const int64_t* high);

  // All bank rows of all groups, those of a group apart, so that threads have as much to do.
  std::vector<Tile> tiles() const;

  // Σ (s − t)² of a tile's rows and its group's students.
  void measure(const Tile& tile) const;

  // weight·loss of a student row, NaN where a row with a NaN or an inf is among those of its label,
  // and the gradient in the same visit, unless ``dx`` has no data.
  double row(int64_t row, int64_t k, double weight, const Rows& dx) const;

 private:
  // The k nearest bank rows, the first of equals, or as many as there are; false where one is no
  // number.
  bool choose(int64_t row, int64_t k, std::vector<int64_t>& nearest) const;

  template <typename W>
  void measure_as(const Tile& tile) const;
};

}  // namespace fastkd
