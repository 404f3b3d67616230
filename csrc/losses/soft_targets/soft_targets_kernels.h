// Kernels of soft_targets.cpp; see base/each_processor.h.

// p·x, and 0 for a probability of 0, also if x is infinite.
template <typename W>
inline Vector<W> times(Vector<W> p, Vector<W> x) {
  return p == 0 ? Vector<W>{} : p * x;
}

// sum + p·x likewise, in a form that becomes one fused multiply-add.
template <typename W>
inline Vector<W> plus(Vector<W> sum, Vector<W> p, Vector<W> x) {
  return p != 0 ? sum + p * x : sum;
}

template <typename W>
inline Vector<W> absolute(Vector<W> x) {
  using B = typename FloatFormat<W>::Bits;
  return (Vector<W>)((Bits<W>)x & std::numeric_limits<B>::max());
}

// Largest of ``top`` and n logits; in four independent vectors, to hide the latency of max.
template <typename W>
inline double top_of(const W* z, int64_t n, double top) {
  constexpr int kApart = 4;
  Vector<W> found[kApart];
  for (auto& x : found) x = splat(W(-kInfinity));
  int64_t i = 0;
  for (; i + kApart * kLanes<W> <= n; i += kApart * kLanes<W>) {
    for (int j = 0; j < kApart; ++j) {
      found[j] = largest<W>(load(z + i + j * kLanes<W>), found[j]);
    }
  }
  each<W>(n - i, [&](int64_t k, int64_t count) {
    found[0] = largest<W>(load(z + i + k, count, W(-kInfinity)), found[0]);
  });
  found[0] = largest<W>(largest<W>(found[0], found[1]), largest<W>(found[2], found[3]));
  return std::max(double(largest<W>(found[0])), top);
}

// Copies kLanes<W> picks from ``start`` on, if there are more. Behind the last one, padding is read.
template <typename W, typename T>
FASTKD_KERNEL inline void pick_as(const Picks& of, int64_t start) {
  const T* row = reinterpret_cast<const T*>(of.row);
  const int32_t* ids = of.ids + start;
  T* out = reinterpret_cast<T*>(of.out) + start;
  int64_t i = 0;
#if defined(FASTKD_KINDS)
  if constexpr (kBytes >= 32 && std::is_same_v<W, float> && std::is_same_v<T, float>) {
    for (; i < kLanes<W>; i += 8) {
      const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i));
      _mm256_storeu_ps(out + i, _mm256_i32gather_ps(row, at, sizeof(T)));
    }
  }
#endif
#pragma GCC unroll 16
  for (; i < kLanes<W>; ++i) out[i] = row[ids[i]];
}

template <typename W>
FASTKD_KERNEL inline void pick_some(const Picks& of, int64_t start) {
  if (start >= of.count) return;
  of.next.fetch(start), of.next.fetch(start + kLanes<W> / 2);
  if (of.size == sizeof(float)) {
    pick_as<W, float>(of, start);
  } else if (of.size == sizeof(double)) {
    pick_as<W, double>(of, start);
  } else {
    pick_as<W, uint16_t>(of, start);
  }
}

// Copies the picks from ``start`` on.
FASTKD_KERNEL void pick(const Picks& of, int64_t start) {
  for (; start < of.count; start += kLanes<float>) pick_some<float>(of, start);
}

