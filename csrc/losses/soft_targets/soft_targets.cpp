// Data path. Student and teacher logits of a row are read once, in blocks that fit into the first
// cache. Each block has its own maxima, its exponentials relative to them, and their sums. The
// student's exponentials are stored in the gradient's row, the other intermediate values in rows of
// the thread; the gradient is computed from them while they are in the cache. Adaptive KL compares
// exponentials of the whole row, so it reads the row once more, first, for the row's maxima. With E
// = R·V logits of s bytes and a gradient of g bytes, memory moves 2Es + Eg bytes, and Eg more where
// a write loads its line first. Two vocabularies: see matched_tokens.h.
#include "losses/soft_targets/soft_targets.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/processors.h"

#if defined(FASTKD_KINDS)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns about its own header
#include <immintrin.h>
#endif

namespace fastkd {
namespace {

constexpr int64_t kBlock = Match::kBlock;
constexpr int kPadding = Match::kPadding;  // numbers behind a row's end that kernels may access
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Above this temperature the distributions differ so little, and τ²·KL magnifies rounding errors so
// much, that float32 leaves few digits: the row is computed in float64.
constexpr double kHot = 10;

// The maximum to subtract: 0 while only −inf was seen, as −inf − (−inf) would be NaN.
inline double base_of(double top) { return top == -kInfinity ? 0 : top; }

// p·x, and 0 for a probability of 0, also if x is infinite.
inline double times(double p, double x) { return p == 0 ? 0 : p * x; }

struct Tops {
  double s = -kInfinity, t = -kInfinity;
};

// Sums of a block, with x = (z − base)/τ, and the factors that relate them to the whole row.
struct Part {
  double base_s, base_t, total_s = 0, total_t = 0;
  double cross_s = 0, cross_t = 0;  // Σ e^{x_s} (x_s − x_t) and Σ e^{x_t} (x_t − x_s)
  double mean_s = 0, mean_t = 0;    // Σ e^x x, for entropies; mean_t also for adaptive KL
  double to_ps = 0, to_pt = 0;      // p = to_p·e^x
  double to_ratio = 0;              // log(p_s/p_t) = x_s − x_t + to_ratio
};

// Intermediate values of a row.
template <typename W>
struct Kept {
  W* weights_s;  // e^{x_s}
  W* weights_t;  // e^{x_t}; after the second pass of a mixture m its gradient's own values
  W* gaps;       // τ·(x_s − x_t)
  bool has_t;    // weights_t are needed by the terms

  Kept at(int64_t start) const {
    return {weights_s + start, weights_t + start, gaps + start, has_t};
  }
};

// Numbers of a row's gradient, besides `Kept`.
struct Slope {
  Divergence divergence;
  double per_gap, weight;  // 1/τ, and the upstream gradient
  double expectation = 0;  // under p_s: of the log ratio, or of what the gradient takes off
  double share = 0;        // weight of forward KL
  double shift = 0;        // times p_s, subtracted
};

// Divergences whose values need the normalised probabilities: they visit the row once more.
constexpr bool is_of_mixture(Divergence of) {
  return of == Divergence::kJs || of == Divergence::kGeneralizedJs ||
         of == Divergence::kSkewKl || of == Divergence::kSkewReverseKl;
}
constexpr bool is_of_overlap(Divergence of) {
  return of == Divergence::kTotalVariation || of == Divergence::kNegativeLogAcceptance ||
         of == Divergence::kLk;
}

// Which of p_s and p_t has the larger factor in a block.
enum class Larger { kNeither, kStudent, kTeacher };

// How the divergences of overlap compare p_s and p_t in a block: both over ``unit``, the larger of
// to_ps and to_pt, so that only one needs a product. Equal probabilities are looked for only where
// the factors are equal, as for equal distributions; elsewhere they are coincidences of rounding.
template <typename W>
struct Overlap {
  Larger larger;
  double unit;
  W ratio;  // of the smaller factor to the larger

  explicit Overlap(const Part& part) : larger(Larger::kNeither), unit(part.to_ps), ratio(1) {
    if (part.to_ps > part.to_pt) {
      larger = Larger::kStudent, ratio = W(part.to_pt / part.to_ps);
    } else if (part.to_ps != part.to_pt) {
      larger = Larger::kTeacher, unit = part.to_pt, ratio = W(part.to_ps / part.to_pt);
    }
    if (ratio == 1) larger = Larger::kNeither;
  }

