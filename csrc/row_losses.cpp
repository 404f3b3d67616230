// The operators of the row kernels. Those that make a gradient along with the loss are asked for it.
#include <cmath>
#include <memory>

#include "attention.h"
#include "cos_nce.h"
#include "knn.h"
#include "layer_norm_mse.h"
#include "relation.h"
#include "soft_targets.h"
#include "tensors.h"

namespace fastkd {
namespace {

double total(const std::vector<double>& losses) {
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum;
}

// A loss, or one of each of ``rows`` without a reduction.
Tensor new_losses(const Tensor& like, const std::string& reduction, std::vector<int64_t> rows) {
  if (reduction != "none") rows.clear();
  return torch::stable::new_empty(like, rows, working_type(like));
}

void put_losses(const std::vector<double>& losses, const Tensor& result) {
  const Rows numbers{data<char>(result), 1, 1, type_of(result)};
  if (result.dim() == 0) return numbers.put(0, total(losses));
  for (size_t i = 0; i < losses.size(); ++i) numbers.put(i, losses[i]);
}

// The loss, and the gradients of the sides that need one.
std::vector<Tensor> layer_norm_mse(const Tensor& x, const Tensor& y, double eps, int64_t divisor,
                                   bool needs_dx, bool needs_dy) {
  check(x, "x", check_floating(x, "x"), {kAnySize, kAnySize});
  const int64_t R = x.size(0), D = x.size(1);
  check(y, "y", x.scalar_type(), {R, D});
  std::vector<Tensor> results{new_losses(x, "sum", {})};
  const auto gradient = [&](bool needed) {
    if (!needed) return Rows{};
    results.push_back(new_large(x, {R, D}, gradient_type(x)));
    return rows_of(results.back());
  };
  const Rows dx = gradient(needs_dx), dy = gradient(needs_dy);
  const LayerNormMSE of{rows_of(x), rows_of(y), eps, 1 / double(divisor), dx, dy};
  std::vector<double> losses(D ? R : 0);
  each_row(losses.size(), 4 * D * x.element_size(), [&](int64_t begin, int64_t end) {
    of.rows(begin, end, losses.data());
  });
  for (double& loss : losses) loss /= double(divisor);
  put_losses(losses, results[0]);
  return results;
}

using Mask = std::optional<Tensor>;  // (R,) bool

// Which rows count; the bytes are kept by ``holder``.
const bool* bytes_of(const Mask& mask, Tensor& holder) {
  if (!mask) return nullptr;
  holder = torch::stable::contiguous(*mask);
  return data<const bool>(holder);
}

// Losses of rows, and weights times their gradients in the rows of ``gradient`` unless null.
std::vector<double> soft_targets(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                 const std::string& divergence, double temperature, double scale,
                                 const Rows& gradient, const Rows& weights) {
  const int64_t R = student.size(0), V = student.size(1);
  check(teacher, "teacher", student.scalar_type(), {R, V});
  check(mask, "mask", ScalarType::Bool, {R});
  const Divergence kind = divergence == "forward_kl"   ? Divergence::kForwardKl
                          : divergence == "reverse_kl" ? Divergence::kReverseKl
                          : divergence == "js"         ? Divergence::kJs
                                                       : Divergence::kAdaptiveKl;
  const SoftTargets of{rows_of(student), rows_of(teacher), kind, 1 / temperature, scale, gradient};
  std::vector<double> losses(R);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const int64_t bytes = 3 * of.student.n * student.element_size();
  each_row(losses.size(), bytes, [&](int64_t begin, int64_t end) {
    of.fill(begin, end, real, weights, losses.data());
  });
  return losses;
}

Tensor vector_of(const std::vector<double>& numbers, const Tensor& like) {
  const Tensor result =
      torch::stable::new_empty(like, {int64_t(numbers.size())}, working_type(like));
  for (size_t i = 0; i < numbers.size(); ++i) numbers_of(result).put(i, numbers[i]);
  return result;
}

// The loss, (R,) where nothing reduces it, and its gradient if it is asked for.
std::vector<Tensor> soft_target_loss(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                     const std::optional<Tensor>& denominator,
                                     const std::string& divergence, double temperature,
                                     double scale, const std::string& reduction, bool gradient) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize});
  check_numbers(denominator, "denominator");
  double divisor = 1;
  if (denominator) {
    divisor = value_of(*denominator);
  } else if (reduction == "batchmean") {
    Tensor holder;
    const bool* real = bytes_of(mask, holder);
    const int64_t R = student.size(0);
    divisor = double(std::max<int64_t>(1, real ? std::count(real, real + R, true) : R));
  }
  double weight = 1 / divisor;
  const Rows weights{reinterpret_cast<char*>(&weight), 0, 1, Type::kDouble};
  const Tensor dstudent =
      new_large(student, {gradient ? student.size(0) : 0, student.size(1)}, working_type(student));
  const std::vector<double> losses =
      soft_targets(student, teacher, mask, divergence, temperature, scale,
                   gradient ? rows_of(dstudent) : Rows{}, weights);
  std::vector<Tensor> results{reduction == "none" ? vector_of(losses, student)
                                                  : scalar(total(losses) / divisor, student)};
  if (gradient) results.push_back(dstudent);
  return results;
}

