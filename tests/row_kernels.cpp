// The CPU kernels without PyTorch, for sanitizers: rows of every type and of awkward sizes, in
// memory that ends with the last row, on several threads and on one. Prints errors. The argument is
// the number of rounds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "losses/attention/attention.h"
#include "losses/cos_nce/cos_nce.h"
#include "losses/hidden_states/hidden_states.h"
#include "losses/knn/knn.h"
#include "losses/layer_norm_mse/layer_norm_mse.h"
#include "base/processors.h"
#include "base/products.h"
#include "losses/relation/relation.h"
#include "losses/soft_targets/soft_targets.h"

namespace fastkd::baseline {
constexpr int kBytes = FASTKD_BYTES;
constexpr bool kFuses = false;
#include "base/vectors.h"
}  // namespace fastkd::baseline

namespace fastkd::fused {
constexpr int kBytes = FASTKD_BYTES;
constexpr bool kFuses = true;
#include "base/vectors.h"
}  // namespace fastkd::fused

using namespace fastkd;
using namespace fastkd::baseline;

constexpr Type kTypes[] = {Type::kBFloat16, Type::kHalf, Type::kFloat, Type::kDouble};
constexpr int64_t kRows = 7;

// Rows of n numbers with gaps between them, and no memory behind the last.
struct Memory {
  std::vector<char> bytes;
  Rows rows;

  Memory(int64_t n, Type type, std::mt19937* random, int64_t count = kRows, int64_t gap = 3)
      : bytes(((count - 1) * (n + gap) + n) * size_of(type)),
        rows{bytes.data(), n + gap, n, type} {
    std::normal_distribution<double> normal;
    std::vector<double> row(n);
    for (int64_t i = 0; random && i < count; ++i) {
      for (double& x : row) x = normal(*random);
      Rows one = rows;
      one.data = rows.place(i, 0);
      one.fill(row.data());
    }
  }
};

// Calls body(begin, end) for all rows, or for each third on a thread of its own.
template <typename Body>
void share(int64_t rows, bool threads, const Body& body) {
  std::vector<std::thread> running;
  const int64_t step = threads ? (rows + 2) / 3 : rows;
  for (int64_t begin = 0; begin < rows; begin += step) {
    running.emplace_back([&, begin] { body(begin, std::min(rows, begin + step)); });
  }
  for (auto& thread : running) thread.join();
}

// run(threads, output) writes ``size`` bytes; they must not depend on threads.
template <typename Run>
void compare(const char* what, int64_t n, Type type, size_t size, const Run& run) {
  std::vector<char> alone(size), shared(size);
  run(false, alone.data());
  run(true, shared.data());
  if (alone != shared) std::printf("%s: other bits on threads, %d of %d\n", what, int(n), int(type));
}

void layer_norm_mse(int64_t n, Type type, std::mt19937& random) {
  const Memory x(n, type, &random), y(n, type, &random);
  const size_t bytes = kRows * n * size_of(type);
  compare("layer_norm_mse", n, type, 2 * bytes, [&](bool threads, char* out) {
    std::vector<double> losses(kRows);
    const Rows dx{out, n, n, type}, dy{out + bytes, n, n, type};
    const LayerNormMSE of{{x.rows, y.rows, dx, dy, 0.3}, 1e-5};
    share(kRows, threads, [&](int64_t begin, int64_t end) { of.rows(begin, end, losses.data()); });
  });
}

void hidden_states(int64_t n, Type type, std::mt19937& random) {
  const Memory x(n, type, &random), y(n, type, &random), weights(1, type, &random);
  const std::unique_ptr<bool[]> mask(new bool[kRows]);
  for (int64_t i = 0; i < kRows; ++i) mask[i] = i != 3;
  const size_t bytes = kRows * n * size_of(type);
  for (const auto distance : {Distance::kMse, Distance::kCosine, Distance::kSmoothL1}) {
    compare("hidden_states", n, type, bytes, [&](bool threads, char* out) {
      std::vector<double> losses(kRows);
      const Rows dx{out, n, n, type};
      const HiddenStates of{
          {x.rows, y.rows, dx, {}, 0.3, weights.rows, mask.get()}, distance, 0.5};
      share(kRows, threads, [&](int64_t begin, int64_t end) {
        of.rows(begin, end, losses.data());
      });
      if (losses[3] != 0) std::printf("a masked row's loss of %g\n", losses[3]);
    });
  }
}

