// Operators of soft targets from logits.
#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "losses/soft_targets/soft_targets.h"
#include "losses/operators.h"

namespace fastkd {
namespace {

// Contiguous token ids (R, k), each below V.
Tensor checked_ids(const Tensor& ids, int64_t V) {
  const Tensor tokens = torch::stable::contiguous(ids);
  const int64_t* begin = data<int64_t>(tokens);
  for (const int64_t* id = begin; id < begin + tokens.numel(); ++id) {
    STD_TORCH_CHECK(*id >= 0 && *id < V, "ids: ", *id, " is not one of the ", V, " tokens");
  }
  return tokens;
}

// Whether ids (R, k) are below V, no row has one twice, and log-probabilities (R, k) are at most
// ``most``. Entries of −inf and rows that the mask leaves out are not looked at.
bool is_top_k(const Tensor& ids, const Tensor& log_probs, const Mask& mask, int64_t V,
              double most) {
  check(log_probs, "log_probs", check_floating(log_probs, "log_probs"), {kAnySize, kAnySize});
  const int64_t R = log_probs.size(0), k = log_probs.size(1);
  check(ids, "ids", ScalarType::Long, {R, k}, Strides::kAny);
  check(mask, "mask", ScalarType::Bool, {R});
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const Tensor tokens = torch::stable::contiguous(ids);
  const int64_t* token = data<const int64_t>(tokens);
  const Rows rows = rows_of(log_probs);
  std::vector<double> copy(k);
  std::vector<int64_t> seen(V, -1);  // the last row that had a token
  for (int64_t i = 0; i < R; ++i, token += k) {
    if (real && !real[i]) continue;
    const double* logs = rows.read(i, 0, k, copy.data());
    for (int64_t j = 0; j < k; ++j) {
      if (logs[j] == -std::numeric_limits<double>::infinity()) continue;
      if (logs[j] > most || token[j] < 0 || token[j] >= V) return false;
      if (std::exchange(seen[token[j]], i) == i) return false;
    }
  }
  return true;
}

Divergence divergence_of(const std::string& name) {
  static const std::map<std::string, Divergence> kinds{
      {"forward_kl", Divergence::kForwardKl},
      {"reverse_kl", Divergence::kReverseKl},
      {"js", Divergence::kJs},
      {"adaptive_kl", Divergence::kAdaptiveKl},
      {"mixed", Divergence::kMixed},
      {"generalized_js", Divergence::kGeneralizedJs},
      {"skew_kl", Divergence::kSkewKl},
      {"skew_reverse_kl", Divergence::kSkewReverseKl},
      {"total_variation", Divergence::kTotalVariation},
      {"negative_log_acceptance", Divergence::kNegativeLogAcceptance},
      {"lk", Divergence::kLk},
  };
  const auto found = kinds.find(name);
  STD_TORCH_CHECK(found != kinds.end(), "divergence: ", name, " is not one of them");
  return found->second;
}

// The match of two vocabularies, of which ``teacher_of`` has the teacher's token of each of the
// student's, -1 where it has none.
Match match_of(const Tensor& teacher_of, int64_t student, int64_t teacher,
               const std::string& unmatched) {
  check(teacher_of, "teacher_of", ScalarType::Long, {student}, Strides::kContiguous);
  STD_TORCH_CHECK(std::max(student, teacher) <= std::numeric_limits<int32_t>::max(),
                  "teacher_of: a vocabulary has more than 2^31 tokens");
  const bool sorts = unmatched == "sorted";
  STD_TORCH_CHECK(sorts || unmatched == "bucket" || unmatched == "renormalise",
                  "unmatched: ", unmatched, " is not one of them");
  const bool sums = sorts || unmatched == "bucket";
  Match match{sorts  ? Unmatched::kSorted
              : sums ? Unmatched::kBucket
                     : Unmatched::kRenormalise};
  match.in_student.resize((student + kColumns - 1) / kColumns);
  match.in_teacher.resize((teacher + kColumns - 1) / kColumns);
  const int64_t* ids = data<const int64_t>(teacher_of);
  match.teacher.resize(student + Match::kPadding);
  int32_t* next = match.teacher.data();
  uint32_t twice = 0, word = 0;
  for (int64_t i = 0; i < student; ++i) {
    if (i % Match::kBlock == 0) match.starts.push_back(next - match.teacher.data());
    STD_TORCH_CHECK(ids[i] >= -1 && ids[i] < teacher, "teacher_of: ", ids[i],
                    " is not one of the ", teacher, " tokens");
    // Without a branch, which would often be mispredicted.
    const uint32_t has = ids[i] >= 0, id = uint32_t(std::max<int64_t>(ids[i], 0));
    const uint32_t bit = has << id % kColumns;
    uint16_t& seen = match.in_teacher[id / kColumns];
    twice |= seen & bit, seen |= bit, word |= has << i % kColumns;
    *next = int32_t(id), next += has;
    if (i % kColumns == kColumns - 1 || i == student - 1) {
      match.in_student[i / kColumns] = uint16_t(std::exchange(word, 0));
    }
  }
  STD_TORCH_CHECK(twice == 0, "teacher_of: a token is there twice");
  match.starts.push_back(next - match.teacher.data());
  match.teacher.resize(match.starts.back() + Match::kPadding);
  STD_TORCH_CHECK(sums || match.starts.back() > 0, "teacher_of: no token has a match");
  return match;
}

Tensor vector_of(const std::vector<double>& numbers, const Tensor& like) {
  const Tensor result =
      torch::stable::new_empty(like, {int64_t(numbers.size())}, working_type(like));
  for (size_t i = 0; i < numbers.size(); ++i) numbers_of(result).put(i, numbers[i]);
  return result;
}

// Arguments shared by the three operators: logits (R, V), and the divergence.
SoftTargets divergence_from(const Tensor& student, const std::string& divergence,
                            double temperature, double scale, double coefficient) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize});
  SoftTargets targets{};
  targets.student = rows_of(student), targets.divergence = divergence_of(divergence);
  targets.coefficient = coefficient, targets.slope = 1 / temperature, targets.scale = scale;
  return targets;
}