  // Σ p_s − Σ p_t.
  double difference(const Part& part) const {
    const double of_s = larger == Larger::kTeacher ? part.total_s * double(ratio) : part.total_s;
    const double of_t = larger == Larger::kStudent ? part.total_t * double(ratio) : part.total_t;
    return (of_s - of_t) * unit;
  }
};

// Numbers of a row at ``ids``, each of ``size`` bytes, to copy to ``out``. Behind ``ids`` and ``out``
// lies kPadding. The next row is prefetched.
struct Picks {
  const char* row = nullptr;
  const int32_t* ids = nullptr;
  int64_t count = 0, size = 0;
  char* out = nullptr;
  Next next{};
};

constexpr int kSums = 2;   // of a row's second visit
constexpr int kEdges = 4;  // candidates for the edge of adaptive KL's head in one pass

// Of each choice of 8 lanes, a byte for each lane: the chosen ones in order, and how many are chosen
// before each lane.
struct LanesOf {
  int64_t chosen[256]{}, before[256]{};

  constexpr LanesOf() {
    for (int choice = 0; choice < 256; ++choice) {
      for (int lane = 0, count = 0; lane < 8; ++lane) {
        before[choice] |= int64_t(count) << 8 * lane;
        if (choice >> lane & 1) chosen[choice] |= int64_t(lane) << 8 * count++;
      }
    }
  }
};
[[maybe_unused]] constexpr LanesOf kLanesOf;

// Bins of probabilities in ascending order: 2^log2_per_octave for each of the octaves below 1, and the
// first for all smaller ones.
struct Bins {
  int shift, first, size;

  constexpr Bins(int octaves, int log2_per_octave)
      : shift(23 - log2_per_octave), first((127 - octaves) << log2_per_octave),
        size((octaves << log2_per_octave) + 2) {}

  int of(float p) const {
    int32_t bits;
    std::memcpy(&bits, &p, sizeof(bits));
    return std::max((bits >> shift) - first, 0);
  }
};

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "losses/soft_targets/soft_targets_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

// A thread's state: one row after another.
template <typename W>
class Work {
 public:
  explicit Work(const SoftTargets& of) : Work(of, blocks_of(of.student.n)) {}

  // With ``starts`` of blocks of at most kBlock outcomes, and behind them the number of outcomes.
  Work(const SoftTargets& of, const std::vector<int64_t>& starts)
      : of_(of), by_(of.slope), n_(starts.back()), own_(new W[3 * n_]), starts_(starts),
        parts_(starts.size() - 1),
        places_(new int64_t[of.divergence == Divergence::kAdaptiveKl ? n_ + 1 : 0]) {}

  // Returns the divergence of a row and stores its gradient times ``weight``.
  double fill(int64_t row, double weight) {
    const Rows& gradient = of_.gradient;
    // The gradient's row may store the student's exponentials.
    const bool holds = gradient.data != nullptr && is_of(gradient.type, W());
    return fill(
        row, weight, holds ? gradient.write(row, 0, own_.get()) : own_.get(),
        [&](int64_t, int64_t start, int64_t count) {
          return Logits{of_.student.read(row, start, count, copies_[0]),
                        of_.teacher.read(teacher_row(row), start, count, copies_[1])};
        },
        [](const Part&) { return 0.0; },
        [&](const auto& gradient_of_block) {
          each_block([&](int64_t i, int64_t start, int64_t count) {
            W* out = gradient.write(row, start, copies_[0]);
            gradient_of_block(i, out);
            gradient.written(row, start, count, out);
          });
        });
  }

  // Logits of a block's outcomes, and numbers that are copied while these are computed.
  struct Logits {
    const W *student, *teacher;
    Picks ahead{};
  };

