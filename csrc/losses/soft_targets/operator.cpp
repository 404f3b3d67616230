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

// Options that few calls have: the teacher's rows (R,) of the student's, terms (kTerms, R) to
// compute, with labels (R,), and the match of two vocabularies.
struct RowOptions {
  std::optional<Tensor> teacher_rows, labels, terms, teacher_of;
  std::string unmatched;
};

// Losses (R,) of logits (R, V), with a teacher of logits (R, V), or (T, V) with rows of it, or of
// log-probabilities (R, k) of the tokens ``ids`` (R, k). Gradients times ``weights`` are stored in
// ``gradient``, unless it is null.
std::vector<double> soft_targets(const Tensor& student, const Tensor& teacher,
                                 const std::optional<Tensor>& ids, bool bucket, const Mask& mask,
                                 const std::string& divergence, double temperature, double scale,
                                 double coefficient, const Rows& gradient, const Rows& weights,
                                 const std::optional<Tensor>& log_mass = {},
                                 const RowOptions& options = {}) {
  const int64_t R = student.size(0), V = student.size(1);
  Tensor tokens, labels, teacher_rows;
  if (ids) {
    check(teacher, "teacher", check_floating(teacher, "teacher"), {R, kAnySize});
    check(*ids, "ids", ScalarType::Long, {R, teacher.size(1)}, Strides::kAny);
    tokens = checked_ids(*ids, V);
    STD_TORCH_CHECK(!options.terms && !options.teacher_rows, "a top k has no rows and no terms");
  } else {
    const int64_t rows = options.teacher_rows ? kAnySize : R;
    check(teacher, "teacher", student.scalar_type(), {rows, options.teacher_of ? kAnySize : V});
  }
  Match match;
  if (options.teacher_of) {
    STD_TORCH_CHECK(!ids && !log_mass && !options.terms,
                    "teacher_of: two vocabularies have no top k, no mass and no terms");
    match = match_of(*options.teacher_of, V, teacher.size(1), options.unmatched);
  }
  check(mask, "mask", ScalarType::Bool, {R});
  check_places(options.teacher_rows, "teacher_rows", R, teacher.size(0));
  check_places(options.labels, "labels", R, V);
  if (options.labels) labels = torch::stable::contiguous(*options.labels);
  if (options.teacher_rows) teacher_rows = torch::stable::contiguous(*options.teacher_rows);
  std::vector<double> terms;
  if (options.terms) {
    check(*options.terms, "terms", working_type(student), {kTerms, R}, Strides::kWritten);
    terms.resize(R * kTerms);
  }
  const SoftTargets of{rows_of(student), rows_of(teacher), divergence_of(divergence), coefficient,
                       1 / temperature,  scale,            gradient,
                       ids ? data<const int64_t>(tokens) : nullptr, bucket,
                       log_mass ? numbers_of(*log_mass) : Rows{},
                       options.teacher_rows ? data<const int64_t>(teacher_rows) : nullptr,
                       options.labels ? data<const int64_t>(labels) : nullptr,
                       options.terms ? terms.data() : nullptr,
                       options.teacher_of ? &match : nullptr};
  std::vector<double> losses(R);
  Tensor holder;
  const bool* real = bytes_of(mask, holder);
  const int64_t bytes = 3 * of.student.n * student.element_size();
  each_row(losses.size(), bytes, [&](int64_t begin, int64_t end) {
    of.fill(begin, end, real, weights, losses.data());
  });
  for (int k = 0; options.terms && k < kTerms; ++k) {
    const Rows numbers = numbers_of(torch::stable::select(*options.terms, 0, k));
    for (int64_t i = 0; i < R; ++i) numbers.put(i, terms[i * kTerms + k]);
  }
  return losses;
}

Tensor vector_of(const std::vector<double>& numbers, const Tensor& like) {
  const Tensor result =
      torch::stable::new_empty(like, {int64_t(numbers.size())}, working_type(like));
  for (size_t i = 0; i < numbers.size(); ++i) numbers_of(result).put(i, numbers[i]);
  return result;
}