// Losses (R,), 0 where the mask is false, or Σ weight·loss / divisor: the denominator, for
// "batchmean" without one the number of real rows, else 1. The gradient of that sum is stored in
// ``gradient`` (R, V), which may be the student's logits. Weights (R,) are finite where the mask is
// false, and 1 if they are missing.
Tensor losses_of(SoftTargets targets, const Tensor& student, const std::optional<Tensor>& gradient,
                 const Mask& mask, const std::optional<Tensor>& weights,
                 const std::string& reduction, const std::optional<Tensor>& denominator) {
  const int64_t R = student.size(0), V = student.size(1);
  check(mask, "mask", ScalarType::Bool, {R});
  check_numbers(weights, "weights", R);
  check_numbers(denominator, "denominator");
  if (gradient) {
    check(*gradient, "gradient", working_type(student), {R, V}, Strides::kWritten);
    targets.gradient = rows_of(*gradient);
  }
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  double divisor = 1;
  if (denominator) {
    divisor = value_of(*denominator);
  } else if (reduction == "batchmean") {
    divisor = double(std::max<int64_t>(1, real ? std::count(real, real + R, true) : R));
  }
  std::vector<double> losses(R), factors(weights ? R : 1, 1 / divisor);
  for (int64_t i = 0; weights && i < R; ++i) factors[i] = numbers_of(*weights).get(i) / divisor;
  const int64_t step = weights ? 1 : 0;
  const Rows of_rows{reinterpret_cast<char*>(factors.data()), step, 1, Type::kDouble};
  each_row(R, 3 * V * student.element_size(), [&](int64_t begin, int64_t end) {
    targets.fill(begin, end, real, of_rows, losses.data());
  });
  if (reduction == "none") return vector_of(losses, student);
  for (int64_t i = 0; i < R; ++i) losses[i] *= factors[i * step];
  return scalar(total(losses), student);
}

// Losses with a teacher of logits (R, V), or (T, V) of which ``teacher_rows`` (R,) has the rows. With
// log_mass (R,) the teacher has more tokens, and these have that part of its probability. Terms
// (kTerms, R), with labels (R,), are written if given.
Tensor soft_targets(const Tensor& student, const Tensor& teacher,
                    const std::optional<Tensor>& gradient, const Mask& mask,
                    const std::optional<Tensor>& weights, const std::string& divergence,
                    double temperature, double scale, double coefficient,
                    const std::string& reduction, const std::optional<Tensor>& denominator,
                    const std::optional<Tensor>& log_mass,
                    const std::optional<Tensor>& teacher_rows,
                    const std::optional<Tensor>& labels, const std::optional<Tensor>& terms) {
  SoftTargets targets = divergence_from(student, divergence, temperature, scale, coefficient);
  const int64_t R = student.size(0), V = student.size(1);
  check(teacher, "teacher", student.scalar_type(), {teacher_rows ? kAnySize : R, V});
  check_numbers(log_mass, "log_mass", R);
  Tensor rows, classes;
  targets.teacher = rows_of(teacher);
  targets.teacher_rows = places_of(teacher_rows, "teacher_rows", R, teacher.size(0), rows);
  targets.labels = places_of(labels, "labels", R, V, classes);
  if (log_mass) targets.log_masses = numbers_of(*log_mass);
  std::vector<double> numbers;
  if (terms) {
    check(*terms, "terms", working_type(student), {kTerms, R}, Strides::kWritten);
    numbers.resize(R * kTerms);
    targets.terms = numbers.data();
  }
  const Tensor losses = losses_of(targets, student, gradient, mask, weights, reduction, denominator);
  for (int k = 0; terms && k < kTerms; ++k) {
    const Rows term = numbers_of(torch::stable::select(*terms, 0, k));
    for (int64_t i = 0; i < R; ++i) term.put(i, numbers[i * kTerms + k]);
  }
  return losses;
}