// Losses (R,); with weights (R,) the gradient of their product takes the student's place.
Tensor soft_target_rows(const Tensor& student, const Tensor& teacher, const Mask& mask,
                        const std::optional<Tensor>& weights, const std::string& divergence,
                        double temperature, double scale) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize},
        weights ? Strides::kWritten : Strides::kRows);
  check_numbers(weights, "weights", student.size(0));
  const Rows gradient = weights ? rows_of(student) : Rows{};
  const Rows given = weights ? numbers_of(*weights) : Rows{};
  return vector_of(soft_targets(student, teacher, mask, divergence, temperature, scale, gradient,
                                given),
                   student);
}

// (samples, positions, D), the last dimension dense; others have one sample, or one position.
Positions positions_of(const Tensor& x) {
  return {data<char>(x), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), type_of(x)};
}

// What losses are divided by where ``reduction`` is their mean.
double divisor_of(const std::string& reduction, int64_t compared) {
  return reduction == "mean" ? double(std::max<int64_t>(compared, 1)) : 1;
}

// int64, dense; kept by ``holder``.
const int64_t* places_of(const std::optional<Tensor>& places, Tensor& holder) {
  if (!places) return nullptr;
  holder = torch::stable::contiguous(*places);
  return data<const int64_t>(holder);
}

