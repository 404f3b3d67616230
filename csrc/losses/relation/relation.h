// Relation loss of one group of N rows on a CPU, around the products of the rows with one another.
#pragma once

#include "base/products.h"
#include "base/rows.h"

namespace fastkd {

// Normalisation of a row: x·scale has length 1.
struct UnitRow {
  bool short_;     // the norm is too small to divide by, so the row keeps another length
  double scale;
  double offset;   // of its relations, from the mean; for a `far` mean from its own square
  double row_sum;  // of A in its row
};

// Student or teacher of a group of N rows. `centre` computes everything but ``x``, ``real`` and
// ``count``.
template <typename W>
struct RelationSide {
  Rows x;
  const bool* real;  // (N)
  int64_t count;     // of real rows
  W* rows;           // (N, D): unit rows minus their mean, 0 at padding; strides as in products.h
  W* mean;           // (D)
  UnitRow* of;       // (N)
  bool far = false;  // the mean is longer than √½

  void centre(int64_t N);

  // dx (+)= factor·∂/∂x of row i, where h is row i of A·rows. ``next``: the next row's dx, or null.
  void gradient(int64_t i, const W* h, double factor, bool add, W* dx, const W* next) const;
};

struct RelationLoss {
  double loss;  // 1 − ρ
  double k;     // ∂/∂R_s = k·A
};

// The loss, from the products (N, N) of student's and teacher's rows on and above the diagonal.
// With ``gradient`` A, minus its row sums on the diagonal, overwrites the student's products.
template <typename W>
RelationLoss pearson(const RelationSide<W>& s, const RelationSide<W>& t, W* products_s,
                     W* products_t, int64_t N, double eps, bool gradient);

}  // namespace fastkd
