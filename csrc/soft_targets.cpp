// Data path. Forward: a row is read in blocks that stay in the nearest cache, with a maximum and
// sums that move along. That is all that either Kullback-Leibler divergence needs; Jensen-Shannon
// and adaptive KL read the row once more for their values, and adaptive KL the teacher's twice
// between, to find its head by counting. Those rows come from the cache, up to half a million
// logits. Backward: one read of both rows, one write of the gradient. With E = R·V logits of s
// bytes memory moves 5Es bytes, and 6Es where a write reads its line first.
#include "soft_targets.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 1024, kAhead = 768;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Softened further, distributions differ by so little, and τ²·KL weighs its rounding so much, that
// float32 would leave few digits.
constexpr double kHot = 10;

// A row on its way through the blocks.
struct Walk {
  Divergence divergence;
  double slope;
  double top_s = -kInfinity, total_s = 0, top_t = -kInfinity, total_t = 0;
  double cross = 0;  // Σ e^{x_t} (x_t − x_s), or the other way round for reverse KL
};

// The maximum to subtract: 0 while only −inf was seen, as −inf − (−inf) would be NaN.
inline double base_of(double top) { return top == -kInfinity ? 0 : top; }

// p·x where a probability of 0 counts nothing even against ∞.
inline double times(double p, double x) { return p == 0 ? 0 : p * x; }

template <typename W>
inline Vector<W> times(Vector<W> p, Vector<W> x) {
  return p == 0 ? Vector<W>{} : p * x;
}

// Moves the maximum, shrinks what was summed under the old one, and returns how far it moved.
inline double move(double& top, double& total, double new_top, double slope) {
  const double shift = top == -kInfinity ? 0 : (top - new_top) * slope;
  top = new_top;
  total *= std::exp(shift);
  return shift;
}

struct Tops {
  double s, t;
};

template <typename W>
inline Tops tops_of(const W* z_s, const W* z_t, int64_t n, Tops tops) {
  Vector<W> found_s = splat(W(tops.s)), found_t = splat(W(tops.t));
  each<W>(n, [&](int64_t i, int64_t count) {
    found_s = largest<W>(load(z_s + i, count, W(-kInfinity)), found_s);
    found_t = largest<W>(load(z_t + i, count, W(-kInfinity)), found_t);
  });
  return {double(largest<W>(found_s)), double(largest<W>(found_t))};
}

template <Divergence divergence, typename W>
inline void add(const W* z_s, const W* z_t, int64_t n, Walk& walk) {
  constexpr bool forward = divergence == Divergence::kForwardKl;
  constexpr bool reverse = divergence == Divergence::kReverseKl;
  const auto [top_s, top_t] = tops_of(z_s, z_t, n, {walk.top_s, walk.top_t});
  if (top_s != walk.top_s || top_t != walk.top_t) {
    const double weight = forward ? walk.total_t : walk.total_s;
    const double shift_s = move(walk.top_s, walk.total_s, top_s, walk.slope);
    const double shift_t = move(walk.top_t, walk.total_t, top_t, walk.slope);
    const double apart = forward ? shift_t - shift_s : shift_s - shift_t;
    walk.cross = times(std::exp(forward ? shift_t : shift_s), walk.cross + times(weight, apart));
  }
  const W base_s = W(base_of(top_s)), base_t = W(base_of(top_t)), slope = W(walk.slope);
  Vector<W> sum_s{}, sum_t{}, cross{};
  each<W>(n, [&](int64_t i, int64_t count) {
    fetch(z_s + n + i), fetch(z_t + n + i);  // while it computes, the next block
    const Vector<W> x_s = (load(z_s + i, count, W(-kInfinity)) - base_s) * slope;
    const Vector<W> x_t = (load(z_t + i, count, W(-kInfinity)) - base_t) * slope;
    const Vector<W> w_s = exp<W>(x_s), w_t = exp<W>(x_t);
    sum_s += w_s, sum_t += w_t;
    if (forward) cross += times<W>(w_t, x_t - x_s);
    if (reverse) cross += times<W>(w_s, x_s - x_t);
  });
  walk.total_s += sum<W>(sum_s), walk.total_t += sum<W>(sum_t), walk.cross += sum<W>(cross);
}