// Losses with a teacher of log-probabilities (R, k) of the tokens ``ids`` (R, k).
Tensor top_k_soft_targets(const Tensor& student, const Tensor& ids, const Tensor& log_probs,
                          const std::optional<Tensor>& gradient, const Mask& mask,
                          const std::optional<Tensor>& weights, bool bucket,
                          const std::string& divergence, double temperature, double scale,
                          double coefficient, const std::string& reduction,
                          const std::optional<Tensor>& denominator) {
  SoftTargets targets = divergence_from(student, divergence, temperature, scale, coefficient);
  const int64_t R = student.size(0), V = student.size(1);
  check(log_probs, "log_probs", check_floating(log_probs, "log_probs"), {R, kAnySize});
  check(ids, "ids", ScalarType::Long, {R, log_probs.size(1)}, Strides::kAny);
  const Tensor tokens = checked_ids(ids, V);
  targets.teacher = rows_of(log_probs), targets.bucket = bucket;
  targets.ids = data<const int64_t>(tokens);
  return losses_of(targets, student, gradient, mask, weights, reduction, denominator);
}

// Losses with a teacher of another vocabulary, see `match_of`: logits (R, V'), or (T, V') of which
// ``teacher_rows`` (R,) has the rows.
Tensor matched_soft_targets(const Tensor& student, const Tensor& teacher, const Tensor& teacher_of,
                            const std::optional<Tensor>& gradient, const Mask& mask,
                            const std::optional<Tensor>& weights, const std::string& unmatched,
                            const std::string& divergence, double temperature, double scale,
                            double coefficient, const std::string& reduction,
                            const std::optional<Tensor>& denominator,
                            const std::optional<Tensor>& teacher_rows) {
  SoftTargets targets = divergence_from(student, divergence, temperature, scale, coefficient);
  const int64_t R = student.size(0), V = student.size(1);
  check(teacher, "teacher", student.scalar_type(), {teacher_rows ? kAnySize : R, kAnySize});
  const Match match = match_of(teacher_of, V, teacher.size(1), unmatched);
  Tensor rows;
  targets.teacher = rows_of(teacher), targets.match = &match;
  targets.teacher_rows = places_of(teacher_rows, "teacher_rows", R, teacher.size(0), rows);
  return losses_of(targets, student, gradient, mask, weights, reduction, denominator);
}

// log Σ exp(z/τ) (R,) of logits (R, V).
Tensor log_totals(const Tensor& logits, double temperature) {
  check(logits, "logits", check_floating(logits, "logits"), {kAnySize, kAnySize});
  std::vector<double> totals(logits.size(0));
  const int64_t bytes = logits.size(1) * logits.element_size();
  each_row(logits.size(0), bytes, [&](int64_t begin, int64_t end) {
    log_row_totals(rows_of(logits), 1 / temperature, begin, end, totals.data());
  });
  return vector_of(totals, logits);
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(log_totals, "(Tensor logits, float temperature) -> Tensor")
FASTKD_OPERATOR(is_top_k,
    "(Tensor ids, Tensor log_probs, Tensor? mask, int V, float most) -> bool")
FASTKD_OPERATOR(soft_targets,
    "(Tensor student, Tensor teacher, Tensor(a!)? gradient, Tensor? mask, Tensor? weights, *,"
    " str divergence, float temperature, float scale, float coefficient, str reduction='none',"
    " Tensor? denominator=None, Tensor? log_mass=None, Tensor? teacher_rows=None,"
    " Tensor? labels=None, Tensor(b!)? terms=None) -> Tensor")
FASTKD_OPERATOR(top_k_soft_targets,
    "(Tensor student, Tensor ids, Tensor log_probs, Tensor(a!)? gradient, Tensor? mask,"
    " Tensor? weights, *, bool bucket, str divergence, float temperature, float scale,"
    " float coefficient, str reduction='none', Tensor? denominator=None) -> Tensor")
FASTKD_OPERATOR(matched_soft_targets,
    "(Tensor student, Tensor teacher, Tensor teacher_of, Tensor(a!)? gradient, Tensor? mask,"
    " Tensor? weights, *, str unmatched, str divergence, float temperature, float scale,"
    " float coefficient, str reduction='none', Tensor? denominator=None,"
    " Tensor? teacher_rows=None) -> Tensor")