// Losses (B, P) of positions, or what they are reduced to, and their gradient. The negatives of all
// are ``rows`` (K, P, D), or those of the class ``own`` (B,), where ``segments`` (K,) says which
// class a row is of, or of all ``others``; ``own_too``: each sample's own teacher is among them.
std::vector<Tensor> cos_nce(const Tensor& student, const Tensor& teacher, const Tensor& rows,
                            const Mask& mask, const Mask& rows_mask,
                            const std::optional<Tensor>& own, const std::optional<Tensor>& segments,
                            int64_t classes, bool others, bool own_too,
                            const std::string& reduction, bool gradient) {
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize, kAnySize});
  check(teacher, "teacher", type, {student.size(0), student.size(1), student.size(2)});
  check(rows, "rows", type, {kAnySize, student.size(1), student.size(2)});
  check(mask, "mask", ScalarType::Bool, {student.size(0), student.size(1)});
  check(rows_mask, "rows_mask", ScalarType::Bool, {rows.size(0), rows.size(1)});
  check_places(own, "own", student.size(0), classes);
  check_places(segments, "segments", rows.size(0), classes);
  const Positions z = positions_of(student), t = positions_of(teacher);
  const int64_t B = z.samples, P = z.positions, D = z.D;
  Tensor holders[4];
  const bool *real = bytes_of(mask, holders[0]), *rows_real = bytes_of(rows_mask, holders[1]);
  const int64_t *place = places_of(own, holders[2]), *segment = places_of(segments, holders[3]);
  const Negatives negatives{positions_of(rows), rows_real, segment, classes, others};
  const std::vector<int64_t> found = negatives.counts();
  const auto count = [&](int64_t b, int64_t p) {
    return real && !real[b * P + p] ? 0 : found[(place ? place[b] : 0) * P + p] - own_too;
  };
  std::vector<double> losses(B * P);
  int64_t compared = 0;
  for (int64_t i = 0; i < B * P; ++i) compared += count(i / P, i % P) > 0;
  const double weight = 1 / divisor_of(reduction, compared);
  Positions dz{};
  std::vector<Tensor> results{new_losses(student, reduction, {B, P})};
  if (gradient) {
    results.push_back(new_large(student, {B, P, D}, gradient_type(student)));
    dz = positions_of(results.back());
  }
  const auto visit = [&](int64_t p, const Rows& sums, int64_t begin, int64_t end) {
    Angles angles(D);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t n = count(b, p), ahead = b + z.ahead();
      const Rows to = dz.row_if_any(b, p);
      if (n > 0) {
        const double w = 0.5 / double(n), v = own_too ? w + 1.5 : 1.5;
        const Rows s = sums.only(place ? place[b] : 0);
        const Rows next = ahead < end ? z.row(ahead, p)
                                      : negatives.rows.row_if_any(ahead - end, p + 1);
        const double pull = angles.pull(z.row(b, p), t.row(b, p), s, w, v, weight, to,
                                        next, ahead < end ? dz.row_if_any(ahead, p) : Rows{});
        losses[b * P + p] = (2 + pull) * weight;
      } else if (gradient) {
        std::fill_n(to.data, D * size_of(to.type), 0);
      }
    }
  };
  const int64_t bytes = 3 * D * student.element_size();
  each_row(P, B * bytes, [&](int64_t begin, int64_t end) {
    const Type type = z.type == Type::kDouble ? Type::kDouble : Type::kFloat;
    std::vector<char> memory(classes * D * size_of(type));
    const Rows sums{memory.data(), D, D, type};
    for (int64_t p = begin; p < end; ++p) {
      negatives.add_directions(p, sums, z);
      if (P > 1) {
        visit(p, sums, 0, B);
      } else {  // the threads share the samples
        each_row(B, bytes, [&](int64_t from, int64_t to) { visit(p, sums, from, to); });
      }
    }
  });
  put_losses(losses, results[0]);
  return results;
}

// One layer's share of ``layers``, of the losses (B,) of the samples or of what they are reduced to,
// and its gradient.
std::vector<Tensor> attention(const Tensor& student, const Tensor& teacher, const Mask& mask,
                              bool mean, int64_t layers, const std::string& reduction,
                              bool gradient) {
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize, kAnySize, kAnySize}, Strides::kContiguous);
  const int64_t B = student.size(0), H = student.size(1), N = student.size(3);
  check(student, "student", type, {B, H, N, N}, Strides::kAny);
  check(teacher, "teacher", type, {B, mean ? kAnySize : H, N, N}, Strides::kContiguous);
  check(mask, "mask", ScalarType::Bool, {B, N});
  const auto rows = [=](const Tensor& x) { return Rows{data<char>(x), N, N, type_of(x)}; };
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const AttentionMaps of{rows(student), rows(teacher), H, teacher.size(1), N, mean, real};
  std::vector<Tensor> results{new_losses(student, reduction, {B})};
  if (gradient) {
    results.push_back(new_large(student, {B, H, N, N}, gradient_type(student)));
  }
  const Rows dx = gradient ? rows(results.back()) : Rows{};
  std::vector<double> weights(B);  // of a sample's sum over all heads
  int64_t compared = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = real ? std::count(real + b * N, real + (b + 1) * N, true) : N;
    const double side = double(std::max<int64_t>(n, 1));
    weights[b] = 1 / (side * side * double(layers));
    compared += !real || n > 0;
  }
  const double divisor = divisor_of(reduction, compared);
  const int64_t groups = of.groups();
  std::vector<double> maps(B * groups), losses(B);
  each_row(B * groups, 3 * N * N * student.element_size(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double weight = weights[i / groups] / divisor;
      maps[i] = weight / double(groups) *
                of.compare(i / groups, i % groups, 2 * weight / double(H), dx);
    }
  });
  for (int64_t i = 0; i < B * groups; ++i) losses[i / groups] += maps[i];
  put_losses(losses, results[0]);
  return results;
}

