// Data path, for each position: the negatives are read and their directions added up, four at a
// time into a float64 sum. Then each student row, its teacher's row (in the cache if samples are
// few) and the sum give two norms and two products in one pass, and the gradient in another. With E
// = B·P·D elements of s bytes memory moves 3Es bytes, and 4Es where a write loads its line first.
//
// Rows whose squares leave the range of their type are divided by their largest entry, in float64.
#include "losses/cos_nce/cos_nce.h"

#include <algorithm>
#include <cmath>

namespace fastkd {
namespace {

struct Products {
  double z_z, t_t, z_t, z_s;
};

}  // namespace
}  // namespace fastkd

#define FASTKD_KERNELS "losses/cos_nce/cos_nce_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

bool in_range(double squares, Type type) {
  return type == Type::kDouble ? squares > 1e-290 && squares < 1e290
                               : squares > 1e-30 && squares < 1e30;
}

Next in_passing(const Rows& x) { return {x.data, size_of(x.type)}; }

double inverse_root(double squares) { return squares == 0 ? 0 : 1 / std::sqrt(squares); }

// Stores x divided by its largest entry, and returns that entry.
double shrink(const double* x, int64_t n, double* shrunk) {
  double peak = 0;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, std::abs(x[i]));
  if (peak == 0) peak = 1;
  for (int64_t i = 0; i < n; ++i) shrunk[i] = x[i] / peak;
  return peak;
}

}  // namespace

template <>
float* Angles::copy(int place) {
  if (narrow_.empty()) narrow_.resize(4 * D_);
  return narrow_.data() + place * D_;
}

template <>
double* Angles::copy(int place) {
  if (wide_.empty()) wide_.resize(4 * D_);
  return wide_.data() + place * D_;
}

template <typename W>
const W* Angles::read(const Rows& x, int place) {
  return x.read(0, 0, D_, is_of(x.type, W()) ? nullptr : copy<W>(place));
}

void Angles::add_direction(const Rows& x, double* sums, const Rows& next) {
  if (waiting_.count == kTogether || waiting_.sums != sums) add_waiting();
  const int place = int(waiting_.count);
  const auto as = [&](auto* row) {
    const double found = FASTKD_CALL(squares_of, row, D_, in_passing(next));
    if (!in_range(found, x.type)) return false;
    waiting_.rows[place] = row, waiting_.factors[place] = 1 / std::sqrt(found);
    waiting_.sums = sums, waiting_.type = x.type, ++waiting_.count;
    return true;
  };
  if (x.type == Type::kDouble ? as(read<double>(x, 0)) : as(read<float>(x, place))) return;
  double* shrunk = copy<double>(1);
  shrink(read<double>(x, 0), D_, shrunk);
  const double factor = inverse_root(FASTKD_CALL(squares_of, shrunk, D_, {}));
  const double* const rows[] = {shrunk};
  FASTKD_CALL(add_to, rows, &factor, 1, D_, sums);
}

void Angles::add_waiting() {
  const auto add = [&](auto like) {
    using W = decltype(like);
    const W* rows[kTogether];
    for (int64_t k = 0; k < waiting_.count; ++k) rows[k] = static_cast<const W*>(waiting_.rows[k]);
    FASTKD_CALL(add_to, rows, waiting_.factors, waiting_.count, D_, waiting_.sums);
  };
  waiting_.type == Type::kDouble ? add(double()) : add(float());
  waiting_.count = 0;
}

Angles::Of Angles::of(const Rows& z, const Rows& t, const Rows& s, const Rows& next) {
  const bool wide = z.type == Type::kDouble;
  const auto as = [&](auto like) {
    using W = decltype(like);
    const W *of_z = read<W>(z, 0), *of_t = read<W>(t, 1), *of_s = read<W>(s, 2);
    return FASTKD_CALL(products_of, of_z, of_t, of_s, D_, in_passing(next));
  };
  const Products found = wide ? as(double()) : as(float());
  const auto cosines = [](const Products& of) {
    const double inverse_z = inverse_root(of.z_z), inverse_t = inverse_root(of.t_t);
    return Of{inverse_z, inverse_t, of.z_s * inverse_z, of.z_t * inverse_z * inverse_t};
  };
  if (in_range(found.z_z, z.type) && in_range(found.t_t, z.type)) return cosines(found);
  double *shrunk_z = copy<double>(0), *shrunk_t = copy<double>(1);
  const double peak_z = shrink(read<double>(z, 0), D_, shrunk_z);
  const double peak_t = shrink(read<double>(t, 1), D_, shrunk_t);
  Of shrunk = cosines(FASTKD_CALL(products_of, shrunk_z, shrunk_t, read<double>(s, 2), D_, {}));
  shrunk.inverse_z /= peak_z, shrunk.inverse_t /= peak_t;
  return shrunk;
}

