// Operator of COS-NCE.
#include <algorithm>

#include "losses/cos_nce/cos_nce.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// The loss, () or with reduction "none" (B, P), and if requested the student's gradient (B, P, D).
// ``weights`` (B·P,) are factors of the positions' losses.
// A sample's negatives are all ``rows`` (K, P, D), or those of its class: ``own`` (B,) has the
// samples' classes, ``segments`` (K,) the rows'. With ``others`` they are the rows of all other
// classes. With ``own_too`` the rows include each sample's own teacher row, which is not a
// negative.
std::vector<Tensor> cos_nce(const Tensor& student, const Tensor& teacher, const Tensor& rows,
                            const Mask& mask, const Mask& rows_mask,
                            const std::optional<Tensor>& own, const std::optional<Tensor>& segments,
                            const std::optional<Tensor>& weights, int64_t classes, bool others, bool own_too,
                            const std::string& reduction, bool gradient) {
  const ScalarType type = check_floating(student, "student");
  check(student, "student", type, {kAnySize, kAnySize, kAnySize});
  check(teacher, "teacher", type, {student.size(0), student.size(1), student.size(2)});
  check(rows, "rows", type, {kAnySize, student.size(1), student.size(2)});
  check(mask, "mask", ScalarType::Bool, {student.size(0), student.size(1)});
  check(rows_mask, "rows_mask", ScalarType::Bool, {rows.size(0), rows.size(1)});
  check_numbers(weights, "weights", student.size(0) * student.size(1));
  const Positions z = positions_of(student), t = positions_of(teacher);
  const int64_t B = z.samples, P = z.positions, D = z.D;
  Tensor holders[4];
  const bool *real = bytes_of(mask, holders[0]), *rows_real = bytes_of(rows_mask, holders[1]);
  const int64_t* place = places_of(own, "own", B, classes, holders[2]);
  const int64_t* segment = places_of(segments, "segments", rows.size(0), classes, holders[3]);
  const Negatives negatives{positions_of(rows), rows_real, segment, classes, others};
  const std::vector<int64_t> found = negatives.counts();
  const auto count = [&](int64_t b, int64_t p) {
    return real && !real[b * P + p] ? 0 : found[(place ? place[b] : 0) * P + p] - own_too;
  };
  std::vector<double> losses(B * P);
  int64_t compared = 0;
  for (int64_t i = 0; i < B * P; ++i) compared += count(i / P, i % P) > 0;
  const double divisor = divisor_of(reduction, compared);
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
        const double weight = (weights ? numbers_of(*weights).get(b * P + p) : 1) / divisor;
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
      } else {  // threads share the samples
        each_row(B, bytes, [&](int64_t from, int64_t to) { visit(p, sums, from, to); });
      }
    }
  });
  put_losses(losses, results[0]);
  return results;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(cos_nce,
    "(Tensor student, Tensor teacher, Tensor rows, Tensor? mask, Tensor? rows_mask,"
    " Tensor? own, Tensor? segments, Tensor? weights, *, SymInt classes, bool others,"
    " bool own_too, str reduction, bool gradient) -> Tensor[]")
