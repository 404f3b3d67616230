// Mean squared distance to the k nearest teacher rows of the same label, on a CPU.
#pragma once

#include <memory>
#include <vector>

#include "base/rows.h"

namespace fastkd {

// Student rows with one label (or one range of labels), and the bank rows of that label.
struct LabelGroup {
  std::vector<int64_t> students, bank;
};

struct Neighbours {
  static constexpr int64_t kRange = 1 << 13;  // most features of a task

  Rows student, teacher;  // (N, D) and the bank (M, D), of one type
  int64_t N, M;
  std::vector<LabelGroup> groups{};
  std::vector<int64_t> group_of{};        // (N)
  // (ranges of D, N, M): partial distances of a student row to its group's bank rows, in their
  // order
  std::unique_ptr<double[]> distances{};

  // A task: some bank rows of a group, in a range of features.
  struct Tile {
    int64_t group, begin, end, range;
  };

  // Fills ``groups`` with the students of equal label bounds, without bank rows. Bounds are
  // compared as 8 bytes, of whatever type.
  void group(const int64_t* low, const int64_t* high);

  // All tasks, of about equal work. Allocates ``distances``.
  std::vector<Tile> tiles();

  // Stores Σ (s − t)² of a tile's bank rows and its group's students.
  void measure(const Tile& tile) const;

  // Returns weight·loss of a student row and stores the gradient, unless ``dx`` is null. NaN if a
  // row of its label, or the row itself, has a NaN or infinity.
  double row(int64_t row, int64_t k, double weight, const Rows& dx) const;

 private:
  // Finds the k nearest bank rows, fewer if the group has fewer; of equal distances the lower
  // index. False if a distance is NaN.
  bool choose(int64_t row, int64_t k, std::vector<int64_t>& nearest) const;

  int64_t ranges() const;

  template <typename W>
  void measure_as(const Tile& tile) const;
};

}  // namespace fastkd