  // The same for other outcomes. read(block, start, count) returns a block's `Logits`, shift_of(sums
  // of the row) returns `Slope.shift`, and write(gradient) calls gradient(block, out) for all blocks.
  // ``weights_s`` stores the student's exponentials.
  template <typename Read, typename ShiftOf, typename Write>
  double fill(int64_t row, double weight, W* weights_s, const Read& read, const ShiftOf& shift_of,
              const Write& write) {
    kept_ = {weights_s, own_.get() + n_, own_.get() + 2 * n_, of_.terms != nullptr};
    Answer answer = answer_of(row);
    Tops tops;
    // One maximum for the row, so that exponentials of different blocks can be compared.
    if (of_.divergence == Divergence::kAdaptiveKl && parts_.size() > 1) {
      each_block([&](int64_t i, int64_t start, int64_t count) {
        const auto [z_s, z_t, ahead] = read(i, start, count);
        tops = FASTKD_CALL(tops_of, z_s, z_t, count, tops);
        FASTKD_CALL(pick, ahead, 0);
      });
    }
    each_block([&](int64_t i, int64_t start, int64_t count) {
      auto [z_s, z_t, ahead] = read(i, start, count);
      const Tops here = FASTKD_CALL(tops_of, z_s, z_t, count, tops);
      Part& part = parts_[i] = {base_of(here.s), base_of(here.t)};
      if (of_.terms) {
        answer.see(z_s, start, count, here.s);
        // The weights may overwrite the logits.
        if (z_s != copies_[0]) z_s = std::copy_n(z_s, count, copies_[0]) - count;
      }
      FASTKD_CALL(weigh, of_.divergence, z_s, z_t, count, by_, ahead, part, kept_.at(start));
      if (of_.terms) FASTKD_CALL(means_of, z_s, z_t, count, part, kept_.at(start));
    });
    const Part whole = join();
    if (of_.terms) store_terms(row, whole, answer);
    if (of_.log_masses.data) {
      const double mass = std::exp(of_.log_masses.get(row));
      for (Part& part : parts_) part.to_pt *= mass;
    }
    Slope slope{of_.divergence, of_.slope, weight};
    slope.shift = shift_of(whole);
    const double loss = loss_of(whole, slope);
    if (of_.gradient.data == nullptr) return loss;
    write([&](int64_t i, W* out) {
      const int64_t start = starts_[i], count = starts_[i + 1] - start;
      FASTKD_CALL(gradient_of, slope, count, parts_[i], kept_.at(start), out);
    });
    return loss;
  }

 private:
  // Whether a row's label is the first of its largest logits.
  struct Answer {
    int64_t label;  // -1: none
    double student = 0, teacher = 0;
    bool is_top = true;

    // Takes a block of the student's logits, of which none exceeds ``top``.
    void see(const W* z, int64_t start, int64_t count, double top) {
      if (top > student) is_top = false;
      if (!is_top || top < student || label <= start) return;
      const W* end = z + std::min(count, label - start);
      is_top = std::find(z, end, W(student)) == end;
    }
  };

  Answer answer_of(int64_t row) {
    if (of_.terms == nullptr || of_.labels == nullptr) return {-1};
    const int64_t label = of_.labels[row];
    W copies[2];
    return {label, double(*of_.student.read(row, label, 1, copies)),
            double(*of_.teacher.read(teacher_row(row), label, 1, copies + 1))};
  }

  // Stores a row's terms, from its sums at temperature 1.
  void store_terms(int64_t row, const Part& whole, const Answer& answer) const {
    double* terms = of_.terms + row * kTerms;
    constexpr double down = double(FloatFormat<W>::kDown);
    const double log_s = std::log(whole.total_s * down), log_t = std::log(whole.total_t * down);
    terms[kEntropy] = log_s - whole.mean_s * whole.to_ps;
    terms[kTeacherEntropy] = log_t - whole.mean_t * whole.to_pt;
    double sums[kSums] = {};
    each_part([&](int64_t start, int64_t count, const Part& part) {
      FASTKD_CALL(sums_of_part, Divergence::kTotalVariation, count, W(1), W(0), part,
                  kept_.at(start), sums);
    });
    terms[kTotalVariationTerm] = sums[1] + difference() / 2;
    const bool has_label = answer.label >= 0;
    terms[kAccuracy] = has_label && answer.is_top;
    terms[kLogProb] = has_label ? answer.student - whole.base_s - log_s : 0;
    terms[kTeacherLogProb] = has_label ? answer.teacher - whole.base_t - log_t : 0;
  }

  int64_t teacher_row(int64_t row) const {
    return of_.teacher_rows ? of_.teacher_rows[row] : row;
  }

  static std::vector<int64_t> blocks_of(int64_t n) {
    std::vector<int64_t> starts;
    for (int64_t start = 0; start < n; start += kBlock) starts.push_back(start);
    starts.push_back(n);
    return starts;
  }

  // Calls body(i, start, count) for each block.
  template <typename Body>
  void each_block(const Body& body) const {
    for (size_t i = 0; i < parts_.size(); ++i) body(i, starts_[i], starts_[i + 1] - starts_[i]);
  }