void soft_targets(int64_t n, Type type, std::mt19937& random) {
  const Memory student(n, type, &random), teacher(n, type, &random);
  for (const auto divergence : {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJs,
                                Divergence::kAdaptiveKl}) {
    compare("soft_targets", n, type, kRows * n * size_of(type), [&](bool threads, char* out) {
      double weight = 0.3, losses[kRows];
      const Rows gradient{out, n, n, type};
      const Rows weights{reinterpret_cast<char*>(&weight), 0, 1, Type::kDouble};
      const SoftTargets of{student.rows, teacher.rows, divergence, 0.5, 1, 1, gradient};
      share(kRows, threads, [&](int64_t begin, int64_t end) {
        of.fill(begin, end, nullptr, weights, losses);
      });
      for (const double loss : losses) {
        if (!(loss > -1e-5)) std::printf("a divergence of %g\n", loss);
      }
    });
  }
}

// Every third token has a match, in the reverse order. All-equal teachers tie.
void matched_soft_targets(int64_t n, Type type, std::mt19937& random) {
  const Memory student(n, type, &random), teacher(n + 5, type, &random), equal(n + 5, type, nullptr);
  for (const auto unmatched : {Unmatched::kRenormalise, Unmatched::kBucket, Unmatched::kSorted}) {
    Match match{unmatched};
    match.in_student.resize(n / kColumns + 1), match.in_teacher.resize((n + 5) / kColumns + 1);
    for (int64_t i = 0; i < n; i += 3) {
      const int64_t id = n + 4 - i;
      match.teacher.push_back(int32_t(id));
      match.in_student[i / kColumns] |= uint16_t(1 << i % kColumns);
      match.in_teacher[id / kColumns] |= uint16_t(1 << id % kColumns);
    }
    for (int64_t i = 0; i < n; i += Match::kBlock) match.starts.push_back((i + 2) / 3);
    match.starts.push_back(int64_t(match.teacher.size()));
    match.teacher.resize(match.teacher.size() + Match::kPadding);
    for (const auto* other : {&teacher, &equal}) {
      compare("matched", n, type, kRows * n * size_of(type), [&](bool threads, char* out) {
        double weight = 0.3, losses[kRows];
        const Rows weights{reinterpret_cast<char*>(&weight), 0, 1, Type::kDouble};
        SoftTargets of{student.rows, other->rows, Divergence::kAdaptiveKl, 0.5, 1, 1,
                       {out, n, n, type}};
        of.match = &match;
        share(kRows, threads, [&](int64_t begin, int64_t end) {
          of.fill(begin, end, nullptr, weights, losses);
        });
        for (const double loss : losses) {
          if (!(loss > -1e-5)) std::printf("a matched divergence of %g\n", loss);
        }
      });
    }
  }
}

void cos_nce(int64_t n, Type type, std::mt19937& random) {
  const Memory z(n, type, &random), t(n, type, &random);
  Memory sums(n, type == Type::kDouble ? type : Type::kFloat, nullptr, 2, 0);
  const int64_t segments[] = {0, 1, 1, 0, 0, 1, 0};
  const std::unique_ptr<bool[]> mask(new bool[kRows]);
  for (int64_t i = 0; i < kRows; ++i) mask[i] = i != 3;
  const Positions rows{t.rows.data, kRows, 1, n, t.rows.stride, n, type};
  const Negatives negatives{rows, mask.get(), segments, 2, true};
  negatives.add_directions(0, sums.rows, rows);
  if (negatives.counts() != std::vector<int64_t>{3, 3}) std::printf("other negatives\n");
  compare("cos_nce", n, type, kRows * n * size_of(type), [&](bool threads, char* out) {
    const Rows dz{out, n, n, type};
    share(kRows, threads, [&](int64_t begin, int64_t end) {
      Angles angles(n);
      for (int64_t i = begin; i < end; ++i) {
        angles.pull(z.rows.only(i), t.rows.only(i), sums.rows.only(segments[i]), 0.1, 1.5, 0.3,
                    dz.only(i), i + 1 < end ? z.rows.only(i + 1) : Rows{}, {});
      }
    });
  });
}