template <Divergence divergence, bool picks, typename W>
inline void weigh_as(const W* z_s, const W* z_t, int64_t n, Exponents<W> by, const Picks& ahead,
                     Part& part, Kept<W> kept) {
  constexpr bool adaptive = divergence == Divergence::kAdaptiveKl;
  constexpr bool both = adaptive || divergence == Divergence::kMixed;
  constexpr bool reverse = divergence == Divergence::kReverseKl || both;
  constexpr bool forward =
      divergence == Divergence::kForwardKl || divergence == Divergence::kLk || both;
  constexpr bool second = is_of_mixture(divergence) || is_of_overlap(divergence);
  constexpr bool js = divergence == Divergence::kJs;
  const W base_s = W(part.base_s), base_t = W(part.base_t);
  Vector<W> sum_s{}, sum_t{}, cross_s{}, cross_t{}, mean_t{};
  each<W>(n, [&](int64_t i, int64_t count) {
    if constexpr (picks) {
      pick_some<W>(ahead, i);
    } else {
      fetch(z_s + n + i), fetch(z_t + n + i);  // prefetch the next block
    }
    const Vector<W> x_s = load(z_s + i, count, W(-kInfinity)) - base_s;
    const Vector<W> x_t = load(z_t + i, count, W(-kInfinity)) - base_t, gap = x_s - x_t;
    Bits<W> none_s, none_t;
    const Vector<W> w_s = raised_exp<W>(x_s, by, none_s);
    const Vector<W> w_t = raised_exp<W>(x_t, by, none_t);
    sum_s += w_s, sum_t += w_t;
    // An entry whose weight is 0 adds nothing, also if its gap is infinite.
    if constexpr (reverse) cross_s = none_s ? cross_s : cross_s + w_s * gap;
    if constexpr (forward) cross_t = none_t ? cross_t : cross_t - w_t * gap;
    if constexpr (adaptive) mean_t = none_t ? mean_t : mean_t + w_t * x_t;
    store<W>(kept.weights_s + i, w_s, count);
    if (forward || second || kept.has_t) store<W>(kept.weights_t + i, w_t, count);
    if constexpr (reverse || js) store<W>(kept.gaps + i, gap, count);
  });
  if constexpr (picks) pick(ahead, n);
  part.total_s = sum<W>(sum_s), part.total_t = sum<W>(sum_t);
  part.cross_s = sum<W>(cross_s) * by.slope, part.cross_t = sum<W>(cross_t) * by.slope;
  if constexpr (adaptive) part.mean_t = sum<W>(mean_t) * by.slope;
}

// Adds KL(p_s ‖ m) and KL(p_t ‖ m) of a block to ``sums``, m the mean. log(p/m) is computed for the
// larger of p_s and p_t; for the smaller one it is that plus the (negative) log ratio.
template <typename W>
inline void js_of(int64_t n, W slope, const Part& part, Kept<W> kept, double* sums) {
  const W to_ps = W(part.to_ps), to_pt = W(part.to_pt), to_ratio = W(part.to_ratio);
  Vector<W> to_student{}, to_teacher{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> p_s = load(kept.weights_s + i, count) * to_ps;
    const Vector<W> p_t = load(kept.weights_t + i, count) * to_pt;
    const Vector<W> ratio = load(kept.gaps + i, count) * slope + to_ratio;
    const Vector<W> below = -absolute<W>(ratio);
    const auto is_s = ratio > 0;
    const Vector<W> larger = is_s ? p_s : p_t, smaller = is_s ? p_t : p_s;
    const Vector<W> of_larger = log_over_mean<W>(larger, smaller), of_smaller = of_larger + below;
    const Vector<W> of_s = is_s ? of_larger : of_smaller;
    to_student = plus<W>(to_student, p_s, of_s);
    to_teacher = plus<W>(to_teacher, p_t, is_s ? of_smaller : of_larger);
    store<W>(kept.weights_t + i, of_s, count);
  });
  sums[0] += sum<W>(to_student), sums[1] += sum<W>(to_teacher);
}

