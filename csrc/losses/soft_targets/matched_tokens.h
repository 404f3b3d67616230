// Soft targets of two vocabularies. Part of soft_targets.cpp, in its namespace.

constexpr int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

// Appends −inf to n logits, so that kernels take padded(n) in whole vectors. Returns padded(n).
template <typename W>
inline int64_t pad(W* z, int64_t n) {
  std::fill_n(z + n, kPadding, W(-kInfinity));
  return padded(n);
}

// A row's unmatched tokens: their weights e^{z/τ}, each block relative to its own base.
template <typename W>
class UnmatchedTokens {
 public:
  UnmatchedTokens(int64_t size, int64_t tokens, double slope)
      : size_(size), slope_(slope), by_(slope), weights_(new W[size + kPadding]),
        parts_((tokens + kBlock - 1) / kBlock), ends_(parts_.size()) {}

  int64_t size() const { return size_; }
  W* weights() { return weights_.get(); }

  // Takes the unmatched ones of a block of a row's logits.
  void read(const W* z, const uint16_t* bits, int64_t start, int64_t count) {
    const int64_t i = start / kBlock;
    W* x = block(i);
    W* end = FASTKD_CALL(select, z, bits, false, count, x, Next());
    ends_[i] = end - weights();
    const int64_t n = pad(x, end - x);
    parts_[i].base_s = base_of(FASTKD_CALL(top_of_block, x, n));
    parts_[i].total_s = FASTKD_CALL(raise, x, n, by_, W(parts_[i].base_s), z + count);
  }

  // Returns τ·log Σ e^{z/τ}, after the last block.
  double logit() {
    double base = -kInfinity;
    for (const Part& part : parts_) {
      if (part.total_s != 0) base = std::max(base, part.base_s);
    }
    base = base_of(base), total_ = 0;
    for (Part& part : parts_) {
      part.to_ps = part.total_s == 0 ? 0 : std::exp((part.base_s - base) * slope_);
      total_ += times(part.to_ps, part.total_s);
    }
    return base + std::log(total_ * double(FloatFormat<W>::kDown)) / slope_;
  }

  // Weights of a block.
  W* block(int64_t i) { return weights() + (i ? ends_[i - 1] : 0); }

  // Factor of a block's weights, with which all weights sum to ``sum``.
  W factor(int64_t i, double sum) const {
    return W(total_ == 0 ? 0 : sum / total_ * parts_[i].to_ps);
  }

  // Multiplies the weights, which then sum to ``sum``.
  void normalise(double sum) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      W* x = block(i);
      FASTKD_CALL(multiply, x, weights() + ends_[i] - x, factor(i, sum));
    }
  }

 private:
  const int64_t size_;
  const double slope_;
  const Exponents<W> by_;
  const std::unique_ptr<W[]> weights_;
  std::vector<Part> parts_;
  std::vector<int64_t> ends_;  // of the blocks' weights
  double total_ = 0;           // Σ of the weights, relative to the largest base
};

// Σ_k |s_k − t_k| of the sorted unmatched probabilities s and t, and the signs σ of the
// differences. σ of an entry x is that of N_s(x) − N_t(x), N the number of entries of at least x. It
// is the same for a whole bin of values if the counts above the bin differ by at least what the bin
// holds, so only bins where the counts meet are sorted. Of like distributions the counts are near
// each other and meet in most bins, so bins become finer where many entries would be sorted.
template <typename W>
class SortedDistance {
 public:
  // Returns the distance of probabilities, which replace the weights, with sums p_s and p_t.
  double fill(UnmatchedTokens<W>& student, double p_s, UnmatchedTokens<W>& teacher, double p_t) {
    mean_ = 0, met_s_.clear(), met_t_.clear(), meetings_.clear();
    if (std::isnan(p_s + p_t)) return p_s + p_t;
    student.normalise(p_s), teacher.normalise(p_t);
    bins_ = kWideBins;
    if (kFew * find_signs(student, teacher) > student.size() + teacher.size()) {
      bins_ = kFineBins;
      find_signs(student, teacher);
    }
    int32_t* const counts = counts_.data();
    mean_ = signed_sum(student, counts, met_s_);
    double distance = mean_ - signed_sum(teacher, counts + 2 * bins_.size, met_t_);
    if (!meetings_.empty()) distance += join_meetings();
    return distance;
  }