void attention(int64_t N, Type type, std::mt19937& random) {
  constexpr int64_t kSamples = 2, kHeads = 3;
  const int64_t rows = kSamples * kHeads * N;
  const Memory student(N, type, &random, rows, 0), teacher(N, type, &random, rows, 0);
  const std::unique_ptr<bool[]> mask(new bool[kSamples * N]);
  for (int64_t i = 0; i < kSamples * N; ++i) mask[i] = random() % 4 != 0;
  for (const bool mean : {false, true}) {
    const AttentionMaps of{student.rows, teacher.rows, kHeads, kHeads, N, mean, mask.get()};
    compare("attention", N, type, rows * N * size_of(type), [&](bool threads, char* out) {
      const Rows dx{out, N, N, type};
      share(kSamples * of.groups(), threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const double squares = of.compare(i / of.groups(), i % of.groups(), 0.3, dx);
          if (!(squares >= 0)) std::printf("squares of %g\n", squares);
        }
      });
    });
  }
}

void knn(int64_t n, Type type, std::mt19937& random) {
  constexpr int64_t kBank = 37, k = 2;  // more than a tile for each label
  const Memory student(n, type, &random), teacher(n, type, &random, kBank);
  Neighbours of{student.rows, teacher.rows, kRows, kBank};
  const int64_t labels[kRows] = {0, 1, 0, 0, 1, 2, 0};
  of.group(labels, labels);
  for (int64_t j = 0; j < kBank; ++j) of.groups[j % 2].bank.push_back(j);
  const auto tiles = of.tiles();
  compare("knn", n, type, kRows * n * size_of(type), [&](bool threads, char* out) {
    const Rows gradient{out, n, n, type};
    share(int64_t(tiles.size()), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) of.measure(tiles[i]);
    });
    share(kRows, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const double loss = of.row(i, k, 0.3, gradient);
        if (!(loss >= 0)) std::printf("a distance of %g\n", loss);
      }
    });
  });
}

template <typename W>
void relation(int64_t n, Type type, std::mt19937& random) {
  const Memory student(n, type, &random), teacher(n, type, &random);
  const std::unique_ptr<bool[]> real(new bool[kRows]);
  for (int64_t i = 0; i < kRows; ++i) real[i] = i != 3;
  compare("relation", n, type, kRows * n * sizeof(W), [&](bool threads, char* out) {
    const int64_t room = room_of<W>(n);
    std::vector<W> rows[2], means[2], R[2];
    std::vector<UnitRow> units[2];
    RelationSide<W> sides[2];
    share(2, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        rows[i].resize(kRows * room), means[i].resize(room), units[i].resize(kRows);
        R[i].resize(kRows * kRows);
        const Rows& x = i ? teacher.rows : student.rows;
        sides[i] = {x, real.get(), kRows - 1, rows[i].data(), means[i].data(), units[i].data()};
        sides[i].centre(kRows);
        multiply_rows(rows[i].data(), kRows, n, 0, R[i].data());
      }
    });
    const auto [loss, k] =
        pearson(sides[0], sides[1], R[0].data(), R[1].data(), kRows, 1e-8, true);
    if (!(loss > -1e-5 && loss < 2.001)) std::printf("a relation loss of %g\n", loss);
    std::vector<W> h(kBlock * room);
    combine_rows(R[0].data(), rows[0].data(), kRows, n, 0, h.data());
    share(kRows, threads, [&, k = k](int64_t begin, int64_t end) {
      W* dx = reinterpret_cast<W*>(out);
      for (int64_t i = begin; i < end; ++i) {
        sides[0].gradient(i, &h[i * room], k, false, dx + i * n, nullptr);
        if (i % 2) sides[0].gradient(i, &h[i * room], k, true, dx + i * n, dx);
      }
    });
  });
}

