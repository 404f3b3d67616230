// Kernels of hidden_states.cpp; see base/each_processor.h. Each stores the loss of a row, and in
// ``dx``, unless it is null, the gradient of scale times it.

// Whether sums of float squares are exact enough: far from overflow, and no NaN.
template <typename W>
inline bool is_in_range(double total) {
  return sizeof(W) > sizeof(float) || total < 1e30;
}

// mean (x − y)². An infinite difference makes the loss NaN, by d − d. Returns false, without results, if the sum leaves the range of W.
template <typename W>
FASTKD_KERNEL bool squares(const W* x, const W* y, int64_t D, double scale, double* loss, W* dx) {
  const W factor = W(2 * scale / double(D));
  const double total = sums_of<W, 1>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> d = load(x + i, count) - load(y + i, count);
    sums[0] += d * d + (d - d);
    if (dx) store<W>(dx + i, d * factor, count);
    fetch(x + D + i), fetch(y + D + i);  // prefetch the next rows, if rows are contiguous
  })[0];
  *loss = total / double(D);
  return is_in_range<W>(total);
}

// The mean of (x − y)²/2β where |x − y| < β, else |x − y| − β/2; its slope is (x − y)/β or the
// sign; both are NaN where it is infinite. Returns false, without results, if the sum leaves the range of W.
template <typename W>
FASTKD_KERNEL bool smooth_l1(const W* x, const W* y, int64_t D, double beta, double scale,
                             double* loss, W* dx) {
  const W width = W(beta), factor = W(scale / double(D));
  const double total = sums_of<W, 1>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> d = load(x + i, count) - load(y + i, count);
    const Vector<W> size = d < 0 ? -d : d, ratio = d / width;
    const auto is_near = size < width;
    sums[0] += keep<W>(is_near ? d * ratio / 2 : (size - width / 2) + (d - d), count);
    // 0 and NaN stay what they are.
    const Vector<W> sign = (d > 0 ? splat(W(1)) : d < 0 ? splat(W(-1)) : d) + (d - d);
    if (dx) store<W>(dx + i, (is_near ? ratio : sign) * factor, count);
    fetch(x + D + i), fetch(y + D + i);
  })[0];
  *loss = total / double(D);
  return is_in_range<W>(total);
}

// 1 − x̂·ŷ = ½‖x̂ − ŷ‖², which does not cancel where the rows are nearly parallel; 1 if either row
// is zero and the other finite. Its gradient is (x̂ − ŷ − loss·x̂)/‖x‖.
template <typename W>
FASTKD_KERNEL void cosine(const W* x, const W* y, int64_t D, double of_x, double of_y, double scale,
                          double* loss, W* dx) {
  const bool is_zero = (of_x == 0 || of_y == 0) && !std::isnan(of_x + of_y);
  // x̂ − ŷ = (x − y‖x‖/‖y‖)/‖x‖: exactly 0 for parallel rows, also where products are fused.
  const W by_x = W(of_x), ratio = is_zero ? W(0) : W(of_y / of_x);
  const double total = sums_of<W, 1>(D, [&](int64_t i, int64_t count, Vector<W>* sums) {
    const Vector<W> d = (load(x + i, count) - load(y + i, count) * ratio) * by_x;
    sums[0] += d * d;
    fetch(x + D + i), fetch(y + D + i);
  })[0];
  *loss = is_zero ? 1 : total / 2;
  if (!dx) return;
  const W along = W(*loss), factor = is_zero ? W(0) : W(scale * of_x);
  each<W>(D, [&](int64_t i, int64_t count) {
    const Vector<W> a = load(x + i, count), d = a - load(y + i, count) * ratio;
    store<W>(dx + i, (d - a * along) * by_x * factor, count);
  });
}