  // Calls body(start, count, part) for each block.
  template <typename Body>
  void each_part(const Body& body) const {
    each_block([&](int64_t i, int64_t start, int64_t count) { body(start, count, parts_[i]); });
  }

  // Returns the row's sums, and sets each part's factors relative to the row.
  Part join() {
    Part whole{-kInfinity, -kInfinity};
    for (const Part& part : parts_) {
      if (part.total_s != 0) whole.base_s = std::max(whole.base_s, part.base_s);
      if (part.total_t != 0) whole.base_t = std::max(whole.base_t, part.base_t);
    }
    for (Part& part : parts_) {
      // A block without weight has no base that could be compared.
      const double shift_s = part.total_s == 0 ? 0 : (part.base_s - whole.base_s) * of_.slope;
      const double shift_t = part.total_t == 0 ? 0 : (part.base_t - whole.base_t) * of_.slope;
      part.to_ps = shift_s == 0 ? 1 : std::exp(shift_s);
      part.to_pt = shift_t == 0 ? 1 : std::exp(shift_t);
      part.to_ratio = shift_s - shift_t;
      whole.total_s += part.to_ps * part.total_s, whole.total_t += part.to_pt * part.total_t;
      whole.cross_s += times(part.to_ps, part.cross_s + times(part.total_s, part.to_ratio));
      whole.cross_t += times(part.to_pt, part.cross_t - times(part.total_t, part.to_ratio));
      whole.mean_s += times(part.to_ps, part.mean_s + times(part.total_s, shift_s));
      whole.mean_t += times(part.to_pt, part.mean_t + times(part.total_t, shift_t));
    }
    whole.to_ps = 1 / whole.total_s, whole.to_pt = 1 / whole.total_t;
    whole.to_ratio = std::log(whole.total_t / whole.total_s);
    for (Part& part : parts_) {
      part.to_ps *= whole.to_ps, part.to_pt *= whole.to_pt, part.to_ratio += whole.to_ratio;
    }
    return whole;
  }

  double loss_of(const Part& whole, Slope& slope) const {
    const double forward = whole.cross_t * whole.to_pt - whole.to_ratio;
    const double reverse = whole.cross_s * whole.to_ps + whole.to_ratio;
    if (of_.divergence == Divergence::kForwardKl) return forward;
    if (of_.divergence == Divergence::kReverseKl) return slope.expectation = reverse;
    if (of_.divergence == Divergence::kAdaptiveKl || of_.divergence == Divergence::kMixed) {
      const bool mixed = of_.divergence == Divergence::kMixed;
      slope.expectation = reverse, slope.share = mixed ? of_.coefficient : head_share(whole);
      return times(slope.share, forward) + times(1 - slope.share, reverse);
    }
    double sums[kSums] = {};
    each_part([&](int64_t start, int64_t count, const Part& part) {
      const W slope = W(of_.slope), coefficient = W(of_.coefficient);
      FASTKD_CALL(sums_of_part, of_.divergence, count, slope, coefficient, part, kept_.at(start),
                  sums);
    });
    slope.expectation = sums[0];
    return is_of_mixture(of_.divergence) ? loss_of_mixture(sums, slope)
                                         : loss_of_overlap(whole, forward, sums, slope);
  }

  double loss_of_mixture(const double* sums, Slope& slope) const {
    const double beta = of_.divergence == Divergence::kJs ? 0.5 : of_.coefficient;
    if (of_.divergence == Divergence::kSkewKl || of_.divergence == Divergence::kSkewReverseKl) {
      return sums[1];
    }
    slope.weight *= 1 - beta;
    return beta * sums[1] + (1 - beta) * sums[0];
  }

  double loss_of_overlap(const Part& whole, double forward, const double* sums,
                         Slope& slope) const {
    if (of_.divergence == Divergence::kNegativeLogAcceptance) {
      const double acceptance = sums[1];
      slope.weight = acceptance == 0 ? 0 : slope.weight / acceptance;
      return 0 * nan_of(whole) - std::log(acceptance);
    }
    const double distance = sums[1] + difference() / 2;  // ½ Σ |p_t − p_s|
    if (of_.divergence == Divergence::kTotalVariation) return distance;
    slope.share = std::exp(-of_.coefficient * (1 - distance));
    return times(slope.share, forward) + (1 - slope.share) * distance;
  }