// |found − exact| in units of the last place of W.
template <typename W>
double roundings(W found, long double exact) {
  constexpr int kDigits = std::numeric_limits<W>::digits;
  constexpr int kLeast = std::numeric_limits<W>::min_exponent - kDigits;
  const int place = std::max(std::ilogb(W(exact)) - kDigits + 1, kLeast);
  return double(std::fabs(found - exact) / std::ldexp(1.0L, place));
}

// Checks that the exponential errs by at most 1.5 roundings, for x up to 0 from ``next``.
template <typename W, typename Exp, typename Next>
void exponential(const char* what, const Exp& exp_of, int64_t count, const Next& next) {
  double worst = 0;
  for (int64_t start = 0; start < count; start += kLanes<W>) {
    W x[kLanes<W>], e[kLanes<W>];
    for (int i = 0; i < kLanes<W>; ++i) x[i] = next(start + i);
    exp_of(x, e);
    for (int i = 0; i < kLanes<W>; ++i) {
      if (x[i] > 0) continue;
      const long double exact = std::exp((long double)(x[i]));
      if (std::isnan(x[i]) || W(exact) == 0) {
        const bool right = std::isnan(x[i]) ? std::isnan(e[i]) : e[i] == 0;
        if (!right) std::printf("%s(%g) is %g\n", what, double(x[i]), double(e[i]));
      } else {
        worst = std::max(worst, roundings(e[i], exact));
      }
    }
  }
  if (!(worst <= 1.5)) std::printf("%s errs by %g roundings\n", what, worst);
}

// The exponential with and without fused multiply-add.
template <typename W, typename Next>
void exponentials(int64_t count, const Next& next) {
  const auto plain = [](const W* x, W* e) { store(e, baseline::exp<W>(load(x))); };
  const auto fused_too = [](const W* x, W* e) { store(e, fused::exp<W>(load(x))); };
  exponential<W>("exp", plain, count, next);
  exponential<W>("fused exp", fused_too, count, next);
}

void exp_and_log(uint32_t step, std::mt19937& random) {
  const int64_t count = (1ll << 32) / step;
  exponentials<float>(count, [&](int64_t i) {
    const uint32_t bits = uint32_t(i * step);
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  });
  std::uniform_real_distribution<double> from_least(-745, 0), near(-1, 0);
  exponentials<double>(count, [&](int64_t i) { return i % 2 ? from_least(random) : near(random); });
  double worst = 0;  // log(2/(1 + x))
  for (int64_t i = 0; i < count; ++i) {
    const float x = float(i) / float(count);
    const auto found = log_over_mean<float>(splat(1.f), splat(x));
    worst = std::max(worst, roundings(found[0], std::log(2 / (1 + (long double)(x)))));
  }
  if (worst > 3) std::printf("log errs by %g roundings\n", worst);
}

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  for (int round = 0; round < rounds; ++round) {
    std::mt19937 random(round);
    for (const Type type : kTypes) {
      for (const int64_t n : {1, 2, 7, 16, 17, 65, 1030}) {
        layer_norm_mse(n, type, random);
        hidden_states(n, type, random);
        soft_targets(n, type, random);
        matched_soft_targets(n, type, random);
        cos_nce(n, type, random);
        knn(n, type, random);
        type == Type::kDouble ? relation<double>(n, type, random)
                              : relation<float>(n, type, random);
        if (n < 100) attention(n, type, random);
      }
      knn(8200, type, random);  // two ranges of features
    }
  }
  std::mt19937 random(rounds);
  exp_and_log(rounds > 1 ? 997 : 99991, random);
}
