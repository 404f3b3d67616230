// COS-NCE on a CPU: sums of the negatives' directions, cosines with them, and the gradient.
#pragma once

#include "base/rows.h"

namespace fastkd {

// Rows whose directions are added to a sum in one pass.
constexpr int kTogether = 4;

// A thread's state: one position after another.
class Angles {
 public:
  explicit Angles(int64_t D) : D_(D) {}

  // Adds x/‖x‖ to ``sums`` (D,), or nothing for a zero vector. Some rows wait for `add_waiting`.
  void add_direction(const Rows& x, double* sums, const Rows& next);
  void add_waiting();

  // Returns ẑ·(w·s − v·t̂) for a sum of directions s. Its gradient times ``weight`` is stored in
  // ``dz``, unless that is null.
  double pull(const Rows& z, const Rows& t, const Rows& s, double w, double v, double weight,
              const Rows& dz, const Rows& next_z, const Rows& next_dz);

 private:
  // 1/‖z‖ and 1/‖t‖, ẑ·s and ẑ·t̂
  struct Of {
    double inverse_z, inverse_t, with_sum, with_teacher;
  };
  Of of(const Rows& z, const Rows& t, const Rows& s, const Rows& next);

  // dz = (w·s − v·t̂ − pull·ẑ)·outer
  struct Weights {
    double w, v, pull, outer;
  };
  void gradient(const Rows& z, const Rows& t, const Rows& s, const Of& of, const Weights& by,
                const Rows& dz, const Rows& next);

  template <typename W>
  const W* read(const Rows& x, int place);
  template <typename W>
  W* copy(int place);

  struct Waiting {
    const void* rows[kTogether];
    double factors[kTogether], *sums;
    int64_t count = 0;
    Type type;
  };

  int64_t D_;
  Waiting waiting_{};
  std::vector<float> narrow_;
  std::vector<double> wide_;
};

// Negatives (K, P, D) in classes. A class's counts and sums are over its own rows, or with
// ``others`` over the rows of all other classes.
struct Negatives {
  Positions rows;
  const bool* mask;         // (K, P), or null
  const int64_t* segments;  // (K), or null: one class
  int64_t classes;
  bool others;

  std::vector<int64_t> counts() const;  // (classes, P)

  // Stores Σ x/‖x‖ at a position in ``sums`` (classes, D). ``next``: rows that are read afterwards.
  void add_directions(int64_t position, const Rows& sums, const Positions& next) const;

 private:
  template <typename T>
  void leave_own_out(T* sums, int64_t n) const;  // of (classes, n)
};

}  // namespace fastkd