  // Σ p_s − Σ p_t: a rounding error unless p_t has another mass, and NaN if a logit is.
  double difference() const {
    double sum = 0;
    for (const Part& part : parts_) sum += Overlap<W>(part).difference(part);
    return sum;
  }

  // 1, or NaN if a logit is: it may hide in the smaller of two probabilities.
  static double nan_of(const Part& whole) {
    return std::isnan(whole.total_s + whole.total_t) ? std::nan("") : 1;
  }

  // Fraction of Σ |p_t − p_s| within the head: the teacher's most probable entries, as many as hold
  // at most half of its mass.
  double head_share(const Part& whole) const {
    const W* weights = kept_.weights_t;
    const double half = whole.total_t / 2;
    // Bounds of the head's edge: weights from ``high`` on are in the head, weights below ``low``
    // are not. The largest weight is 1. At most n entries hold the other half, so their largest is
    // at least half/n.
    W low = W(0.999 * half / double(n_)), high = W(1.5 / FloatFormat<W>::kDown);
    if (!(low > 0)) return 0.5;  // NaN
    double from_low = whole.total_t, from_high = 0;
    // Candidates for the edge: first near the mean logarithm, which halves the mass of normally
    // distributed logits; then, by turns, interpolated in mass and evenly spaced.
    const double mean = std::exp(whole.mean_t * whole.to_pt) / double(FloatFormat<W>::kDown);
    for (int tries = 0; from_low - from_high > kFew * double(low); ++tries) {
      const Bits most = bits_of(high), span = most - bits_of(low);
      if (span == 1) break;
      W least[kEdges];
      double masses[kEdges] = {};
      const double far = (half - from_high) / (from_low - from_high);
      for (int j = 0; j < kEdges; ++j) {
        const Bits edge = tries == 0  ? bits_of(W(mean * kAroundMean[j]))
                          : tries % 2 ? most - Bits((far + kAround[j]) * double(span))
                                      : most - (j + 1) * (span / (kEdges + 1));
        least[j] = from_bits(std::clamp<Bits>(edge, most - span + 1, most - 1));
      }
      each_part([&](int64_t start, int64_t count, const Part&) {
        FASTKD_CALL(masses_of, weights + start, count, least, masses);
      });
      int j = 0;
      for (; j < kEdges && masses[j] <= half; ++j) high = least[j], from_high = masses[j];
      if (j < kEdges) low = least[j], from_low = masses[j];
    }
    double sums[2] = {};
    int64_t* end = places_.get();
    each_part([&](int64_t start, int64_t count, const Part& part) {
      end = FASTKD_CALL(gaps_of, start, count, part, kept_.at(start), low, high, sums, end);
    });
    std::sort(places_.get(), end, [&](int64_t a, int64_t b) {
      return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    });
    for (const int64_t* i = places_.get(); i < end; ++i) {
      const bool is_first = from_high == 0;  // the head has at least one entry
      from_high += double(weights[*i]);
      if (!is_first && from_high > half) break;
      sums[0] += std::abs(double(weights[*i]) * whole.to_pt -
                          double(kept_.weights_s[*i]) * whole.to_ps);
    }
    return sums[1] > 0 ? std::min(sums[0] / sums[1], 1.0) : 0.5;
  }

  using Bits = typename FloatFormat<W>::Bits;

  // Positive floats are ordered as their bits are.
  static Bits bits_of(W x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof(x));
    return bits;
  }

  static W from_bits(Bits bits) {
    W x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }

  static constexpr double kAroundMean[kEdges] = {1.25, 1.06, 0.94, 0.8};
  static constexpr double kAround[kEdges] = {-0.125, -0.03125, 0.03125, 0.125};
  static constexpr int kFew = 12;  // entries at the edge that are sorted

  const SoftTargets& of_;
  const Exponents<W> by_;
  const int64_t n_;  // number of outcomes
  const std::unique_ptr<W[]> own_;
  const std::vector<int64_t> starts_;  // of the blocks, and n_
  std::vector<Part> parts_;
  const std::unique_ptr<int64_t[]> places_;  // entries at the head's edge
  Kept<W> kept_{};
  W copies_[2][kBlock];
};

// A thread's state for a teacher of k tokens. A row's divergence is that of its outcomes: the k
// tokens and, in a bucket, all others together. The student's row is read once: exponentials of the
// other tokens are stored where the gradient will be, and the few outcomes are computed in float64.
template <typename W>
class TopKWork {
 public:
  explicit TopKWork(const SoftTargets& of)
      : of_(of), by_(of.slope), k_(of.teacher.n), student_(k_ + of.bucket), teacher_(student_),
        gradient_(student_), next_(k_), own_(new W[of.student.n]),
        parts_((of.student.n + kBlock - 1) / kBlock), first_(parts_.size()),
        outcomes_{row_of(student_), row_of(teacher_), of.divergence, of.coefficient, 1, 1,
                  of.gradient.data ? row_of(gradient_) : Rows{}},
        work_(outcomes_) {}

