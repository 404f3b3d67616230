// Kernels of cos_nce.cpp; see each_processor.h.

template <typename W>
FASTKD_KERNEL double squares_of(const W* x, int64_t n) {
  Vector<W> total{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> part = load(x + i, count);
    total += part * part;
  });
  return sum<W>(total);
}

template <typename W>
FASTKD_KERNEL void add_to(const W* x, int64_t n, double factor, double* sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += double(x[i]) * factor;
}

template <typename W>
FASTKD_KERNEL Products products_of(const W* z, const W* t, const W* s, int64_t n) {
  Vector<W> z_z{}, t_t{}, z_t{}, z_s{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> a = load(z + i, count), b = load(t + i, count);
    z_z += a * a, t_t += b * b, z_t += a * b, z_s += a * load(s + i, count);
  });
  return {sum<W>(z_z), sum<W>(t_t), sum<W>(z_t), sum<W>(z_s)};
}

template <typename W>
FASTKD_KERNEL void combination_of(const W* z, const W* t, const W* s, int64_t n, W of_z, W of_t,
                                  W of_s, W outer, W* dz) {
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> away = load(s + i, count) * of_s - load(t + i, count) * of_t;
    store<W>(dz + i, (away - load(z + i, count) * of_z) * outer, count);
  });
}