// The same for a mixture m with another weight. Stores what the gradient needs of each entry. A
// probability below ``least`` adds nothing: the gradient's p_s, with the upstream gradient in it, may
// be a number where p_s underflowed to 0. If m underflows to 0, p/m is its largest value, 1 over the
// weight of p.
template <Divergence divergence, typename W>
inline void mixture_of(int64_t n, W weight, const Part& part, Kept<W> kept, double* sums) {
  const W to_ps = W(part.to_ps), to_pt = W(part.to_pt), other = 1 - weight;
  const W least = std::numeric_limits<W>::min() * W(1 << 26);
  const auto over = [](Vector<W> p, Vector<W> m, W most) {
    const Vector<W> ratio = p / m;
    return ratio > most ? splat(most) : ratio;
  };
  Vector<W> first{}, second{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> p_s = load(kept.weights_s + i, count) * to_ps;
    const Vector<W> p_t = load(kept.weights_t + i, count) * to_pt;
    Vector<W> stored;
    if constexpr (divergence == Divergence::kSkewKl) {
      const Vector<W> m = p_t * weight + p_s * other, log = log_of<W>(over(p_t, m, 1 / weight));
      second = p_t < least ? second : second + p_t * log;
      stored = m == 0 || p_t < least ? Vector<W>{} : p_t * (p_s * other / m);
      first += stored;
    } else if constexpr (divergence == Divergence::kSkewReverseKl) {
      const Vector<W> ratio = over(p_s, p_s * weight + p_t * other, 1 / weight);
      const Vector<W> log = log_of<W>(ratio);
      second = p_s < least ? second : second + p_s * log;
      stored = p_s < least ? Vector<W>{} : log - ratio * weight;
      first += p_s * stored;
    } else {
      const Vector<W> m = p_t * weight + p_s * other, log = log_of<W>(over(p_t, m, 1 / weight));
      second = p_t < least ? second : second + p_t * log;
      stored = p_s < least ? Vector<W>{} : log_of<W>(over(p_s, m, 1 / other));
      first += p_s * stored;
    }
    store<W>(kept.weights_t + i, stored, count);
  });
  sums[0] += sum<W>(first), sums[1] += sum<W>(second);
}

// Calls body with which of p_s and p_t has the larger factor, as a compile-time constant.
template <typename W, typename Body>
inline void with_larger(const Part& part, const Body& body) {
  const Overlap<W> overlap(part);
  if (overlap.larger == Larger::kNeither) {
    body(std::integral_constant<Larger, Larger::kNeither>());
  } else if (overlap.larger == Larger::kStudent) {
    body(std::integral_constant<Larger, Larger::kStudent>());
  } else {
    body(std::integral_constant<Larger, Larger::kTeacher>());
  }
}

// p_s and p_t over `Overlap.unit`.
template <Larger larger, typename W>
inline std::pair<Vector<W>, Vector<W>> compared(Kept<W> kept, W ratio, int64_t i, int64_t count) {
  const Vector<W> w_s = load(kept.weights_s + i, count), w_t = load(kept.weights_t + i, count);
  if constexpr (larger == Larger::kStudent) return {w_s, w_t * ratio};
  if constexpr (larger == Larger::kTeacher) return {w_s * ratio, w_t};
  return {w_s, w_t};
}

// Adds to ``sums`` Σ p_s b of a block, b = 1 where p_s < p_t and ½ where they are equal, and the sum
// of p_t − p_s where it is positive or, for the negative log acceptance, Σ min(p_t, p_s).
template <Divergence divergence, Larger larger, typename W>
inline void overlap_of(int64_t n, const Part& part, Kept<W> kept, double* sums) {
  constexpr bool has_ties = larger == Larger::kNeither;
  const Overlap<W> overlap(part);
  const auto found = sums_of<W, 2 + has_ties>(n, [&](int64_t i, int64_t count, Vector<W>* to) {
    const auto [p_s, p_t] = compared<larger, W>(kept, overlap.ratio, i, count);
    to[0] = p_s < p_t ? to[0] + p_s : to[0];
    if constexpr (divergence == Divergence::kNegativeLogAcceptance) {
      to[1] += p_s < p_t ? p_s : p_t;
    } else {
      to[1] = p_s < p_t ? to[1] + (p_t - p_s) : to[1];
    }
    if constexpr (has_ties) to[2] = p_s == p_t ? to[2] + p_s : to[2];
  });
  double below = found[0];
  if constexpr (has_ties) below += found[2] / 2;
  sums[0] += below * overlap.unit, sums[1] += found[1] * overlap.unit;
}

