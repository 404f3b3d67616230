// Losses of pairs of rows, computed row by row along with their gradients.
#pragma once

#include "base/rows.h"

namespace fastkd {

struct RowPairs {
  Rows x, y;
  Rows dx, dy;                 // gradients; null: not computed
  double scale;                // of the gradients
  Rows weights{};              // factor of each row's loss; null: 1
  const bool* mask = nullptr;  // rows that count; null: all

  // Rows of at most so many columns are computed in float64: where a few terms cancel, nothing but
  // their rounding error would be left.
  static constexpr int64_t kShortRow = 64;

  // Calls visit(i, a, b, scale, loss, da, db) for each row that counts: a and b as float, or as
  // double where visit returned false without results. Other rows get a loss and gradients of 0.
  template <typename Visit>
  void each(int64_t begin, int64_t end, double* losses, const Visit& visit) const {
    Copies<float> narrow{x.type, x.n};
    Copies<double> wide{x.type, x.n};
    const auto row = [&](int64_t i, double factor, auto& copies) {
      const auto *a = x.read(i, 0, x.n, copies[0]), *b = y.read(i, 0, x.n, copies[1]);
      auto *da = dx.write(i, 0, copies[2]), *db = dy.write(i, 0, copies[3]);
      const bool done = visit(i, a, b, factor, losses + i, da, db);
      if (done) dx.written(i, 0, x.n, da), dy.written(i, 0, x.n, db);
      return done;
    };
    const bool short_or_double = x.type == Type::kDouble || x.n <= kShortRow;
    for (int64_t i = begin; i < end; ++i) {
      if (mask && !mask[i]) {
        losses[i] = 0;
        for (const Rows& gradient : {dx, dy}) {
          if (gradient.data) std::memset(gradient.place(i, 0), 0, x.n * size_of(gradient.type));
        }
        continue;
      }
      const double weight = weights.data ? weights.get(i) : 1;
      if (short_or_double || !row(i, scale * weight, narrow)) row(i, scale * weight, wide);
      losses[i] *= weight;
    }
  }
};

}  // namespace fastkd