// Losses (N,), over ``count`` if given, or their sum, and its gradient. Labels are int64 or float64,
// those of the bank (M,); ``low`` and ``high`` (N,).
std::vector<Tensor> knn(const Tensor& student, const Tensor& teacher, const Tensor& low,
                        const std::optional<Tensor>& high, const Tensor& labels,
                        const std::optional<Tensor>& count, int64_t k, int64_t ignore_index,
                        const std::string& reduction, bool gradient) {
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize});
  const int64_t N = student.size(0), D = student.size(1);
  check(teacher, "teacher", type, {kAnySize, D});
  const int64_t M = teacher.size(0);
  const bool wide = labels.scalar_type() == ScalarType::Double;
  const ScalarType label = wide ? ScalarType::Double : ScalarType::Long;
  check(labels, "labels", label, {M}, Strides::kAny);
  check(low, "low", label, {N}, Strides::kAny);
  check(high, "high", label, {N});
  check_numbers(count, "count");
  std::vector<Tensor> results{new_losses(student, reduction, {N})};
  if (gradient) results.push_back(new_large(student, {N, D}, gradient_type(student)));
  const Rows dx = gradient ? rows_of(results.back()) : Rows{};
  std::vector<double> losses(N);
  Neighbours of{rows_of(student), rows_of(teacher), N, M};
  const Tensor lows = torch::stable::contiguous(low), bank = torch::stable::contiguous(labels);
  const Tensor highs = high ? torch::stable::contiguous(*high) : lows;
  of.group(data<const int64_t>(lows), data<const int64_t>(highs));
  // A bank's label lies between the bounds of a row, and is not the one ignored.
  const auto fill = [&](auto ignored) {
    using T = decltype(ignored);
    const T *lowest = data<T>(lows), *highest = data<T>(highs), *label = data<T>(bank);
    each_row(of.groups.size(), M * 8, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t i = of.groups[g].students[0];
        for (int64_t j = 0; j < M; ++j) {
          const bool is_same = label[j] >= lowest[i] && label[j] <= highest[i];
          if (is_same && label[j] != ignored) of.groups[g].bank.push_back(j);
        }
      }
    });
  };
  if (wide) {
    fill(double(ignore_index));
  } else {
    fill(ignore_index);
  }
  const std::vector<Neighbours::Tile> tiles = of.tiles();
  const int64_t depth = std::min(D, +Neighbours::kRange);
  each_row(tiles.size(), N * depth * 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) of.measure(tiles[i]);
  });
  const double divisor = count ? std::max(value_of(*count), 1.0) : 1;
  each_row(N, M * 64 + 4 * D, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) losses[i] = of.row(i, k, 1 / divisor, dx);
  });
  put_losses(losses, results[0]);
  return results;
}

// The relations of groups of N rows: of tokens in their order, or turned round, of samples.
struct Groups {
  Positions student, teacher;  // (groups, N, D)
  std::unique_ptr<bool[]> real;
  std::vector<int64_t> counts;
  int64_t compared = 0;

  // Groups of fewer than two rows have nothing to compare.
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

// The relations of one group after the other, in memory of their own.
template <typename W>
class Relations {
 public:
  Relations(const Groups& of, double eps, const Positions* dx)
      : of_(of), eps_(eps), dx_(dx), N_(of.student.positions), units_(2 * N_) {
    for (const Positions* x : {&of.student, &of.teacher}) rows_.push_back(room_of<W>(x->D));
    const int64_t numbers = (N_ + 1) * (rows_[0] + rows_[1]) + 2 * N_ * N_;
    memory_.reset(new Line[numbers * sizeof(W) / sizeof(Line) + 1]);
  }

