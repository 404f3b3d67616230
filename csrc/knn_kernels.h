// Kernels of knn.cpp; see each_processor.h.

// As many numbers as a vector has in float64.
template <typename W>
inline Vector<double> load_wide(const W* p, int64_t count) {
  VectorN<W, kLanes<double>> x{};
  if (count == kLanes<double>) {
    std::memcpy(&x, p, sizeof(x));
  } else {
    std::memcpy(&x, p, count * sizeof(W));
  }
  return __builtin_convertvector(x, Vector<double>);
}

// Σ ‖(s − t)·shrink‖² in float64 over K rows t; factor·Σ (s − t) unless ``dx`` is null.
template <typename W>
FASTKD_KERNEL double visit(const W* s, const W* const* t, int64_t K, int64_t n, double shrink,
                           W factor, W* dx) {
  constexpr int64_t kHalf = kLanes<double>;
  Vector<double> low{}, high{};  // of the lanes of W
  each<W>(n, [&](int64_t i, int64_t count) {
    Vector<W> sum{};
    for (int64_t k = 0; k < K; ++k) {
      const auto add = [&](int64_t first, int64_t some, Vector<double>& total) {
        const Vector<double> x = load_wide(s + first, some), y = load_wide(t[k] + first, some);
        const Vector<double> d = (x - y) * shrink;
        total += d * d;
      };
      add(i, std::min(count, kHalf), low);
      if (count > kHalf) add(i + kHalf, count - kHalf, high);
      if (dx) sum += load(s + i, count) - load(t[k] + i, count);
    }
    if (dx) store<W>(dx + i, sum * factor, count);
  });
  return sum<double>(low + high);
}