  // Σ p_u σ_u of the student.
  double mean() const { return mean_; }

  // Replaces the student's p_u by p_u·(gradient + weight·σ_u).
  void differentiate(UnmatchedTokens<W>& student, double gradient, double weight) {
    W* p = student.weights();
    FASTKD_CALL(multiply_by_sign, p, student.size(), W(gradient), W(weight), bins_, signs_.data());
    for (const Met& met : met_s_) {
      p[met.place] = W(double(met.p) * (gradient + weight * met.sign));
    }
  }

 private:
  static constexpr Bins kWideBins{64, 6}, kFineBins{24, 10};
  static constexpr int64_t kFew = 16;  // 1/kFew of the entries is sorted without finer bins

  // An entry of a bin where the counts meet.
  struct Met {
    W p;
    int32_t place;
    int sign;
  };

  // Such a bin: numbers of larger entries, and of its own.
  struct Meeting {
    int64_t above_s, above_t;
    int32_t s, t;
  };

  // Sets the signs of bins, and `meetings_`. Returns how many entries these hold. The bins' counts
  // become their places in ``met_s_`` and ``met_t_``.
  int64_t find_signs(UnmatchedTokens<W>& student, UnmatchedTokens<W>& teacher) {
    const int size = bins_.size;
    counts_.assign(4 * size, 0), signs_.resize(size), meetings_.clear();
    int32_t *of_s = counts_.data(), *of_t = of_s + 2 * size;
    count(student, of_s), count(teacher, of_t);
    int64_t above_s = 0, above_t = 0;
    int32_t met_s = 0, met_t = 0;
    for (int bin = size - 1; above_s < student.size() || above_t < teacher.size(); --bin) {
      const int32_t s = of_s[bin] + of_s[size + bin], t = of_t[bin] + of_t[size + bin];
      if (s + t == 0) {
        bin = FASTKD_CALL(skip_empty_bins, of_s, size, bin);
        continue;
      }
      const bool meets = above_s < above_t + t && above_t < above_s + s;
      signs_[bin] = meets ? W(0) : W(above_s >= above_t + t ? 1 : -1);
      if (meets) {
        meetings_.push_back({above_s, above_t, s, t});
        of_s[bin] = std::exchange(met_s, met_s + s), of_t[bin] = std::exchange(met_t, met_t + t);
      }
      above_s += s, above_t += t;
    }
    met_s_.resize(met_s), met_t_.resize(met_t);
    return met_s + met_t;
  }

  void count(UnmatchedTokens<W>& rest, int32_t* counts) const {
    for (int64_t start = 0; start < rest.size(); start += kBlock) {
      const int64_t n = std::min(kBlock, rest.size() - start);
      FASTKD_CALL(count_by_bins, rest.weights() + start, n, bins_, counts);
    }
  }

  // Σ σ p of the entries whose bin has a sign. Stores all others in ``met``, at their bin's place.
  double signed_sum(UnmatchedTokens<W>& rest, int32_t* places, std::vector<Met>& met) {
    double sum = 0;
    int32_t found[kBlock];
    for (int64_t start = 0; start < rest.size(); start += kBlock) {
      const W* p = rest.weights() + start;
      const int64_t n = std::min(kBlock, rest.size() - start);
      const int32_t* end = FASTKD_CALL(sum_by_sign, p, n, bins_, signs_.data(), &sum, found);
      for (const int32_t* i = found; i < end; ++i) {
        met[places[bins_.of(float(p[*i]))]++] = {p[*i], int32_t(start + *i), 0};
      }
    }
    return sum;
  }

  // Sorts entries of one bin.
  static void sort(Met* met, int64_t count) {
    std::sort(met, met + count, [](const Met& a, const Met& b) {
      return a.p != b.p ? a.p > b.p : a.place < b.place;
    });
  }

