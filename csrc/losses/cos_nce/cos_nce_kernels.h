// Kernels of cos_nce.cpp; see base/each_processor.h.

template <typename W>
FASTKD_KERNEL double squares_of(const W* x, int64_t n, Next next) {
  return sums_of<W, 1>(n, [&](int64_t i, int64_t count, Vector<W>* sums) {
    next.fetch(i);
    const Vector<W> part = load(x + i, count);
    sums[0] += part * part;
  })[0];
}

// sums += Σ row·factor
template <int kRows, typename W>
inline void add_some(const W* const* rows, const double* factors, int64_t n, double* sums) {
  each<W>(n, [&](int64_t i, int64_t count) {
    Vector<W> total{};
    for (int k = 0; k < kRows; ++k) total += load(rows[k] + i, count) * W(factors[k]);
    for (int part = 0; part < kWide<W> && part * kLanes<double> < count; ++part) {
      const int64_t start = part * kLanes<double>;
      const int64_t some = std::min<int64_t>(count - start, kLanes<double>);
      double* const to = sums + i + start;
      store(to, load(to, some) + widened<W>(total, part), some);
    }
  });
}

// Several rows in one pass: the float64 sums are twice as long as a row, and are read and written
// once.
template <typename W>
FASTKD_KERNEL void add_to(const W* const* rows, const double* factors, int64_t count, int64_t n,
                          double* sums) {
  int64_t k = 0;
  for (; k + kTogether <= count; k += kTogether) add_some<kTogether>(rows + k, factors + k, n, sums);
  for (; k < count; ++k) add_some<1>(rows + k, factors + k, n, sums);
}

template <typename W>
FASTKD_KERNEL Products products_of(const W* z, const W* t, const W* s, int64_t n, Next next) {
  const auto found = sums_of<W, 4>(n, [&](int64_t i, int64_t count, Vector<W>* sums) {
    next.fetch(i);
    const Vector<W> a = load(z + i, count), b = load(t + i, count);
    sums[0] += a * a, sums[1] += b * b, sums[2] += a * b, sums[3] += a * load(s + i, count);
  });
  return {found[0], found[1], found[2], found[3]};
}

template <typename W>
FASTKD_KERNEL void combination_of(const W* z, const W* t, const W* s, int64_t n, W of_z, W of_t,
                                  W of_s, W outer, W* dz, Next next) {
  each<W>(n, [&](int64_t i, int64_t count) {
    next.fetch(i);
    const Vector<W> away = load(s + i, count) * of_s - load(t + i, count) * of_t;
    store<W>(dz + i, (away - load(z + i, count) * of_z) * outer, count);
  });
}
