// Relations on a CPU: what stands around the products of a group's rows with one another.
#pragma once

#include "base/products.h"
#include "base/rows.h"

namespace fastkd {

// What makes a row one of length 1: x·power·scale; power is 1 but for rows near the largest number.
struct UnitRow {
  bool short_;        // of any length, since the norm is too small to divide by
  double power, scale;
  double derivative;  // of scale times power
  double offset;      // of its relations, from the mean; from its own square where that is `far`
  double row_sum;     // of its derivatives
};

// One side of a group of N rows. `centre` makes all but ``x``, ``real`` and ``count``.
template <typename W>
struct RelationSide {
  Rows x;
  const bool* real;  // (N)
  int64_t count;     // of real rows
  W* rows;           // (N, D): those of length 1 less their mean; 0 where there is none
  W* mean;           // (D), each of these with the room that products.h wants
  UnitRow* of;       // (N)
  bool far = false;  // whether the mean is long

  void centre(int64_t N);

  // dx (+)= factor·∂/∂x of row i, where h are the products of A with the rows; ``next`` is where the
  // next row's goes, or null.
  void gradient(int64_t i, const W* h, double factor, bool add, W* dx, const W* next) const;
};

struct RelationLoss {
  double loss;  // 1 − ρ
  double k;     // ∂/∂R_s = k·A
};

// Of the products (N, N) of each side's rows, on and above the diagonal; A takes the place of the
// student's, its row sums taken from the diagonal, where a gradient is wanted.
template <typename W>
RelationLoss pearson(const RelationSide<W>& s, const RelationSide<W>& t, W* products_s,
                     W* products_t, int64_t N, double eps, bool gradient);

}  // namespace fastkd