  // The loss of a group; share·∂/∂x is put into ``dx``, or added to it.
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
    // The first block has most to do and the last least: a pair of them is as long as any other.
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
  std::vector<int64_t> rows_;  // the room of each side's
  std::vector<UnitRow> units_;
  RelationSide<W> sides_[2];
  std::unique_ptr<Line[]> memory_;
};

// Σ weight·loss of the groups; its gradient is put into ``dx`` (groups, N, D), or added to it.
template <typename W>
double relations_of(const Groups& of, double weight, double eps, bool add, const Positions* dx) {
  const int64_t groups = of.student.samples, N = of.student.positions;
  const int64_t threads = torch::stable::get_num_threads();
  const double share = weight / double(std::max<int64_t>(of.compared, 1));
  std::vector<double> losses(groups);
  const auto run = [&](int64_t begin, int64_t end) {
    Relations<W> relations(of, eps, dx);
    for (int64_t g = begin; g < end; ++g) losses[g] = share * relations(g, share, add);
  };
  // Threads have groups of their own, or share each, where some would have more than others.
  if (groups % threads == 0 || groups >= 4 * threads) {
    each_row(groups, N * (of.student.D + of.teacher.D) * int64_t(sizeof(W)), run);
  } else {
    run(0, groups);
  }
  return total(losses);
}

// weight·loss of the relations between tokens, (B, N, D), and between samples, (2); and the gradient
// of their sum.
std::vector<Tensor> relation_terms(const Tensor& student, const Tensor& teacher, const Mask& mask,
                                   double tokens, double samples, double eps, bool gradient) {
  const ScalarType own = check_floating(student, "student");
  check(student, "student", own, {kAnySize, kAnySize, kAnySize});
  check(teacher, "teacher", own, {student.size(0), student.size(1), kAnySize});
  check(mask, "mask", ScalarType::Bool, {student.size(0), student.size(1)});
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
    terms.put(of_samples, type == ScalarType::Double
                              ? relations_of<double>(groups, weight, eps, add, to)
                              : relations_of<float>(groups, weight, eps, add, to));
    add = true;
  }
  if (gradient && !add) torch::stable::zero_(results.back());
  return results;
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY(fastkd_cpp, m) {
  m.def(
      "layer_norm_mse(Tensor x, Tensor y, float eps, SymInt divisor, bool needs_dx, bool needs_dy)"
      " -> Tensor[]");
  m.def(
      "soft_target_loss(Tensor student, Tensor teacher, Tensor? mask, Tensor? denominator,"
      " str divergence, float temperature, float scale, str reduction, bool gradient) -> Tensor[]");
  m.def(
      "soft_target_rows(Tensor(a!) student, Tensor teacher, Tensor? mask, Tensor? weights,"
      " str divergence, float temperature, float scale) -> Tensor");
  m.def(
      "cos_nce(Tensor student, Tensor teacher, Tensor rows, Tensor? mask, Tensor? rows_mask,"
      " Tensor? own, Tensor? segments, SymInt classes, bool others, bool own_too, str reduction,"
      " bool gradient) -> Tensor[]");
  m.def(
      "attention(Tensor student, Tensor teacher, Tensor? mask, bool mean, int layers,"
      " str reduction, bool gradient) -> Tensor[]");
  m.def(
      "knn(Tensor student, Tensor teacher, Tensor low, Tensor? high, Tensor labels, Tensor? count,"
      " SymInt k, int ignore_index, str reduction, bool gradient) -> Tensor[]");
  m.def(
      "relation_terms(Tensor student, Tensor teacher, Tensor? mask, float tokens, float samples,"
      " float eps, bool gradient) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("layer_norm_mse", TORCH_BOX(&fastkd::layer_norm_mse));
  m.impl("soft_target_loss", TORCH_BOX(&fastkd::soft_target_loss));
  m.impl("soft_target_rows", TORCH_BOX(&fastkd::soft_target_rows));
  m.impl("cos_nce", TORCH_BOX(&fastkd::cos_nce));
  m.impl("attention", TORCH_BOX(&fastkd::attention));
  m.impl("knn", TORCH_BOX(&fastkd::knn));
  m.impl("relation_terms", TORCH_BOX(&fastkd::relation_terms));
}