// What the later passes know of a row.
template <typename W>
struct Known {
  W base_s, base_t, slope, log_s, log_t, inverse_s, inverse_t, log_ratio;

  Known(const SoftTargetStats& stats, double slope)
      : base_s(W(stats.top_s)), base_t(W(stats.top_t)), slope(W(slope)),
        log_s(W(std::log(stats.total_s))), log_t(W(std::log(stats.total_t))),
        inverse_s(W(1 / stats.total_s)), inverse_t(W(1 / stats.total_t)),
        log_ratio(W(std::log(stats.total_t / stats.total_s))) {}
};

template <typename W>
inline Vector<W> absolute(Vector<W> x) {
  return x < 0 ? -x : x;
}

// (KL(p_s ‖ m), KL(p_t ‖ m)) of a block, added to ``sums``. The larger is p and the smaller p·e^−g:
// log p − log ½(p + p·e^−g) = log 2/(1 + e^−g).
template <typename W>
inline void add_js(const W* z_s, const W* z_t, int64_t n, const Known<W>& row, double* sums) {
  Vector<W> to_student{}, to_teacher{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> x_s = (load(z_s + i, count, W(-kInfinity)) - row.base_s) * row.slope;
    const Vector<W> x_t = (load(z_t + i, count, W(-kInfinity)) - row.base_t) * row.slope;
    const Vector<W> log_ps = x_s - row.log_s, log_pt = x_t - row.log_t;
    const Vector<W> gap = absolute<W>(log_pt - log_ps), shrink = exp<W>(-gap);
    const auto is_s = log_ps > log_pt;
    const Vector<W> of_larger = log_of_mean<W>(shrink), of_smaller = of_larger - gap;
    const Vector<W> larger = exp<W>(is_s ? log_ps : log_pt), smaller = times<W>(larger, shrink);
    to_student += is_s ? times<W>(larger, of_larger) : times<W>(smaller, of_smaller);
    to_teacher += is_s ? times<W>(smaller, of_smaller) : times<W>(larger, of_larger);
  });
  sums[0] += sum<W>(to_student), sums[1] += sum<W>(to_teacher);
}

// of_p += q − p − p·r of r = log(q/p), and of_q += p − q + q·r: the terms, none negative, that add
// up to KL(p ‖ q) and KL(q ‖ p). Σ −p·r alone is the small difference of large terms where p and q
// hardly differ. There e^±r − 1 ∓ r = r²·(even ± r·odd).
template <typename W>
inline void add_excess(Vector<W> p, Vector<W> q, Vector<W> r, Vector<W>& of_p, Vector<W>& of_q) {
  constexpr int kTerms = sizeof(W) == sizeof(float) ? 9 : 16;  // up to |r| = ½
  const Vector<W> square = r * r;
  const Vector<W> even = series<W, InverseFactorials<(kTerms + 1) / 2, 2, 2>>(square);
  const Vector<W> odd = series<W, InverseFactorials<kTerms / 2, 3, 2>>(square) * r;
  const auto is_small = absolute<W>(r) < W(0.5);
  const Vector<W> apart = q - p;
  of_p += is_small ? p * (square * (even + odd)) : apart - times<W>(p, r);
  of_q += is_small ? q * (square * (even - odd)) : times<W>(q, r) - apart;
}

// How far below its maximum each of the teacher's logits lies, in bins of which there are ``most``
// and one for all beyond, and its exponential.
template <typename W>
inline void sort(const W* z_t, int64_t n, W base, W slope, W bins, int32_t most, int32_t* places,
                 double* weights) {
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> depth = (base - load(z_t + i, count, W(-kInfinity))) * slope;
    const Vector<W> bin = largest<W>(-(depth * bins), splat(W(-most)));
    const auto place = __builtin_convertvector(-bin, VectorN<int32_t, kLanes<W>>);
    const auto weight = __builtin_convertvector(exp<W>(-depth), VectorN<double, kLanes<W>>);
    std::memcpy(places + i, &place, count * sizeof(int32_t));
    std::memcpy(weights + i, &weight, count * sizeof(double));
  });
}

