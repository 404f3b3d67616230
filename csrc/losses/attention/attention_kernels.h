// Kernels of attention.cpp; see base/each_processor.h.

// student − teacher of one query, 0 where a key is not real; without ``real`` all keys are.
template <typename W>
inline Vector<W> difference(const W* s, const W* t, const W* real, int64_t i, int64_t count) {
  const Vector<W> d = load(s + i, count) - load(t + i, count);
  return real == nullptr ? d : load(real + i, count) != 0 ? d : Vector<W>{};
}

// Returns Σ d²; stores d·factor unless ``dx`` is null.
template <typename W>
FASTKD_KERNEL double compare_rows(const W* s, const W* t, const W* real, int64_t n, W factor,
                                  W* dx) {
  return sums_of<W, 1>(n, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> d = difference(s, t, real, i, count);
    sums[0] += d * d;
    if (dx) store<W>(dx + i, d * factor, count);
  })[0];
}

// total ← total + x·factor, or x·factor if it is the first
template <typename W>
FASTKD_KERNEL void add_to(const W* x, int64_t n, bool first, W factor, W* total) {
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> part = load(x + i, count) * factor;
    store<W>(total + i, first ? part : load(total + i, count) + part, count);
  });
}