// The loss, () or with reduction "none" (R,), and if requested the student's gradient (R, V). Each
// row's loss is multiplied by its weight, which is finite where the mask is false.
std::vector<Tensor> soft_target_loss(const Tensor& student, const Tensor& teacher,
                                     const std::optional<Tensor>& ids, const Mask& mask,
                                     const std::optional<Tensor>& denominator,
                                     const std::optional<Tensor>& weights,
                                     const std::string& divergence, double temperature,
                                     double scale, double coefficient, bool bucket,
                                     const std::optional<Tensor>& teacher_of,
                                     const std::string& unmatched, const std::string& reduction,
                                     bool gradient) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize});
  check_numbers(denominator, "denominator");
  check_numbers(weights, "weights", student.size(0));
  double divisor = 1;
  if (denominator) {
    divisor = value_of(*denominator);
  } else if (reduction == "batchmean") {
    Tensor holder;
    const bool* real = bytes_of(mask, holder);
    const int64_t R = student.size(0);
    divisor = double(std::max<int64_t>(1, real ? std::count(real, real + R, true) : R));
  }
  std::vector<double> factors(weights ? student.size(0) : 1, 1);
  for (size_t i = 0; weights && i < factors.size(); ++i) factors[i] = numbers_of(*weights).get(i);
  std::vector<double> slopes = factors;  // of the reduced loss, by row
  for (double& slope : slopes) slope /= divisor;
  const Rows given{reinterpret_cast<char*>(slopes.data()), weights ? 1 : 0, 1, Type::kDouble};
  const Tensor dstudent =
      new_large(student, {gradient ? student.size(0) : 0, student.size(1)}, working_type(student));
  std::vector<double> losses =
      soft_targets(student, teacher, ids, bucket, mask, divergence, temperature, scale, coefficient,
                   gradient ? rows_of(dstudent) : Rows{}, given, {},
                   {{}, {}, {}, teacher_of, unmatched});
  for (size_t i = 0; weights && i < losses.size(); ++i) losses[i] *= factors[i];
  std::vector<Tensor> results{reduction == "none" ? vector_of(losses, student)
                                                  : scalar(total(losses) / divisor, student)};
  if (gradient) results.push_back(dstudent);
  return results;
}

// Losses (R,). With weights (R,) the gradient of Σ weight·loss overwrites the student's logits. With
// log_mass (R,) the teacher has more tokens, and these have that part of its probability. With
// ``teacher_rows`` (R,) the teacher's logits are (T, V). Terms (kTerms, R) are written if given. With
// ``teacher_of`` the teacher has another vocabulary; see `match_of`.
Tensor soft_target_rows(const Tensor& student, const Tensor& teacher,
                        const std::optional<Tensor>& ids, const Mask& mask,
                        const std::optional<Tensor>& weights, const std::string& divergence,
                        double temperature, double scale, double coefficient, bool bucket,
                        const std::optional<Tensor>& log_mass,
                        const std::optional<Tensor>& teacher_rows,
                        const std::optional<Tensor>& labels, const std::optional<Tensor>& terms,
                        const std::optional<Tensor>& teacher_of, const std::string& unmatched) {
  check(student, "student", check_floating(student, "student"), {kAnySize, kAnySize},
        weights ? Strides::kWritten : Strides::kRows);
  check_numbers(weights, "weights", student.size(0));
  check_numbers(log_mass, "log_mass", student.size(0));
  const Rows gradient = weights ? rows_of(student) : Rows{};
  const Rows given = weights ? numbers_of(*weights) : Rows{};
  return vector_of(soft_targets(student, teacher, ids, bucket, mask, divergence, temperature, scale,
                                coefficient, gradient, given, log_mass,
                                {teacher_rows, labels, terms, teacher_of, unmatched}),
                   student);
}

// log Σ exp(z/τ) (R,) of logits (R, V).
Tensor log_totals_of_rows(const Tensor& logits, double temperature) {
  check(logits, "logits", check_floating(logits, "logits"), {kAnySize, kAnySize});
  std::vector<double> totals(logits.size(0));
  const int64_t bytes = logits.size(1) * logits.element_size();
  each_row(logits.size(0), bytes, [&](int64_t begin, int64_t end) {
    log_totals(rows_of(logits), 1 / temperature, begin, end, totals.data());
  });
  return vector_of(totals, logits);
}

}  // namespace
}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) {
  m.def("log_totals(Tensor logits, float temperature) -> Tensor");
  m.def("is_top_k(Tensor ids, Tensor log_probs, Tensor? mask, int V, float most) -> bool");
  m.def(
      "soft_target_loss(Tensor student, Tensor teacher, Tensor? ids, Tensor? mask,"
      " Tensor? denominator, Tensor? weights, str divergence, float temperature, float scale,"
      " float coefficient, bool bucket, Tensor? teacher_of, str unmatched, str reduction,"
      " bool gradient) -> Tensor[]");
  m.def(
      "soft_target_rows(Tensor(a!) student, Tensor teacher, Tensor? ids, Tensor? mask,"
      " Tensor? weights, str divergence, float temperature, float scale, float coefficient,"
      " bool bucket, Tensor? log_mass=None, Tensor? teacher_rows=None, Tensor? labels=None,"
      " Tensor(b!)? terms=None, Tensor? teacher_of=None, str unmatched='') -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("log_totals", TORCH_BOX(&fastkd::log_totals_of_rows));
  m.impl("is_top_k", TORCH_BOX(&fastkd::is_top_k));
  m.impl("soft_target_loss", TORCH_BOX(&fastkd::soft_target_loss));
  m.impl("soft_target_rows", TORCH_BOX(&fastkd::soft_target_rows));
}
