// Operators of cross-entropy with labels: from logits, and from hidden states.
//
// A row of logits is visited once: its maximum, its exponentials and their sum, the gradient. After
// the first read it is in the cache. From hidden states the logits are written once, and their
// gradient overwrites them. That is one operator because for few rows the calls of its steps would
// cost more than the steps.
#include <array>
#include <cmath>

#include "base/tensors.h"

namespace fastkd {
namespace {

// Rows of float32 logits that exist at a time for bfloat16 states; fewer rows would read the head
// more often. LOGIT_ROWS in fastkd/lm/linear_soft_targets.py, which counts their bytes, is the
// same.
constexpr int64_t kLogitRows = 128;

struct CrossEntropy {
  double label_smoothing, z_loss;
  double factor = 1;  // of the gradient's weights
};

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "losses/cross_entropy/cross_entropy_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

int64_t bytes_of_row(const Tensor& x) { return 3 * x.size(1) * x.element_size(); }

// Stores the losses of rows, and the gradient times ``weights``, also as a ``copy`` of another
// type.
template <typename W>
void each_loss(const Tensor& student, const int64_t* labels, const Rows& weights,
               const std::optional<Tensor>& gradient, const Rows& copy, CrossEntropy of,
               const Rows& losses) {
  const int64_t n = student.size(1);
  each_row(student.size(0), bytes_of_row(student), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      W* dz = gradient ? data<W>(*gradient) + i * gradient->stride(0) : nullptr;
      const double weight = gradient ? of.factor * weights.get(i) : 0;
      const W* z = data<W>(student) + i * student.stride(0);
      losses.put(i, FASTKD_CALL(loss_of, z, n, labels[i], of, weight, dz));
      copy.written(i, 0, n, dz);
    }
  });
}

// Contiguous labels, each below V.
Tensor checked_labels(const Tensor& labels, int64_t V) {
  const Tensor places = torch::stable::contiguous(labels);
  for (int64_t i = 0; i < labels.size(0); ++i) {
    const int64_t label = data<int64_t>(places)[i];
    const bool is_token = label >= 0 && label < V;
    STD_TORCH_CHECK(is_token, "labels: ", label, " is not one of the ", V, " tokens");
  }
  return places;
}

// Losses (R,) of float32 or float64 logits (R, V) with labels (R,). Stores the gradient of Σ
// weight·loss in ``gradient`` (R, V), if there is one; weights () or (R,).
Tensor cross_entropy(const Tensor& student, const Tensor& labels,
                     const std::optional<Tensor>& gradient, const std::optional<Tensor>& weights,
                     double label_smoothing, double z_loss) {
  const int64_t R = student.dim() ? student.size(0) : 0;
  const ScalarType type = working_type(student);  // float32 or float64
  check(student, "student", type, {kAnySize, kAnySize});
  check(labels, "labels", ScalarType::Long, {R}, Strides::kAny);
  if (gradient) check(*gradient, "gradient", type, {R, student.size(1)}, Strides::kWritten);
  check_numbers(weights, "weights", R);
  STD_TORCH_CHECK(!gradient || weights, "a gradient needs the weights of its rows");
  const Tensor loss = torch::stable::new_empty(student, {R}, type);
  const Tensor places = checked_labels(labels, student.size(1));
  const Rows given = weights ? numbers_of(*weights) : Rows{};
  const bool wide = student.scalar_type() == ScalarType::Double;
  const auto run = wide ? each_loss<double> : each_loss<float>;
  const CrossEntropy of{label_smoothing, z_loss};
  run(student, data<int64_t>(places), given, gradient, {}, of, numbers_of(loss));
  return loss;
}

template <typename W>
void finish_rows(const Tensor& logits, const std::optional<Tensor>& bias, double scale) {
  const int64_t V = logits.size(1);
  std::vector<W> copy;
  const W* added = nullptr;
  Tensor dense;
  if (bias) {
    dense = torch::stable::contiguous(*bias);
    const Rows given{data<char>(dense), 0, V, type_of(dense)};
    if (!is_of(given.type, W())) copy.resize(V);
    added = given.read(0, 0, V, copy.data());
  }
  each_row(logits.size(0), bytes_of_row(logits), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      FASTKD_CALL(finish, data<W>(logits) + i * logits.stride(0), added, V, scale);
    }
  });
}