// Gaps of the head (what lies in bins before ``end``) and of all, both KL, added to ``sums``.
template <typename W>
inline void add_adaptive(const W* z_s, const W* z_t, int64_t n, const Known<W>& row, W bins, W end,
                         double* sums) {
  Vector<W> head{}, all{}, forward{}, reverse{};
  each<W>(n, [&](int64_t i, int64_t count) {
    const Vector<W> x_s = (load(z_s + i, count, W(-kInfinity)) - row.base_s) * row.slope;
    const Vector<W> depth = (row.base_t - load(z_t + i, count, W(-kInfinity))) * row.slope;
    const Vector<W> p_s = exp<W>(x_s) * row.inverse_s, p_t = exp<W>(-depth) * row.inverse_t;
    const Vector<W> gap = absolute<W>(p_t - p_s), r = (x_s + depth) + row.log_ratio;
    all += gap;
    head += depth * bins < end ? gap : Vector<W>{};
    add_excess<W>(p_t, p_s, r, forward, reverse);
  });
  sums[0] += sum<W>(head), sums[1] += sum<W>(all);
  sums[2] += sum<W>(forward), sums[3] += sum<W>(reverse);
}

template <Divergence divergence, typename W>
inline void gradient(const W* z_s, const W* z_t, int64_t n, const Known<W>& row, W weight,
                     W expectation, W share, W* out) {
  const W to_student = weight * row.inverse_s, to_teacher = weight * row.inverse_t;
  each<W>(n, [&](int64_t i, int64_t count) {
    fetch(z_s + i + kAhead), fetch(z_t + i + kAhead);
    const Vector<W> x_s = (load(z_s + i, count) - row.base_s) * row.slope;
    const Vector<W> x_t = (load(z_t + i, count) - row.base_t) * row.slope;
    const Vector<W> p_s = exp<W>(x_s) * to_student;
    Vector<W> result;
    if constexpr (divergence == Divergence::kForwardKl) {
      result = p_s - exp<W>(x_t) * to_teacher;
    } else {
      Vector<W> ratio = (x_s - x_t) + row.log_ratio;  // log(p_s/p_t)
      if constexpr (divergence == Divergence::kJs) {
        const Vector<W> below = ratio < 0 ? ratio : Vector<W>{};
        const Vector<W> of_larger = log_of_mean<W>(exp<W>(-absolute<W>(ratio)));
        ratio = (of_larger + below - expectation) * W(0.5);
      } else {
        ratio = ratio - expectation;
      }
      result = times<W>(p_s, ratio);
      if constexpr (divergence == Divergence::kAdaptiveKl) {
        const Vector<W> plain = p_s - exp<W>(x_t) * to_teacher;
        result = times<W>(splat(share), plain) + times<W>(splat(1 - share), result);
      }
    }
    store<W>(out + i, result, count);
  });
}

// body of the divergence, as a constant
template <typename Body>
inline void with(Divergence divergence, const Body& body) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return body(std::integral_constant<Divergence, Divergence::kForwardKl>());
    case Divergence::kReverseKl:
      return body(std::integral_constant<Divergence, Divergence::kReverseKl>());
    case Divergence::kJs: return body(std::integral_constant<Divergence, Divergence::kJs>());
    case Divergence::kAdaptiveKl:
      return body(std::integral_constant<Divergence, Divergence::kAdaptiveKl>());
  }
}

