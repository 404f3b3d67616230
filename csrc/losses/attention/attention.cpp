// Data path. One read of both maps and one write of the gradient. With E entries of s bytes memory
// moves 3Es bytes, and 4Es where a write loads its line first.
#include "losses/attention/attention.h"

#include <algorithm>

#define FASTKD_KERNELS "losses/attention/attention_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

template <typename W>
class Queries {
 public:
  Queries(const AttentionMaps& of, int64_t sample, int64_t group)
      : of_(of), sample_(sample), group_(group), copies_(4 * of.N) {
    if (of.mask == nullptr) return;
    real_.assign(of.mask + sample * of.N, of.mask + (sample + 1) * of.N);
  }

  bool is_real(int64_t query) const { return real_.empty() || real_[query] != 0; }
  const W* real() const { return real_.empty() ? nullptr : real_.data(); }

  // A query's row of the map; with ``mean`` averaged over heads.
  const W* student(int64_t query) { return row(of_.student, of_.heads_s, query, 0); }
  const W* teacher(int64_t query) { return row(of_.teacher, of_.heads_t, query, 1); }

  W* copy(int place) { return copies_.data() + place * of_.N; }

 private:
  const W* row(const Rows& maps, int64_t heads, int64_t query, int place) {
    const int64_t first = sample_ * heads * of_.N + query;
    if (!of_.mean) return maps.read(first + group_ * of_.N, 0, of_.N, copy(place));
    for (int64_t h = 0; h < heads; ++h) {
      const W* head = maps.read(first + h * of_.N, 0, of_.N, copy(2));
      FASTKD_CALL(add_to, head, of_.N, h == 0, W(1.0 / double(heads)), copy(place));
    }
    return copy(place);
  }

  const AttentionMaps& of_;
  int64_t sample_, group_;
  std::vector<W> copies_, real_;
};

template <typename W>
double compare_maps(const AttentionMaps& of, int64_t sample, int64_t group, W factor,
                    const Rows& dx) {
  Queries<W> queries(of, sample, group);
  const int64_t copies = of.mean ? of.heads_s : 1;
  double total = 0;
  for (int64_t q = 0; q < of.N; ++q) {
    const int64_t first = (sample * of.heads_s + group) * of.N + q;
    W* out = dx.write(first, 0, queries.copy(3));
    if (queries.is_real(q)) {
      total += FASTKD_CALL(compare_rows, queries.student(q), queries.teacher(q), queries.real(),
                           of.N, factor, out);
    } else if (out) {
      std::fill(out, out + of.N, W(0));
    }
    dx.written(first, 0, of.N, out);
    for (int64_t h = 1; out && h < copies; ++h) {
      std::memcpy(dx.place(first + h * of.N, 0), dx.place(first, 0), of.N * size_of(dx.type));
    }
  }
  return total;
}

}  // namespace

double AttentionMaps::compare(int64_t sample, int64_t group, double factor, const Rows& dx) const {
  return student.type == Type::kDouble ? compare_maps<double>(*this, sample, group, factor, dx)
                                       : compare_maps<float>(*this, sample, group, float(factor), dx);
}

}  // namespace fastkd