// Adds rows (R, V) to ``sums`` (V).
template <typename W>
void add_rows(const Tensor& rows, double* sums) {
  constexpr int64_t kLeast = 1024;  // columns of a thread
  parallel_for(0, rows.size(1), kLeast, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < rows.size(0); ++i) {
      const W* row = data<W>(rows) + i * rows.stride(0);
      for (int64_t j = begin; j < end; ++j) sums[j] += row[j];
    }
  });
}

Tensor first_rows(Tensor x, int64_t n) {
  return n == x.size(0) ? x : torch::stable::narrow(x, 0, 0, n);
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  if (type_of(b) == Type::kBFloat16) return half_product(out, a, b, false);
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

// Memory for logits (R, V). Products read them by columns: rows a power of two apart would compete
// for a few cache sets, so such rows get padding.
Tensor new_logits(const Tensor& like, int64_t R, int64_t V, ScalarType type) {
  constexpr int64_t kPage = 1024, kApart = 48;
  if (V % kPage) return new_large(like, {R, V}, type);
  Tensor room = new_large(like, {R, V + kApart}, type);
  return torch::stable::narrow(room, 1, 0, V);
}

Rows after(Rows rows, int64_t start) {
  rows.data = rows.place(start, 0);
  return rows;
}

// Memory for the gradient of ``like`` (V or more, ...), with zeros from row V on.
Tensor new_gradient(const Tensor& like, int64_t V, ScalarType type) {
  const int64_t rows = like.size(0), columns = like.dim() == 1 ? 1 : like.size(1);
  const Tensor x = like.dim() == 1 ? torch::stable::new_empty(like, {rows}, type)
                                   : new_large(like, {rows, columns}, type);
  const int64_t bytes = columns * x.element_size();
  std::memset(data<char>(x) + V * bytes, 0, (rows - V) * bytes);
  return x;
}

// Cross-entropy of the logits scale·(hidden (R, D) · weight (V, D)ᵀ + bias (V)), of the first
// ``vocabulary`` tokens. Returns
//
// - the loss times ``factor``: the sum over rows divided by ``denominator``, or by ``count``
//   without one; with count 0 the losses (R,) of rows;
// - terms (4), or (4, R) for rows: the loss without ``factor`` in the task's place, zeros
//   elsewhere;
// - the gradients that are needed, of hidden, weight and bias, of the loss, or for rows of Σ
//   weights (R,)·loss.
//
// hidden and weight have one dtype: float32, float64, or bfloat16 where `has_half_product`.
// Gradients have the working dtype; with ``narrow`` that of a bfloat16 weight is bfloat16.
std::vector<Tensor> cross_entropy_of_states(
    const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
    const Tensor& labels, const std::optional<Tensor>& weights,
    const std::optional<Tensor>& denominator, double count, bool needs_hidden, bool needs_weight,
    bool needs_bias, int64_t vocabulary, double scale, double factor, double label_smoothing,
    double z_loss, bool narrow) {
  constexpr int64_t kTerms = 4, kTask = 1;
  const bool half = hidden.scalar_type() == ScalarType::BFloat16;
  const ScalarType type = working_type(hidden), own = half ? ScalarType::BFloat16 : type;
  check(hidden, "hidden", own, {kAnySize, kAnySize}, Strides::kAny);
  const int64_t R = hidden.size(0), V = vocabulary;
  check(weight, "weight", own, {kAnySize, hidden.size(1)}, Strides::kAny);
  STD_TORCH_CHECK(V > 0 && V <= weight.size(0), "vocabulary: ", V, " of ", weight.size(0), " rows");
  if (bias) check(*bias, "bias", check_floating(*bias, "bias"), {weight.size(0)}, Strides::kAny);
  STD_TORCH_CHECK(bias || !needs_bias, "there is no bias that could need a gradient");
  check(labels, "labels", ScalarType::Long, {R}, Strides::kAny);
  check_numbers(weights, "weights", R);
  check_numbers(denominator, "denominator");
  const bool wide = hidden.scalar_type() == ScalarType::Double, of_rows = count == 0;
  const bool learns = needs_hidden || needs_weight || needs_bias;
  STD_TORCH_CHECK(!learns || weights || !of_rows, "gradients of rows need their weights");
  const double divisor = denominator ? value_of(*denominator) : count;
  const Tensor tokens = first_rows(weight, V);
  const Tensor places = checked_labels(labels, V);
  Tensor terms = torch::stable::new_empty(hidden, {kTerms, R}, type);
  torch::stable::fill_(terms, 0);
  const Rows losses = numbers_of(torch::stable::select(terms, 0, kTask));
  const int64_t most = half ? std::min(R, kLogitRows) : R;
  Tensor z = new_logits(hidden, most, V, type);
  const bool copies = half && (needs_hidden || needs_weight);
  Tensor gradient = copies ? new_logits(hidden, R, V, weight.scalar_type()) : z;
  const Tensor shared = scalar(1 / divisor, hidden);
  const Rows given = numbers_of(of_rows && weights ? *weights : shared);
  const CrossEntropy of{label_smoothing, z_loss, factor * scale};
  std::vector<double> bias_sums(needs_bias ? V : 0);
  for (int64_t start = 0; start < R; start += most) {
    const int64_t rows = std::min(most, R - start);
    Tensor states = hidden, some = first_rows(z, rows);
    if (rows < R) states = torch::stable::narrow(states, 0, start, rows);
    multiply(some, states, torch::stable::transpose(tokens, 0, 1));
    if (bias || scale != 1) (wide ? finish_rows<double> : finish_rows<float>)(some, bias, scale);
    const auto run = wide ? each_loss<double> : each_loss<float>;
    run(some, data<int64_t>(places) + start, after(given, start),
        learns ? std::optional(some) : std::nullopt,
        copies ? after(rows_of(gradient), start) : Rows{}, of, after(losses, start));
    if (needs_bias) (wide ? add_rows<double> : add_rows<float>)(some, bias_sums.data());
  }
  if (copies) z = gradient;  // frees the float32 logits
  Tensor loss = torch::stable::new_empty(hidden, {R}, type);
  if (of_rows) {
    for (int64_t i = 0; i < R; ++i) numbers_of(loss).put(i, factor * losses.get(i));
  } else {
    double sum = 0;
    for (int64_t i = 0; i < R; ++i) sum += losses.get(i);
    loss = fastkd::scalar(factor * sum / divisor, hidden);
    terms = torch::stable::new_empty(hidden, {kTerms}, type);
    torch::stable::fill_(terms, 0);
    numbers_of(terms).put(kTask, sum / divisor);
  }
  std::vector<Tensor> made{loss, terms};
  if (needs_hidden) {
    made.push_back(new_large(hidden, {R, hidden.size(1)}, type));
    multiply(made.back(), gradient, tokens);
  }
  if (needs_weight) {
    made.push_back(new_gradient(weight, V, narrow && half ? weight.scalar_type() : type));
    multiply(first_rows(made.back(), V), torch::stable::transpose(gradient, 0, 1), hidden);
  }
  if (needs_bias) {
    made.push_back(new_gradient(*bias, V, working_type(*bias)));
    Rows{data<char>(made.back()), 0, V, type_of(made.back())}.fill(bias_sums.data());
  }
  return made;
}

}  // namespace
}  // namespace fastkd

FASTKD_OPERATOR(cross_entropy,
    "(Tensor student, Tensor labels, Tensor(a!)? gradient, Tensor? weights,"
    " float label_smoothing, float z_loss) -> Tensor")
FASTKD_OPERATOR(cross_entropy_of_states,
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? weights,"
    " Tensor? denominator, *, float count, bool needs_hidden, bool needs_weight,"
    " bool needs_bias, int vocabulary, float scale, float factor, float label_smoothing,"
    " float z_loss, bool narrow) -> Tensor[]")