double Angles::pull(const Rows& z, const Rows& t, const Rows& s, double w, double v, double weight,
                    const Rows& dz, const Rows& next_z, const Rows& next_dz) {
  const Of found = of(z, t, s, next_z);
  const double pull = w * found.with_sum - v * found.with_teacher;
  if (dz.data) gradient(z, t, s, found, {w, v, pull, weight * found.inverse_z}, dz, next_dz);
  return pull;
}

void Angles::gradient(const Rows& z, const Rows& t, const Rows& s, const Of& of,
                      const Weights& by, const Rows& dz, const Rows& next) {
  const auto fits = [](double inverse) { return inverse > 1e-15 && inverse < 1e15; };
  const double of_z = by.pull * of.inverse_z, of_t = by.v * of.inverse_t;
  if (z.type != Type::kDouble && fits(of.inverse_z) && fits(of.inverse_t)) {
    float* out = dz.write(0, 0, is_of(dz.type, float()) ? nullptr : copy<float>(3));
    FASTKD_CALL(combination_of, read<float>(z, 0), read<float>(t, 1), read<float>(s, 2), D_,
                float(of_z), float(of_t), float(by.w), float(by.outer), out, in_passing(next));
    dz.written(0, 0, D_, out);
  } else {
    double* out = dz.write(0, 0, is_of(dz.type, double()) ? nullptr : copy<double>(3));
    FASTKD_CALL(combination_of, read<double>(z, 0), read<double>(t, 1), read<double>(s, 2), D_,
                of_z, of_t, by.w, by.outer, out, in_passing(next));
    dz.written(0, 0, D_, out);
  }
}

std::vector<int64_t> Negatives::counts() const {
  const int64_t P = rows.positions;
  std::vector<int64_t> found(classes * P);
  for (int64_t k = 0; k < rows.samples; ++k) {
    int64_t* of = found.data() + (segments ? segments[k] : 0) * P;
    for (int64_t p = 0; p < P; ++p) of[p] += !mask || mask[k * P + p];
  }
  if (others) leave_own_out(found.data(), P);
  return found;
}

void Negatives::add_directions(int64_t position, const Rows& sums, const Positions& next) const {
  const int64_t D = rows.D;
  Angles angles(D);
  std::vector<double> added(classes * D);
  for (int64_t k = 0; k < rows.samples; ++k) {
    if (mask && !mask[k * rows.positions + position]) continue;
    double* const to = added.data() + (segments ? segments[k] : 0) * D;
    const int64_t ahead = k + rows.ahead(), beyond = ahead - rows.samples;
    angles.add_direction(
        rows.row(k, position), to,
        beyond < 0 ? rows.row(ahead, position) : next.row_if_any(beyond, position));
  }
  angles.add_waiting();
  if (others) leave_own_out(added.data(), D);
  for (int64_t c = 0; c < classes; ++c) sums.only(c).fill(added.data() + c * D);
}

// Adds up the other classes: subtracting the own class from a total would cancel digits.
template <typename T>
void Negatives::leave_own_out(T* sums, int64_t n) const {
  std::vector<T> own(sums, sums + classes * n), running(n);
  for (int64_t c = 0; c < classes; ++c) {
    for (int64_t i = 0; i < n; ++i) sums[c * n + i] = running[i], running[i] += own[c * n + i];
  }
  std::fill(running.begin(), running.end(), T(0));
  for (int64_t c = classes - 1; c >= 0; --c) {
    for (int64_t i = 0; i < n; ++i) sums[c * n + i] += running[i], running[i] += own[c * n + i];
  }
}

}  // namespace fastkd