FASTKD_CLONES void add_to(const float* z_s, const float* z_t, int64_t n, Walk& walk) {
  with(walk.divergence, [&](auto kind) { add<kind()>(z_s, z_t, n, walk); });
}
FASTKD_CLONES void add_to(const double* z_s, const double* z_t, int64_t n, Walk& walk) {
  with(walk.divergence, [&](auto kind) { add<kind()>(z_s, z_t, n, walk); });
}
FASTKD_CLONES void js_of(const float* z_s, const float* z_t, int64_t n, const Known<float>& row,
                         double* sums) {
  add_js(z_s, z_t, n, row, sums);
}
FASTKD_CLONES void js_of(const double* z_s, const double* z_t, int64_t n, const Known<double>& row,
                         double* sums) {
  add_js(z_s, z_t, n, row, sums);
}
FASTKD_CLONES void sort_of(const float* z_t, int64_t n, float base, float slope, float bins,
                           int32_t most, int32_t* places, double* weights) {
  sort(z_t, n, base, slope, bins, most, places, weights);
}
FASTKD_CLONES void sort_of(const double* z_t, int64_t n, double base, double slope, double bins,
                           int32_t most, int32_t* places, double* weights) {
  sort(z_t, n, base, slope, bins, most, places, weights);
}
FASTKD_CLONES void adaptive_of(const float* z_s, const float* z_t, int64_t n,
                               const Known<float>& row, float bins, float end, double* sums) {
  add_adaptive(z_s, z_t, n, row, bins, end, sums);
}
FASTKD_CLONES void adaptive_of(const double* z_s, const double* z_t, int64_t n,
                               const Known<double>& row, double bins, double end, double* sums) {
  add_adaptive(z_s, z_t, n, row, bins, end, sums);
}
FASTKD_CLONES void gradient_of(const float* z_s, const float* z_t, int64_t n,
                               const Known<float>& row, Divergence divergence, float weight,
                               float expectation, float share, float* out) {
  with(divergence, [&](auto kind) {
    gradient<kind()>(z_s, z_t, n, row, weight, expectation, share, out);
  });
}
FASTKD_CLONES void gradient_of(const double* z_s, const double* z_t, int64_t n,
                               const Known<double>& row, Divergence divergence, double weight,
                               double expectation, double share, double* out) {
  with(divergence, [&](auto kind) {
    gradient<kind()>(z_s, z_t, n, row, weight, expectation, share, out);
  });
}

// A row's blocks, widened where they need to be.
template <typename W>
struct Blocks {
  const SoftTargets& of;
  int64_t row;
  W copies[3][kBlock];

  Blocks(const SoftTargets& of, int64_t row) : of(of), row(row) {}  // the copies hold nothing yet

  // body(student, teacher, start, count)
  template <typename Body>
  void each(const Body& body) {
    for (int64_t start = 0; start < of.student.n; start += kBlock) {
      const int64_t count = std::min(kBlock, of.student.n - start);
      body(of.student.read(row, start, count, copies[0]),
           of.teacher.read(row, start, count, copies[1]), start, count);
    }
  }
};

// The teacher's most probable entries, while they hold at most half of its mass.
template <typename W>
struct Head {
  struct Member {
    W logit;
    double weight;
    int64_t place;
  };

  static constexpr int kBins = 512;
  W bins;                       // of a unit of depth
  int end;                      // bins before it are in the head
  std::vector<Member> members;  // and these of its own entries

  Head(Blocks<W>& blocks, const SoftTargetStats& stats, double slope) {
    // At most V entries hold half the mass: the largest of those left is no less than 1/2V.
    const double deepest = std::log(2.0 * double(blocks.of.student.n)) + 0.01;
    bins = W(kBins / deepest);
    double mass[2][kBins + 1] = {};  // by turns, as one sum waits for the last
    int32_t places[kBlock];
    double weights[kBlock];
    const auto sorted = [&](const auto& body) {
      blocks.each([&](const W*, const W* z_t, int64_t start, int64_t count) {
        sort_of(z_t, count, W(stats.top_t), W(slope), bins, kBins, places, weights);
        body(z_t, start, count);
      });
    };
    sorted([&](const W*, int64_t, int64_t count) {
      for (int64_t i = 0; i < count; ++i) mass[i % 2][places[i]] += weights[i];
    });
    double half = 0;
    for (int bin = 0; bin <= kBins; ++bin) half += (mass[0][bin] += mass[1][bin]) / 2;
    double above = 0;
    for (end = 0; end < kBins && above + mass[0][end] <= half; ++end) above += mass[0][end];
    sorted([&](const W* z_t, int64_t start, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        if (places[i] == end) members.push_back({z_t[i], weights[i], start + i});
      }
    });
    std::stable_sort(members.begin(), members.end(),
                     [](const Member& a, const Member& b) { return a.logit > b.logit; });
    size_t fit = 0;
    for (; fit < members.size(); ++fit) {
      const bool is_first = above == 0;  // always in the head
      if (!is_first && above + members[fit].weight > half) break;
      above += members[fit].weight;
    }
    members.resize(fit);
  }
};