  // Returns the divergence of a row and stores its gradient times ``weight``.
  double fill(int64_t row, double weight) {
    const int64_t* ids = of_.ids + row * k_;
    const double* given = of_.teacher.read(row, 0, k_, teacher_.data());
    if (given != teacher_.data()) std::copy_n(given, k_, teacher_.data());
    const bool holds = of_.gradient.data && is_of(of_.gradient.type, W());
    W* x = holds ? of_.gradient.write(row, 0, own_.get()) : own_.get();
    W copy;
    for (int64_t j = 0; j < k_; ++j) {
      const bool is_read = !of_.bucket && !is_unused(j);
      student_[j] = is_read ? *of_.student.read(row, ids[j], 1, &copy) * of_.slope : -kInfinity;
    }
    const double rest = of_.bucket ? fill_rest(row, ids, x) : 0;
    const double loss = work_.fill(0, weight);
    if (of_.gradient.data == nullptr) return loss;
    const double of_rest = rest == 0 ? 0 : gradient_[k_] / rest;
    for (int64_t start = 0; start < of_.student.n; start += kBlock) {
      const int64_t count = std::min(kBlock, of_.student.n - start);
      if (of_.bucket) {
        FASTKD_CALL(multiply, x + start, count, W(of_rest * parts_[start / kBlock].to_ps));
      } else {
        std::fill_n(x + start, count, W(0));
      }
    }
    for (int64_t j = 0; j < k_; ++j) {
      if (!is_unused(j)) x[ids[j]] = W(gradient_[j]);
    }
    of_.gradient.written(row, 0, of_.student.n, x);
    return loss;
  }

 private:
  static Rows row_of(std::vector<double>& x) {
    return {reinterpret_cast<char*>(x.data()), 0, int64_t(x.size()), Type::kDouble};
  }

  // An unused entry has any id.
  bool is_unused(int64_t j) const { return teacher_[j] == -kInfinity; }

  // Stores the exponentials of the tokens outside of ``ids`` in x, and the logarithms of the
  // outcomes' probabilities. Returns the sum of the exponentials. The listed logits are read with
  // their blocks: one after the other they would wait for memory.
  double fill_rest(int64_t row, const int64_t* ids, W* x) {
    const int64_t n = of_.student.n;
    double base = -kInfinity, listed = 0, entropy = 0;
    int64_t used = 0;
    std::fill(first_.begin(), first_.end(), -1);
    for (int64_t j = k_ - 1; j >= 0; --j) {
      if (is_unused(j)) continue;
      const double p = std::exp(teacher_[j]);
      listed += p, entropy -= times(p, teacher_[j]), ++used;
      next_[j] = std::exchange(first_[ids[j] / kBlock], j);
    }
    for (int64_t start = 0; start < n; start += kBlock) {
      const int64_t count = std::min(kBlock, n - start);
      const W* z = of_.student.read(row, start, count, copy_);
      if (z != x + start) std::copy_n(z, count, x + start);
      for (int64_t j = first_[start / kBlock]; j >= 0; j = next_[j]) {
        student_[j] = x[ids[j]] * of_.slope;
        base = std::max(base, student_[j]);
        x[ids[j]] = -kInfinity;
      }
      Part& part = parts_[start / kBlock];
      part.base_s = base_of(FASTKD_CALL(top_of_block, x + start, count));
      part.total_s = FASTKD_CALL(raise, x + start, count, by_, W(part.base_s), z + count);
      if (part.total_s != 0) base = std::max(base, part.base_s * of_.slope);
    }
    base = base_of(base);
    double rest = 0;
    for (Part& part : parts_) {
      part.to_ps = part.total_s == 0 ? 0 : std::exp(part.base_s * of_.slope - base);
      rest += times(part.to_ps, part.total_s);
    }
    const double up = 1 / double(FloatFormat<W>::kDown);  // the exponentials are raised by this
    double total = rest / up;
    for (int64_t j = 0; j < k_; ++j) total += std::exp(student_[j] - base);
    const double log_total = base + std::log(total);
    for (int64_t j = 0; j < k_; ++j) student_[j] -= log_total;
    student_[k_] = std::log(rest / up) + base - log_total;
    const double least = least_rest(entropy);
    if (used == n || (1 - listed <= least && rest == 0)) {
      teacher_[k_] = -kInfinity;
    } else {
      teacher_[k_] = 1 - listed <= least ? std::log(least) : std::log1p(-listed);
    }
    return rest;
  }