template <Divergence divergence, Larger larger = Larger::kNeither, typename W>
inline void gradient_as(const Slope& of, int64_t n, const Part& part, Kept<W> kept, W* out) {
  const W to_s = W(of.weight * part.to_ps), to_t = W(of.weight * part.to_pt);
  const W more = W(part.to_ratio - of.expectation), mean = W(of.expectation);
  const W slope = W(of.per_gap), forward = W(of.share), reverse = W(1 - of.share);
  const W shift = W(of.shift * part.to_ps);
  // Factors of p_s above, equal to and below p_t, for the divergences of overlap.
  const Overlap<W> overlap(part);
  const double of_kl = divergence == Divergence::kLk ? of.share * of.weight : 0;
  const double of_overlap = of.weight - of_kl, unit = overlap.unit;
  const Vector<W> above = splat(W((of_overlap * of.expectation + of_kl) * unit));
  const Vector<W> equal = splat(W((of_overlap * (of.expectation - 0.5) + of_kl) * unit));
  const Vector<W> below = splat(W((of_overlap * (of.expectation - 1) + of_kl) * unit));
  const W of_pt = W(of_kl * unit);
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> w_s = load(kept.weights_s + i, count), p_s = w_s * to_s;
    Vector<W> result;
    if constexpr (divergence == Divergence::kForwardKl) {
      result = p_s - load(kept.weights_t + i, count) * to_t;
    } else if constexpr (divergence == Divergence::kReverseKl) {
      result = times<W>(p_s, load(kept.gaps + i, count) * slope + more);
    } else if constexpr (divergence == Divergence::kSkewKl) {
      result = p_s * mean - load(kept.weights_t + i, count) * W(of.weight);
    } else if constexpr (is_of_mixture(divergence)) {
      result = times<W>(p_s, load(kept.weights_t + i, count) - mean);
    } else if constexpr (is_of_overlap(divergence)) {
      const auto [own, other] = compared<larger, W>(kept, overlap.ratio, i, count);
      Vector<W> not_below = above;
      if constexpr (larger == Larger::kNeither) not_below = own == other ? equal : above;
      result = own * (own < other ? below : not_below);
      if constexpr (divergence == Divergence::kLk) result -= other * of_pt;
    } else {
      const Vector<W> plain = p_s - load(kept.weights_t + i, count) * to_t;
      const Vector<W> other = times<W>(p_s, load(kept.gaps + i, count) * slope + more);
      result = times<W>(splat(forward), plain) + times<W>(splat(reverse), other);
    }
    store<W>(out + i, result - w_s * shift, count);
  });
}

// Adds to ``masses`` the mass of the weights that are at least each of ``least``.
template <typename W>
FASTKD_KERNEL void masses_of(const W* weights, int64_t n, const W* least, double* masses) {
  Vector<W> sums[kEdges]{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> x = load(weights + i, count);
    for (int j = 0; j < kEdges; ++j) sums[j] = x >= least[j] ? sums[j] + x : sums[j];
  });
  for (int j = 0; j < kEdges; ++j) masses[j] += sum<W>(sums[j]);
}

// Adds Σ |p_t − p_s| of a block to ``sums``: over entries with a weight of at least ``high``, and
// over all. Appends the indices of weights from ``low`` to below ``high`` to ``places``, and
// returns its end. A vector seldom has more than two of them, so these are written without a
// branch.
template <typename W>
FASTKD_KERNEL int64_t* gaps_of(int64_t start, int64_t n, const Part& part, Kept<W> kept, W low,
                               W high, double* sums, int64_t* places) {
  const W to_ps = W(part.to_ps), to_pt = W(part.to_pt);
  Vector<W> all{}, head{};
  Vector<W> lane;  // 2^i in lane i: the sum of some lanes is a bit mask
  for (int i = 0; i < kLanes<W>; ++i) lane[i] = 1 << i;
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> weight = load(kept.weights_t + i, count);
    const Vector<W> gap = absolute<W>(weight * to_pt - load(kept.weights_s + i, count) * to_ps);
    all += gap;
    head = weight >= high ? head + gap : head;
    const Vector<W> below_high = weight < high ? lane : Vector<W>{};
    const Vector<W> below_low = weight < low ? lane : Vector<W>{};
    uint32_t between = uint32_t(sum_of<W, kLanes<W>>(below_high - below_low));
    const auto put = [&] {
      *places = start + i + __builtin_ctz(between | 1u << 31);
      places += between != 0;
      between &= between - 1;
    };
    put(), put();
    while (between) put();
  });
  sums[0] += sum<W>(head), sums[1] += sum<W>(all);
  return places;
}

