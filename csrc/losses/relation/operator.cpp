// Operator of the relation loss.
#include <algorithm>
#include <memory>

#include "losses/relation/relation.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// Groups of N rows: the tokens of each sample, or with ``samples`` the samples at each position.
struct Groups {
  Positions student, teacher;  // (groups, N, D)
  std::unique_ptr<bool[]> real;
  std::vector<int64_t> counts;
  int64_t compared = 0;

  // A group of fewer than two real rows is left out.
  Groups(const Tensor& of_student, const Tensor& of_teacher, const Mask& mask, bool samples)
      : student(positions_of(of_student)), teacher(positions_of(of_teacher)) {
    if (samples) student = student.turned(), teacher = teacher.turned();
    const int64_t G = student.samples, N = student.positions;
    real.reset(new bool[G * N]);
    Tensor holder;
    const bool* given = bytes_of(mask, holder);
    for (int64_t g = 0; g < G; ++g) {
      bool* row = real.get() + g * N;
      for (int64_t i = 0; i < N; ++i) row[i] = !given || given[samples ? i * G + g : g * N + i];
      counts.push_back(std::count(row, row + N, true));
      if (counts.back() < 2) std::fill(row, row + N, false);
      compared += counts.back() >= 2;
    }
  }
};

// A thread's state: one group after another.
template <typename W>
class Relations {
 public:
  Relations(const Groups& of, double eps, const Positions* dx)
      : of_(of), eps_(eps), dx_(dx), N_(of.student.positions), units_(2 * N_) {
    for (const Positions* x : {&of.student, &of.teacher}) rows_.push_back(room_of<W>(x->D));
    const int64_t numbers = (N_ + 1) * (rows_[0] + rows_[1]) + 2 * N_ * N_;
    memory_.reset(new Line[numbers * sizeof(W) / sizeof(Line) + 1]);
  }

  // Returns the loss of a group; stores share·∂/∂x in ``dx``, or adds it.
  double operator()(int64_t g, double share, bool add) {
    const bool* real = of_.real.get() + g * N_;
    W* place = reinterpret_cast<W*>(memory_.get());
    for (int i = 0; i < 2; ++i) {
      W* const rows = place;
      W* const mean = rows + N_ * rows_[i];
      place = mean + rows_[i];
      const Positions& x = i ? of_.teacher : of_.student;
      sides_[i] = {x.group(g), real, of_.counts[g], rows, mean, units_.data() + i * N_};
    }
    W* const R[2] = {place, place + N_ * N_};
    RelationLoss found{};
    if (of_.counts[g] >= 2) {
      each_row(2, N_ * rows_[0] * int64_t(sizeof(W)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) sides_[i].centre(N_);
      });
      for (int i = 0; i < 2; ++i) multiply(sides_[i], R[i]);
      found = pearson(sides_[0], sides_[1], R[0], R[1], N_, eps_, dx_ != nullptr);
    }
    if (dx_) gradient(g, R[0], 2 * share * found.k, add);
    return found.loss;
  }

 private:
  struct alignas(128) Line {
    char bytes[128];
  };

  void multiply(const RelationSide<W>& side, W* R) const {
    // The first block has most pairs of rows and the last fewest, so blocks are joined from both
    // ends.
    const int64_t blocks = (N_ + kBlock - 1) / kBlock, pairs = (blocks + 1) / 2;
    each_row(pairs, N_ * kBlock * side.x.n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        multiply_rows(side.rows, N_, side.x.n, i, R);
        if (blocks - 1 - i > i) multiply_rows(side.rows, N_, side.x.n, blocks - 1 - i, R);
      }
    });
  }

  void gradient(int64_t g, const W* A, double factor, bool add) const {
    const RelationSide<W>& side = sides_[0];
    const int64_t D = side.x.n;
    each_row((N_ + kBlock - 1) / kBlock, N_ * kBlock * D, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<Line[]> room(new Line[kBlock * rows_[0] * sizeof(W) / sizeof(Line)]);
      W* const h = reinterpret_cast<W*>(room.get());
      for (int64_t block = begin; block < end; ++block) {
        if (of_.counts[g] >= 2) combine_rows(A, side.rows, N_, D, block, h);
        const auto place = [&](int64_t i) { return reinterpret_cast<W*>(dx_->row(g, i).data); };
        for (int64_t i = block * kBlock; i < std::min(N_, (block + 1) * kBlock); ++i) {
          const W* const next = i + 1 < N_ ? place(i + 1) : nullptr;
          side.gradient(i, h + i % kBlock * rows_[0], factor, add, place(i), next);
        }
      }
    });
  }

  const Groups& of_;
  const double eps_;
  const Positions* dx_;
  const int64_t N_;
  std::vector<int64_t> rows_;  // strides of student's and teacher's rows
  std::vector<UnitRow> units_;
  RelationSide<W> sides_[2];
  std::unique_ptr<Line[]> memory_;
};

