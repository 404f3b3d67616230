// Kernels of knn.cpp; see base/each_processor.h.

// Returns Σ ‖(s − t)·shrink‖² over K rows t, in float64; stores factor·Σ (s − t) unless ``dx`` is
// null.
template <typename W>
FASTKD_KERNEL double visit(const W* s, const W* const* t, int64_t K, int64_t n, double shrink,
                           W factor, W* dx) {
  Vector<double> totals[kWide<W>]{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> x = load(s + i, count);
    Vector<W> sum{};
    for (int64_t k = 0; k < K; ++k) {
      const Vector<W> y = load(t[k] + i, count);
      for (int part = 0; part < kWide<W>; ++part) {
        const Vector<double> d = (widened<W>(x, part) - widened<W>(y, part)) * shrink;
        totals[part] += d * d;
      }
      if (dx) sum += x - y;
    }
    if (dx) store<W>(dx + i, sum * factor, count);
  });
  return sum_of_parts<W>(totals);
}
