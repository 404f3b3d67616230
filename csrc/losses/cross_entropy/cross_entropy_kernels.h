// Kernels of operator.cpp; see base/each_processor.h.

// Returns the loss of a row of logits; stores weight times its gradient in ``dz``, unless that is
// null. ``dz`` may be the row itself.
template <typename W>
FASTKD_KERNEL double loss_of(const W* z, int64_t n, int64_t label, CrossEntropy of, double weight,
                             W* dz) {
  constexpr W kLeast = -std::numeric_limits<W>::infinity();
  const double smoothing = of.label_smoothing, at_label = double(z[label]);
  Vector<W> found = splat(kLeast);
  const double sum = sums_of<W, 1>(n, [&](int64_t i, int64_t lanes, Vector<W>* sums) {
    found = largest<W>(load(z + i, lanes, kLeast), found);
    sums[0] += load(z + i, lanes);
  })[0];
  const W top = largest<W>(found);
  const double total = sums_of<W, 1>(n, [&](int64_t i, int64_t lanes, Vector<W>* sums) {
    const Vector<W> e = exp<W>(load(z + i, lanes, kLeast) - top);
    sums[0] += e;
    if (dz) store<W>(dz + i, e, lanes);
  })[0];
  const double log_total = std::log(total), log_z = double(top) + log_total;
  double loss = double(top) - at_label;
  if (smoothing != 0) loss = (1 - smoothing) * loss + smoothing * (double(top) - sum / double(n));
  loss += log_total;
  if (of.z_loss != 0) loss += of.z_loss * log_z * log_z;
  if (dz) {
    const double slope = of.z_loss != 0 ? 1 + 2 * of.z_loss * log_z : 1;
    const W factor = W(weight * slope / total), other = W(weight * smoothing / double(n));
    each<W>(n, [&](int64_t i, int64_t lanes) {
      store<W>(dz + i, load(dz + i, lanes) * factor - other, lanes);
    });
    dz[label] -= W(weight * (1 - smoothing));
  }
  return loss;
}

// z ← (z + bias)·scale; ``bias`` may be null
template <typename W>
FASTKD_KERNEL void finish(W* z, const W* bias, int64_t n, double scale) {
  each<W>(n, [&](int64_t i, int64_t lanes) {
    const Vector<W> sum = bias ? load(z + i, lanes) + load(bias + i, lanes) : load(z + i, lanes);
    store<W>(z + i, sum * W(scale), lanes);
  });
}