// Calls body with the divergence as a compile-time constant.
template <typename Body>
inline void with(Divergence divergence, const Body& body) {
#define FASTKD_CASE(kind) \
  case Divergence::kind: return body(std::integral_constant<Divergence, Divergence::kind>())
  switch (divergence) {
    FASTKD_CASE(kForwardKl);
    FASTKD_CASE(kReverseKl);
    FASTKD_CASE(kJs);
    FASTKD_CASE(kAdaptiveKl);
    FASTKD_CASE(kMixed);
    FASTKD_CASE(kGeneralizedJs);
    FASTKD_CASE(kSkewKl);
    FASTKD_CASE(kSkewReverseKl);
    FASTKD_CASE(kTotalVariation);
    FASTKD_CASE(kNegativeLogAcceptance);
    FASTKD_CASE(kLk);
  }
#undef FASTKD_CASE
}

// Adds the sums of a block's second visit to ``sums``.
template <typename W>
FASTKD_KERNEL void sums_of_part(Divergence divergence, int64_t n, W slope, W coefficient,
                                const Part& part, Kept<W> kept, double* sums) {
  with(divergence, [&](auto kind) {
    if constexpr (kind() == Divergence::kJs) {
      js_of(n, slope, part, kept, sums);
    } else if constexpr (is_of_mixture(kind())) {
      mixture_of<kind()>(n, coefficient, part, kept, sums);
    } else {
      with_larger<W>(part, [&](auto larger) {
        overlap_of<kind(), larger()>(n, part, kept, sums);
      });
    }
  });
}

template <typename W>
FASTKD_KERNEL Tops tops_of(const W* z_s, const W* z_t, int64_t n, Tops tops) {
  return {top_of(z_s, n, tops.s), top_of(z_t, n, tops.t)};
}

template <typename W>
FASTKD_KERNEL double top_of_block(const W* z, int64_t n) {
  return top_of(z, n, -kInfinity);
}

// Σ e^{(z − base)/τ}
template <typename W>
FASTKD_KERNEL double total_of(const W* z, int64_t n, double slope, W base) {
  const Exponents<W> by(slope);
  const double raised = sums_of<W, 1>(n, [&](int64_t i, int64_t count, Vector<W>* to) {
    Bits<W> below;
    to[0] += raised_exp<W>(load(z + i, count, W(-kInfinity)) - base, by, below);
  })[0];
  return raised * double(FloatFormat<W>::kDown);
}

// Sets Σ e^x x of a block's student and teacher, at temperature 1.
template <typename W>
FASTKD_KERNEL void means_of(const W* z_s, const W* z_t, int64_t n, Part& part, Kept<W> kept) {
  const W base_s = W(part.base_s), base_t = W(part.base_t);
  const auto found = sums_of<W, 2>(n, [&](int64_t i, int64_t count, Vector<W>* to) {
    const Vector<W> x_s = load(z_s + i, count) - base_s, x_t = load(z_t + i, count) - base_t;
    to[0] = plus<W>(to[0], load(kept.weights_s + i, count), x_s);
    to[1] = plus<W>(to[1], load(kept.weights_t + i, count), x_t);
  });
  part.mean_s = found[0], part.mean_t = found[1];
}

// Overwrites a block of logits with e^{(x − base)/τ}, raised as `raised_exp` does. Returns its sum.
// Prefetches as many of the ``next`` logits: nothing else reads them while memory is idle.
template <typename W>
FASTKD_KERNEL double raise(W* x, int64_t n, Exponents<W> by, W base, const W* next) {
  Vector<W> total{};
  each<W>(n, [&](int64_t i, int64_t count) {
    fetch(next + i);
    Bits<W> below;
    const Vector<W> weight = raised_exp<W>(load(x + i, count, W(-kInfinity)) - base, by, below);
    total += weight;
    store<W>(x + i, weight, count);
  });
  return sum<W>(total);
}

