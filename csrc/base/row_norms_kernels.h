// Kernel of row_norms.cpp; see each_processor.h.

template <typename W>
FASTKD_KERNEL double squares_of(const W* x, int64_t n) {
  constexpr int64_t kSums = 4;  // independent, to hide the latency of additions
  Vector<W> totals[kSums]{};
  const int64_t rest = n - n % (kSums * kLanes<W>);
  for (int64_t i = 0; i < rest; i += kSums * kLanes<W>) {
    for (int64_t k = 0; k < kSums; ++k) {
      const Vector<W> part = load(x + i + k * kLanes<W>);
      totals[k] += part * part;
    }
  }
  each<W>(n - rest, [&](int64_t i, int64_t count) {
    const Vector<W> part = load(x + rest + i, count);
    totals[0] += part * part;
  });
  return sum<W>((totals[0] + totals[1]) + (totals[2] + totals[3]));
}