template <typename W>
double adaptive_kl(Blocks<W>& blocks, const Known<W>& known, double slope, SoftTargetStats& stats) {
  const Head<W> head(blocks, stats, slope);
  double sums[4] = {};
  blocks.each([&](const W* z_s, const W* z_t, int64_t, int64_t count) {
    adaptive_of(z_s, z_t, count, known, head.bins, W(head.end), sums);
  });
  double in_head = sums[0];
  for (const auto& member : head.members) {
    const W z = *blocks.of.student.read(blocks.row, member.place, 1, blocks.copies[0]);
    const double p_s = std::exp((double(z) - stats.top_s) * slope) / stats.total_s;
    in_head += std::abs(member.weight / stats.total_t - p_s);
  }
  stats.share = sums[1] > 0 ? std::min(in_head / sums[1], 1.0) : 0.5;
  stats.expectation = sums[3];
  return times(stats.share, sums[2]) + times(1 - stats.share, sums[3]);
}

template <typename W>
double row_loss(const SoftTargets& of, int64_t row, SoftTargetStats& stats) {
  Blocks<W> blocks(of, row);
  Walk walk{of.divergence, of.slope};
  blocks.each([&](const W* z_s, const W* z_t, int64_t, int64_t n) { add_to(z_s, z_t, n, walk); });
  stats = {base_of(walk.top_s), walk.total_s, base_of(walk.top_t), walk.total_t, 0, 0};
  if (of.divergence == Divergence::kForwardKl) {
    return walk.cross / walk.total_t + std::log(walk.total_s / walk.total_t);
  }
  if (of.divergence == Divergence::kReverseKl) {
    stats.expectation = walk.cross / walk.total_s + std::log(walk.total_t / walk.total_s);
    return stats.expectation;
  }
  // Neither a NaN nor an inf has a place among the others.
  const double both = walk.total_s + walk.total_t;
  if (!(both < kInfinity && walk.total_s > 0 && walk.total_t > 0)) {
    return stats.expectation = std::numeric_limits<double>::quiet_NaN();
  }
  const Known<W> known(stats, of.slope);
  if (of.divergence == Divergence::kAdaptiveKl) return adaptive_kl(blocks, known, of.slope, stats);
  double sums[2] = {};
  blocks.each([&](const W* z_s, const W* z_t, int64_t, int64_t count) {
    js_of(z_s, z_t, count, known, sums);
  });
  stats.expectation = sums[0];
  return (sums[0] + sums[1]) / 2;
}

template <typename W>
void row_gradient(const SoftTargets& of, int64_t row, const SoftTargetStats& stats, double weight,
                  const Rows& out) {
  Blocks<W> blocks(of, row);
  const Known<W> known(stats, of.slope);
  blocks.each([&](const W* z_s, const W* z_t, int64_t start, int64_t count) {
    W* dz = out.write(row, start, blocks.copies[2]);
    gradient_of(z_s, z_t, count, known, of.divergence, W(weight), W(stats.expectation),
                W(stats.share), dz);
    out.written(row, start, count, dz);
  });
}

}  // namespace

bool SoftTargets::is_wide() const { return student.type == Type::kDouble || slope < 1 / kHot; }

double SoftTargets::forward(int64_t row, SoftTargetStats& stats) const {
  return is_wide() ? row_loss<double>(*this, row, stats) : row_loss<float>(*this, row, stats);
}

void SoftTargets::backward(int64_t row, const SoftTargetStats& stats, double weight,
                           const Rows& gradient) const {
  if (is_wide()) {
    row_gradient<double>(*this, row, stats, weight, gradient);
  } else {
    row_gradient<float>(*this, row, stats, weight, gradient);
  }
}

}  // namespace fastkd