template <typename W>
FASTKD_KERNEL void multiply(W* x, int64_t n, W factor) {
  each<W>(n, [&](int64_t i, int64_t count) { store<W>(x + i, load(x + i, count) * factor, count); });
}

template <typename W>
FASTKD_KERNEL void weigh(Divergence divergence, const W* z_s, const W* z_t, int64_t n,
                         Exponents<W> by, const Picks& ahead, Part& part, Kept<W> kept) {
  with(divergence, [&](auto kind) {
    ahead.count ? weigh_as<kind(), true>(z_s, z_t, n, by, ahead, part, kept)
                : weigh_as<kind(), false>(z_s, z_t, n, by, ahead, part, kept);
  });
}

template <typename W>
FASTKD_KERNEL void gradient_of(const Slope& of, int64_t n, const Part& part, Kept<W> kept, W* out) {
  with(of.divergence, [&](auto kind) {
    if constexpr (is_of_overlap(kind())) {
      with_larger<W>(part, [&](auto larger) {
        gradient_as<kind(), larger()>(of, n, part, kept, out);
      });
    } else {
      gradient_as<kind()>(of, n, part, kept, out);
    }
  });
}

template <typename W, int N>
inline W product_of(const VectorN<W, N>& x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    VectorN<W, N / 2> halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return product_of<W, N / 2>(halves[0] * halves[1]);
  }
}

#if defined(FASTKD_KINDS)
// The chosen lanes of a vector of floats, moved to the first, and the inverse.
template <typename V, int bytes = kBytes>
FASTKD_KERNEL inline V compressed(V x, uint32_t chosen) {
  if constexpr (bytes == 64) return (V)_mm512_maskz_compress_ps(chosen, (__m512)x);
  if constexpr (bytes == 32) {
    const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kLanesOf.chosen[chosen]));
    return (V)_mm256_permutevar8x32_ps((__m256)x, from);
  }
}

template <typename V, int bytes = kBytes>
FASTKD_KERNEL inline V expanded(V x, uint32_t chosen, V others) {
  if constexpr (bytes == 64) return (V)_mm512_mask_expand_ps((__m512)others, chosen, (__m512)x);
  if constexpr (bytes == 32) {
    const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kLanesOf.before[chosen]));
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i is = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(chosen), bit), bit);
    return (V)_mm256_blendv_ps((__m256)others, _mm256_permutevar8x32_ps((__m256)x, from),
                               (__m256)is);
  }
}
constexpr bool kMovesLanes = kBytes >= 32;
#else
constexpr bool kMovesLanes = false;
#endif

// Bits of ``count`` columns from i on, which don't cross the numbers of ``bits``.
inline uint32_t bits_at(const uint16_t* bits, int64_t i, int64_t count) {
  return (bits[i / kColumns] >> i % kColumns) & (0xffffu >> (kColumns - count));
}

// Appends the numbers of a block whose bit is ``chosen`` to ``out``, behind which kPadding more may
// be overwritten. Returns its end. Prefetches n of ``next``.
template <typename W>
FASTKD_KERNEL W* select(const W* z, const uint16_t* bits, bool chosen, int64_t n, W* out,
                        Next next) {
  const uint32_t flip = chosen ? 0 : ~0u;
#if defined(FASTKD_KINDS)
  if constexpr (kMovesLanes && std::is_same_v<W, float>) {
    each<W>(n, [&](int64_t i, int64_t count) {
      fetch(z + n + i), next.fetch(i);
      const uint32_t lanes = (bits_at(bits, i, count) ^ flip) & (0xffffu >> (kColumns - count));
      store<W>(out, compressed(load(z + i, count), lanes));
      out += __builtin_popcount(lanes);
    });
    return out;
  }
#endif
  for (int64_t i = 0; i < n; ++i) {
    *out = z[i];
    out += (bits_at(bits, i, 1) ^ flip) & 1;
  }
  return out;
}