  // Sets the signs where the counts meet. Returns Σ σ (s − t) of these entries.
  double join_meetings() {
    double sum = 0;
    Met *s = met_s_.data(), *t = met_t_.data();
    for (const Meeting& at : meetings_) {
      sort(s, at.s), sort(t, at.t);
      const int64_t ahead = at.above_t - at.above_s;  // rank of t[0], from that of s[0]
      for (int64_t i = 0; i < at.s; ++i) {
        const int64_t j = i - ahead;
        s[i].sign = j < 0 ? -1 : j >= at.t ? 1 : (s[i].p > t[j].p) - (s[i].p < t[j].p);
        mean_ += s[i].sign * double(s[i].p), sum += s[i].sign * double(s[i].p);
      }
      for (int64_t j = 0; j < at.t; ++j) {
        const int64_t i = j + ahead;
        sum -= (i < 0 ? 1 : i >= at.s ? -1 : s[i].sign) * double(t[j].p);
      }
      s += at.s, t += at.t;
    }
    return sum;
  }

  Bins bins_ = kWideBins;
  std::vector<int32_t> counts_;  // of both sides, each in two tables that entries take by turns
  std::vector<W> signs_;         // of a bin's entries; 0 where the counts meet
  std::vector<Meeting> meetings_;
  std::vector<Met> met_s_, met_t_;
  double mean_ = 0;
};

// A thread's state for two vocabularies. A row's divergence is that of its outcomes: the matched
// tokens, in the student's order, and in a bucket all others together. A block of the student's row
// is divided into matched and unmatched logits. Its matched tokens are a block of outcomes, padded by
// tokens of probability 0; the gradient is put together likewise. The bucket is the last block. The
// teacher's logits of a block are read while the last block's exponentials are computed, and the
// next row of the teacher is prefetched: they lie in another order, so each waits for a cache.
template <typename W>
class MatchedWork {
 public:
  explicit MatchedWork(const SoftTargets& of)
      : of_(of), match_(*of.match), n_(match_.starts.back()),
        num_blocks_(int64_t(match_.starts.size()) - 1),
        bucket_(match_.unmatched != Unmatched::kRenormalise), outcomes_(blocks_of_outcomes()),
        work_(of, outcomes_), weights_(new W[outcomes_.back()]),
        rest_s_(of.student.n - n_, of.student.n, of.slope),
        rest_t_(of.teacher.n - n_, of.teacher.n, of.slope) {
    if (match_.unmatched == Unmatched::kSorted && rest_s_.size() > 0 && rest_t_.size() > 0) {
      distance_ = std::make_unique<SortedDistance<W>>();
    }
  }

  // Returns the divergence of a row and stores its gradient times ``weight``.
  double fill(int64_t row, double weight) {
    const int64_t teacher_row = of_.teacher_rows ? of_.teacher_rows[row] : row;
    double logit_s = 0, logit_t = 0, p_s = 0, distance = 0;
    if (bucket_) logit_t = read_rest_of_teacher(teacher_row);
    const auto read = [&](int64_t i, int64_t, int64_t) -> typename Work<W>::Logits {
      if (i == num_blocks_) {
        student_[0] = W(logit_s = rest_s_.logit()), teacher_[0] = W(logit_t);
        return {student_, teacher_};
      }
      read_student(row, i);
      return {student_, read_teacher(teacher_row, i), picks_of(teacher_row, i + 1)};
    };
    const auto shift_of = [&](const Part& whole) {
      if (!distance_) return 0.0;
      p_s = probability(logit_s, whole.base_s, whole.total_s);
      const double p_t = probability(logit_t, whole.base_t, whole.total_t);
      distance = distance_->fill(rest_s_, p_s, rest_t_, p_t);
      return weight * distance_->mean();
    };
    const auto write = [&](const auto& gradient_of_block) {
      double of_rest = 0;
      if (bucket_) {
        gradient_of_block(num_blocks_, student_);
        of_rest = double(student_[0]);
      }
      if (distance_) distance_->differentiate(rest_s_, p_s == 0 ? 0 : of_rest / p_s, weight);
      for (int64_t i = 0; i < num_blocks_; ++i) {
        gradient_of_block(i, student_);
        write_gradient(row, i, distance_ ? W(1) : rest_s_.factor(i, of_rest));
      }
    };
    return work_.fill(row, weight, weights_.get(), read, shift_of, write) + distance;
  }

