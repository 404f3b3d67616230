// Kernels of relation.cpp; see base/each_processor.h.

template <typename W>
FASTKD_KERNEL void times(const W* x, W factor, int64_t D, W* y, Next next) {
  each<W>(D, [&](int64_t i, int64_t count) {
    next.fetch(i);
    store<W>(y + i, load(x + i, count) * factor, count);
  });
}

// sums += Σ (row − first)
template <typename W>
FASTKD_KERNEL void add_up(const W* const* rows, int64_t n, const W* first, int64_t D,
                          double* sums) {
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> base = load(first + i, count);
    Vector<W> total{};
    for (int64_t k = 0; k < n; ++k) total += load(rows[k] + i, count) - base;
    // Whole vectors: sums has room behind its end, and the total is 0 there.
    for (int part = 0; part < kWide<W>; ++part) {
      double* to = sums + i + part * kLanes<double>;
      store(to, load(to) + widened<W>(total, part));
    }
  });
}

// mean ← first + sums·share; returns ‖mean‖²
template <typename W>
FASTKD_KERNEL double find_mean(const W* first, const double* sums, double share, int64_t room,
                               W* mean) {
  constexpr int kSome = kLanes<double>;
  Vector<double> total{};
  for (int64_t i = 0; i < room; i += kSome) {
    VectorN<W, kSome> rounded;
    std::memcpy(&rounded, first + i, sizeof(rounded));
    Vector<double> wide = __builtin_convertvector(rounded, Vector<double>);
    wide += load(sums + i) * share;
    rounded = __builtin_convertvector(wide, decltype(rounded));
    std::memcpy(mean + i, &rounded, sizeof(rounded));
    wide = __builtin_convertvector(rounded, Vector<double>);
    total += wide * wide;
  }
  return sum<double>(total);
}

// row −= mean; returns row·mean
template <typename W>
FASTKD_KERNEL double subtract(W* row, const W* mean, int64_t D) {
  return sums_of<W, 1>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> of_mean = load(mean + i, count), rest = load(row + i, count) - of_mean;
    store<W>(row + i, rest, count);
    sums[0] += rest * of_mean;
  })[0];
}

// dx (+)= factor·(h + y·along) for y = row + mean; with ``removes`` along −= h·y
template <typename W>
FASTKD_KERNEL void project_out(const W* h, const W* row, const W* mean, int64_t D, double factor,
                               double along, bool removes, bool add, W* dx, Next next) {
  if (removes) {
    along -= sums_of<W, 1>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
      next.fetch(i);
      sums[0] += load(h + i, count) * (load(row + i, count) + load(mean + i, count));
    })[0];
  }
  const W of_h = W(factor), of_y = W(along);
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> y = load(row + i, count) + load(mean + i, count);
    Vector<W> x = (load(h + i, count) + y * of_y) * of_h;
    if (add) x += load(dx + i, count);
    store<W>(dx + i, x, count);
  });
}

// totals += x²
template <typename W>
inline void add_squares(const Vector<W>& x, Vector<double>* totals) {
  for (int part = 0; part < kWide<W>; ++part) {
    const Vector<double> wide = widened<W>(x, part);
    totals[part] += wide * wide;
  }
}

// Entries j to j + count of a centred relation's row.
template <typename W>
inline Vector<W> at(const RelationRow<W>& row, int64_t j, int64_t count) {
  return (load(row.products + j, count) + (load(row.u + j, count) + row.own)) *
         load(row.real + j, count);
}

template <typename W>
FASTKD_KERNEL double squares(const RelationRow<W>& row, int64_t N) {
  Vector<double> totals[kWide<W>]{};
  each<W>(N, [&](int64_t j, int64_t count) { add_squares<W>(at(row, j, count), totals); });
  return sum_of_parts<W>(totals);
}

template <typename W>
FASTKD_KERNEL double differences(const RelationRow<W>& s, const RelationRow<W>& t, W to_a, W to_b,
                                 int64_t N) {
  Vector<double> totals[kWide<W>]{};
  each<W>(N, [&](int64_t j, int64_t count) {
    add_squares<W>(at(t, j, count) * to_b - at(s, j, count) * to_a, totals);
  });
  return sum_of_parts<W>(totals);
}

// A ← b − ρa; returns its sum
template <typename W>
FASTKD_KERNEL double derivatives(const RelationRow<W>& s, const RelationRow<W>& t, W to_a, W to_b,
                                 W loss, int64_t N, W* A) {
  return sums_of<W, 1>(N, [&](int64_t j, int64_t count, Vector<W>* sums) {
    const Vector<W> a = at(s, j, count) * to_a, d = at(t, j, count) * to_b - a;
    const Vector<W> of = d + a * loss;
    sums[0] += of;
    store<W>(A + j, of, count);
  })[0];
}
