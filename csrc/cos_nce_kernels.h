// Kernels of cos_nce.cpp; see each_processor.h.

template <typename W>
FASTKD_KERNEL double squares_of(const W* x, int64_t n) {
  return sums_of<W, 1>(n, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> part = load(x + i, count);
    sums[0] += part * part;
  })[0];
}

template <typename W>
FASTKD_KERNEL void add_to(const W* x, int64_t n, double factor, double* sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += double(x[i]) * factor;
}

template <typename W>
FASTKD_KERNEL Products products_of(const W* z, const W* t, const W* s, int64_t n) {
  const auto found = sums_of<W, 4>(n, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> a = load(z + i, count), b = load(t + i, count);
    sums[0] += a * a, sums[1] += b * b, sums[2] += a * b, sums[3] += a * load(s + i, count);
  });
  return {found[0], found[1], found[2], found[3]};
}

template <typename W>
FASTKD_KERNEL void combination_of(const W* z, const W* t, const W* s, int64_t n, W of_z, W of_t,
                                  W of_s, W outer, W* dz) {
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> away = load(s + i, count) * of_s - load(t + i, count) * of_t;
    store<W>(dz + i, (away - load(z + i, count) * of_z) * outer, count);
  });
}