  // See probability_of_rest in fastkd/lm/row_losses.py.
  double least_rest(double entropy) const {
    const Type type = of_.teacher.type;
    const double epsilon = type == Type::kDouble  ? std::numeric_limits<double>::epsilon()
                           : type == Type::kFloat ? 0x1p-23
                           : type == Type::kHalf  ? 0x1p-10
                                                  : 0x1p-7;
    return (std::min(epsilon, 0x1p-23) + epsilon * entropy) / 2;
  }

  const SoftTargets& of_;
  const Exponents<W> by_;
  const int64_t k_;
  std::vector<double> student_, teacher_, gradient_;  // of the outcomes
  std::vector<int64_t> next_;  // the next entry of ids in the same block, -1 for none
  const std::unique_ptr<W[]> own_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_;  // entry of ids in each block, -1 for none
  const SoftTargets outcomes_;
  Work<double> work_;
  W copy_[kBlock];
};

#include "losses/soft_targets/matched_tokens.h"

template <typename W, typename RowWork>
void fill_rows(const SoftTargets& of, int64_t begin, int64_t end, const bool* real,
               const Rows& weights, double* losses) {
  SoftTargets main = of, at_one = of;
  std::unique_ptr<Work<W>> of_terms;  // a pass of its own at another temperature
  if (of.terms && of.slope != 1) {
    main.terms = nullptr;
    at_one.divergence = Divergence::kTotalVariation;
    at_one.slope = 1, at_one.gradient = at_one.log_masses = {};
    of_terms = std::make_unique<Work<W>>(at_one);
  }
  RowWork work(main);
  const Rows& dz = of.gradient;
  for (int64_t i = begin; i < end; ++i) {
    if (real && !real[i]) {
      losses[i] = 0;
      if (dz.data) std::fill_n(dz.place(i, 0), dz.n * size_of(dz.type), 0);
      if (of.terms) std::fill_n(of.terms + i * kTerms, int(kTerms), 0);
      continue;
    }
    if (of_terms) of_terms->fill(i, 0);
    const double weight = dz.data ? weights.get(i) * of.scale * of.slope : 0;
    losses[i] = work.fill(i, weight) * of.scale;
  }
}

}  // namespace

void SoftTargets::fill(int64_t begin, int64_t end, const bool* real, const Rows& weights,
                       double* losses) const {
  const bool wide = student.type == Type::kDouble || slope < 1 / kHot;
  const auto fill = ids     ? (wide ? fill_rows<double, TopKWork<double>>
                                    : fill_rows<float, TopKWork<float>>)
                    : match ? (wide ? fill_rows<double, MatchedWork<double>>
                                    : fill_rows<float, MatchedWork<float>>)
                            : (wide ? fill_rows<double, Work<double>>
                                    : fill_rows<float, Work<float>>);
  fill(*this, begin, end, real, weights, losses);
}

template <typename W>
void log_totals_of(const Rows& logits, double slope, int64_t begin, int64_t end, double* totals) {
  const std::unique_ptr<W[]> copy(is_of(logits.type, W()) ? nullptr : new W[logits.n]);
  for (int64_t i = begin; i < end; ++i) {
    const W* z = logits.read(i, 0, logits.n, copy.get());
    const double base = base_of(FASTKD_CALL(top_of_block, z, logits.n));
    totals[i] = base * slope + std::log(FASTKD_CALL(total_of, z, logits.n, slope, W(base)));
  }
}

void log_row_totals(const Rows& logits, double slope, int64_t begin, int64_t end, double* totals) {
  const bool wide = logits.type == Type::kDouble || slope < 1 / kHot;
  (wide ? log_totals_of<double> : log_totals_of<float>)(logits, slope, begin, end, totals);
}

}  // namespace fastkd