// The inverse: each of n numbers is the next of ``matched`` where its bit is 1, else the next of
// ``rest`` times ``factor``, or 0 if that is null. Behind both kPadding more are read.
template <typename W>
FASTKD_KERNEL void merge(const W* matched, const W* rest, W factor, const uint16_t* bits, int64_t n,
                         W* out) {
#if defined(FASTKD_KINDS)
  if constexpr (kMovesLanes && std::is_same_v<W, float>) {
    each<W>(n, [&](int64_t i, int64_t count) {
      const uint32_t lanes = bits_at(bits, i, count), others = (0xffffu >> (kColumns - count)) ^ lanes;
      Vector<W> x{};
      if (rest) x = expanded(load(rest) * factor, others, x), rest += __builtin_popcount(others);
      store<W>(out + i, expanded(load(matched), lanes, x), count);
      matched += __builtin_popcount(lanes);
    });
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i) {
    // Both are read: a branch would often be mispredicted.
    const bool chosen = bits_at(bits, i, 1);
    const W x = *matched, other = rest ? *rest * factor : 0;
    out[i] = chosen ? x : other;
    matched += chosen, rest += rest && !chosen;
  }
}

// Bins of a block's probabilities.
template <typename W>
inline void bins_of(const W* p, int64_t n, Bins of, int32_t* bins) {
  for (int64_t i = 0; i < n; ++i) bins[i] = of.of(float(p[i]));
}

// Signs of a block's bins.
template <typename W>
inline void signs_of(const W* p, int64_t n, Bins of, const W* signs, W* out) {
  int32_t bins[kBlock];
  bins_of(p, n, of, bins);
  for (int64_t i = 0; i < n; ++i) out[i] = signs[bins[i]];
}

// Adds the numbers of a block to their bins' counts, in two tables by turns: an increment of the same
// bin would wait for the last one.
template <typename W>
FASTKD_KERNEL void count_by_bins(const W* p, int64_t n, Bins of, int32_t* counts) {
  int32_t bins[kBlock];
  bins_of(p, n, of, bins);
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) ++counts[bins[i]], ++counts[of.size + bins[i + 1]];
  if (i < n) ++counts[bins[i]];
}

// Returns an empty bin up to ``bin``, which is one, so that all between are empty in four tables.
FASTKD_KERNEL int skip_empty_bins(const int32_t* counts, int size, int bin) {
  constexpr int kLeap = 16;
  for (; bin > kLeap; bin -= kLeap) {
    int32_t any = 0;
    for (int table = 0; table < 4; ++table) {
      const int32_t* from = counts + table * size + bin - kLeap;
      for (int i = 0; i < kLeap; ++i) any |= from[i];
    }
    if (any) break;
  }
  return bin;
}

// Adds Σ p·sign of a block to ``sum``, with the signs of the bins. Writes the indices of entries
// whose sign is 0 to ``places``, and returns their end.
template <typename W>
FASTKD_KERNEL int32_t* sum_by_sign(const W* p, int64_t n, Bins of, const W* signs, double* sum,
                                   int32_t* places) {
  W sign[kBlock];
  signs_of(p, n, of, signs, sign);
  Vector<double> sums[kWide<W>]{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> s = load(sign + i, count, W(1)), x = load(p + i, count) * s;
    for (int j = 0; j < kWide<W>; ++j) sums[j] += widened<W>(x, j);
    // The product of signs is 0 if one is.
    if (product_of<W, kLanes<W>>(s) != 0) return;
    for (int64_t j = i; j < i + count; ++j) {
      *places = int32_t(j);
      places += sign[j] == 0;
    }
  });
  *sum += sum_of_parts<W>(sums);
  return places;
}

template <typename W>
FASTKD_KERNEL void multiply_by_sign(W* p, int64_t n, W gradient, W weight, Bins of,
                                    const W* signs) {
  W sign[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    signs_of(p + start, count, of, signs, sign);
    for (int64_t i = 0; i < count; ++i) p[start + i] *= gradient + weight * sign[i];
  }
}