// Returns weight times the mean loss of the groups, each times its own of ``weights`` unless these
// are null; stores its gradient in ``dx`` (groups, N, D), or adds it.
template <typename W>
double relations_of(const Groups& of, double weight, const Rows& weights, double eps, bool add,
                    const Positions* dx) {
  const int64_t groups = of.student.samples, N = of.student.positions;
  const int64_t threads = torch::stable::get_num_threads();
  const double share = weight / double(std::max<int64_t>(of.compared, 1));
  std::vector<double> losses(groups);
  const auto run = [&](int64_t begin, int64_t end) {
    Relations<W> relations(of, eps, dx);
    for (int64_t g = begin; g < end; ++g) {
      const double factor = weights.data ? share * weights.get(g) : share;
      losses[g] = factor * relations(g, factor, add);
    }
  };
  // Each thread has groups of its own, or all threads share each group where groups are few.
  if (groups % threads == 0 || groups >= 4 * threads) {
    each_row(groups, N * (of.student.D + of.teacher.D) * int64_t(sizeof(W)), run);
  } else {
    run(0, groups);
  }
  return total(losses);
}

// The weighted losses (2) over tokens and over samples of features (B, N, D), and if requested the
// student's gradient of their sum, in the working dtype. ``weights`` (B,) are factors of the
// samples' losses over tokens.
std::vector<Tensor> relation_terms(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                   const std::optional<Tensor>& weights, double tokens,
                                   double samples, double eps, bool gradient) {
  const ScalarType own = check_floating(student, "student");
  check(student, "student", own, {kAnySize, kAnySize, kAnySize});
  check(teacher, "teacher", own, {student.size(0), student.size(1), kAnySize});
  check(mask, "mask", ScalarType::Bool, {student.size(0), student.size(1)});
  check_numbers(weights, "weights", student.size(0));
  const ScalarType type = working_type(student);
  std::vector<Tensor> results{torch::stable::new_empty(student, {2}, type)};
  Positions dx{};
  if (gradient) {
    const std::vector<int64_t> sizes{student.size(0), student.size(1), student.size(2)};
    results.push_back(new_large(student, sizes, type));
    dx = positions_of(results.back());
  }
  bool add = false;
  for (const bool of_samples : {false, true}) {
    const Rows terms = numbers_of(results.front());
    terms.put(of_samples, 0);
    const double weight = of_samples ? samples : tokens;
    if (weight == 0) continue;
    const Groups groups(student, teacher, mask, of_samples);
    if (groups.student.samples == 0 || groups.student.positions < 2) continue;
    if (of_samples) dx = dx.turned();
    const Positions* to = gradient ? &dx : nullptr;
    const Rows own_weights = weights && !of_samples ? numbers_of(*weights) : Rows{};
    terms.put(of_samples, type == ScalarType::Double
                              ? relations_of<double>(groups, weight, own_weights, eps, add, to)
                              : relations_of<float>(groups, weight, own_weights, eps, add, to));
    add = true;
  }
  if (gradient && !add) torch::stable::zero_(results.back());
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(relation_terms,
    "(Tensor student, Tensor teacher, Tensor? mask, Tensor? weights, float tokens,"
    " float samples, float eps, bool gradient) -> Tensor[]")