 private:
  // Where the blocks of outcomes start, for `Work`.
  std::vector<int64_t> blocks_of_outcomes() const {
    std::vector<int64_t> starts{0};
    for (int64_t i = 0; i < num_blocks_; ++i) starts.push_back(starts.back() + padded(matched_in(i)));
    if (bucket_) starts.push_back(starts.back() + 1);
    return starts;
  }

  // Number of matched tokens of a block.
  int64_t matched_in(int64_t block) const {
    return match_.starts[block + 1] - match_.starts[block];
  }

  static const uint16_t* bits_of(const std::vector<uint16_t>& bits, int64_t block) {
    return bits.data() + block * (kBlock / kColumns);
  }

  // p of a logit, from the sum of a row's raised exponentials.
  double probability(double logit, double base, double total) const {
    return std::exp((logit - base) * of_.slope) / (total * double(FloatFormat<W>::kDown));
  }

  void read_student(int64_t row, int64_t block) {
    const int64_t start = block * kBlock, count = std::min(kBlock, of_.student.n - start);
    const W* z = of_.student.read(row, start, count, copy_);
    const uint16_t* bits = bits_of(match_.in_student, block);
    // Stores of the gradient, which come at the end, would wait for memory.
    Next gradient;
    if (of_.gradient.data) gradient = {of_.gradient.place(row, start), size_of(of_.gradient.type)};
    W* end = FASTKD_CALL(select, z, bits, true, count, student_, gradient);
    pad(student_, end - student_);
    if (bucket_) rest_s_.read(z, bits, start, count);
  }

  // Returns the logit of all unmatched tokens. Reading them in order brings the row into the cache.
  double read_rest_of_teacher(int64_t row) {
    for (int64_t start = 0; start < of_.teacher.n; start += kBlock) {
      const int64_t count = std::min(kBlock, of_.teacher.n - start);
      const W* z = of_.teacher.read(row, start, count, copy_);
      rest_t_.read(z, bits_of(match_.in_teacher, start / kBlock), start, count);
    }
    return rest_t_.logit();
  }

  // Returns the teacher's logits of a block, of which all but a row's first were picked before.
  const W* read_teacher(int64_t row, int64_t block) {
    const Picks picks = picks_of(row, block);
    if (block == 0) FASTKD_CALL(pick, picks, 0);
    W* z = teacher_;
    if (is_of(of_.teacher.type, W())) {
      z = reinterpret_cast<W*>(picks.out);
    } else {
      widen(picks.out, of_.teacher.type, picks.count, teacher_);
    }
    pad(z, picks.count);
    return z;
  }

  // None behind the last block.
  Picks picks_of(int64_t row, int64_t block) {
    if (block == num_blocks_) return {};
    const Rows& rows = of_.teacher;
    const int64_t start = match_.starts[block], size = size_of(rows.type);
    Next next;
    if (n_ > 0 && !of_.teacher_rows) {
      next = {rows.place(row + 1, rows.n * start / n_), rows.n * size / n_};
    }
    return {rows.place(row, 0), match_.teacher.data() + start, matched_in(block), size,
            picked_[block % 2], next};
  }

  // Stores a block's gradient, from that of the outcomes and the weights of the others.
  void write_gradient(int64_t row, int64_t block, W factor) {
    const Rows& rows = of_.gradient;
    const int64_t start = block * kBlock, count = std::min(kBlock, rows.n - start);
    W* out = rows.write(row, start, copy_);
    FASTKD_CALL(merge, student_, bucket_ ? rest_s_.block(block) : nullptr, factor,
                bits_of(match_.in_student, block), count, out);
    rows.written(row, start, count, out);
  }

  const SoftTargets& of_;
  const Match& match_;
  const int64_t n_, num_blocks_;  // matched tokens, and blocks of the student's row
  const bool bucket_;
  const std::vector<int64_t> outcomes_;
  Work<W> work_;
  const std::unique_ptr<W[]> weights_;  // of the student's outcomes
  UnmatchedTokens<W> rest_s_, rest_t_;
  std::unique_ptr<SortedDistance<W>> distance_;
  W student_[kBlock + kPadding], teacher_[kBlock + kPadding], copy_[kBlock];  // of a block
  alignas(W) char picked_[2][(kBlock + kPadding) * sizeof(W)];  // the teacher's own numbers
};
