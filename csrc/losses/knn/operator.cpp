// Operator of the nearest-neighbour loss.
#include <algorithm>

#include "losses/knn/knn.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// The loss, () or with reduction "none" (N,), divided by ``count`` if given; if requested the
// student's gradient (N, D). A row's loss is multiplied by its weight. ``labels`` (M,) of the bank, and the bounds ``low`` and ``high`` (N,)
// of a student row's label, are int64 or float64. Without ``high`` it equals ``low``.
std::vector<Tensor> knn(const Tensor& student, const Tensor& teacher, const Tensor& low,
                        const std::optional<Tensor>& high, const Tensor& labels,
                        const std::optional<Tensor>& count,
                        const std::optional<Tensor>& weights, int64_t k, int64_t ignore_index,
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
  check_numbers(weights, "weights", N);
  std::vector<Tensor> results{new_losses(student, reduction, {N})};
  if (gradient) results.push_back(new_large(student, {N, D}, gradient_type(student)));
  const Rows dx = gradient ? rows_of(results.back()) : Rows{};
  std::vector<double> losses(N);
  Neighbours of{rows_of(student), rows_of(teacher), N, M};
  const Tensor lows = torch::stable::contiguous(low), bank = torch::stable::contiguous(labels);
  const Tensor highs = high ? torch::stable::contiguous(*high) : lows;
  of.group(data<const int64_t>(lows), data<const int64_t>(highs));
  // A bank row belongs to a group if its label lies within the bounds and is not ``ignore_index``.
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
    for (int64_t i = begin; i < end; ++i) {
      const double weight = weights ? numbers_of(*weights).get(i) : 1;
      losses[i] = of.row(i, k, weight / divisor, dx);
    }
  });
  put_losses(losses, results[0]);
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(knn,
    "(Tensor student, Tensor teacher, Tensor low, Tensor? high, Tensor labels, Tensor? count,"
    " Tensor? weights, *, SymInt k, int ignore_index, str reduction,"
    " bool gradient) -> Tensor[]")
