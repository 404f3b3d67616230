// Soft targets of two vocabularies. Part of soft_targets.cpp, in its namespace.

// A row's unmatched tokens: their weights e^{z/τ}, each block relative to its own base.
template <typename W>
class Rest {
 public:
  Rest(int64_t size, int64_t tokens, double slope)
      : size_(size), slope_(slope), by_(slope), weights_(new W[size + kPadding]),
        parts_((tokens + kBlock - 1) / kBlock), ends_(parts_.size()) {}

  int64_t size() const { return size_; }
  W* weights() { return weights_.get(); }

  // Takes the unmatched ones of a block of a row's logits.
  void read(const W* z, const uint16_t* bits, int64_t start, int64_t count) {
    const int64_t i = start / kBlock;
    W* x = weights_.get() + (i ? ends_[i - 1] : 0);
    const int64_t n = FASTKD_CALL(select, z, bits, false, count, x) - x;
    ends_[i] = x + n - weights_.get();
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

  // Multiplies the weights, which then sum to ``sum``, and counts them by bins if ``counts`` isn't
  // null.
  void normalise(double sum, int32_t* counts = nullptr) {
    const double factor = total_ == 0 ? 0 : sum / total_;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const int64_t start = i ? ends_[i - 1] : 0, count = ends_[i] - start;
      W* x = weights_.get() + start;
      FASTKD_CALL(multiply, x, count, W(factor * parts_[i].to_ps));
      if (counts) FASTKD_CALL(count_by_bins, x, count, counts);
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
// holds, so only bins where the counts meet are sorted.
template <typename W>
class SortedDistance {
 public:
  SortedDistance() : counts_(4 * kBins), signs_(kBins) {}

  // Returns the distance of probabilities, which replace the weights, with sums p_s and p_t.
  double fill(Rest<W>& student, double p_s, Rest<W>& teacher, double p_t) {
    mean_ = 0, met_s_.clear(), met_t_.clear(), meetings_.clear();
    if (std::isnan(p_s + p_t)) return p_s + p_t;
    int32_t *of_s = counts_.data(), *of_t = of_s + 2 * kBins;
    student.normalise(p_s, of_s), teacher.normalise(p_t, of_t);
    int64_t above_s = 0, above_t = 0;
    for (int bin = kBins - 1; above_s < student.size() || above_t < teacher.size(); --bin) {
      const int32_t s = taken(of_s + bin), t = taken(of_t + bin);
      const bool meets = above_s < above_t + t && above_t < above_s + s;
      signs_[bin] = meets ? W(0) : W(above_s >= above_t + t ? 1 : -1);
      if (meets) meetings_.push_back({above_s, above_t, s, t});
      above_s += s, above_t += t;
    }
    mean_ = signed_sum(student, met_s_);
    double distance = mean_ - signed_sum(teacher, met_t_);
    if (!meetings_.empty()) distance += join_meetings();
    return distance;
  }

  // Σ p_u σ_u of the student.
  double mean() const { return mean_; }

  // Replaces the student's p_u by p_u·(gradient + weight·σ_u).
  void differentiate(Rest<W>& student, double gradient, double weight) {
    W* p = student.weights();
    FASTKD_CALL(multiply_by_sign, p, student.size(), W(gradient), W(weight), signs_.data());
    for (const Met& met : met_s_) {
      p[met.place] = W(double(met.p) * (gradient + weight * met.sign));
    }
  }

 private:
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

  // A bin's two counts, which become 0.
  static int32_t taken(int32_t* counts) {
    return std::exchange(counts[0], 0) + std::exchange(counts[kBins], 0);
  }

  // Σ σ p of the entries whose bin has a sign. Stores all others in ``met``, sorted.
  double signed_sum(Rest<W>& rest, std::vector<Met>& met) {
    double sum = 0;
    int32_t found[kBlock];
    for (int64_t start = 0; start < rest.size(); start += kBlock) {
      const W* p = rest.weights() + start;
      const int64_t count = std::min(kBlock, rest.size() - start);
      const int32_t* end = FASTKD_CALL(sum_by_sign, p, count, signs_.data(), &sum, found);
      for (const int32_t* i = found; i < end; ++i) met.push_back({p[*i], int32_t(start + *i), 0});
    }
    std::sort(met.begin(), met.end(), [](const Met& a, const Met& b) {
      return a.p != b.p ? a.p > b.p : a.place < b.place;
    });
    return sum;
  }

  // Sets the signs where the counts meet. Returns Σ σ (s − t) of these entries.
  double join_meetings() {
    double sum = 0;
    Met *s = met_s_.data(), *t = met_t_.data();
    for (const Meeting& at : meetings_) {
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

  std::vector<int32_t> counts_;  // of both sides, each in two tables that entries take by turns
  std::vector<W> signs_;         // of a bin's entries; 0 where the counts meet
  std::vector<Meeting> meetings_;
  std::vector<Met> met_s_, met_t_;
  double mean_ = 0;
};

// A thread's state for two vocabularies. A row's divergence is that of its outcomes: the matched
// tokens, in the student's order, and in a bucket all others together. Both rows are read once. The
// student's is divided into matched and unmatched logits; the gradient is put together likewise.
template <typename W>
class MatchedWork {
 public:
  explicit MatchedWork(const SoftTargets& of)
      : of_(of), match_(*of.match), bucket_(match_.unmatched != Unmatched::kRenormalise),
        n_(int64_t(match_.teacher.size())), student_(new W[n_ + bucket_ + kPadding]),
        teacher_(new W[n_ + bucket_]),
        rest_s_(of.student.n - n_, of.student.n, of.slope),
        rest_t_(of.teacher.n - n_, of.teacher.n, of.slope),
        outcomes_{row_of(student_), row_of(teacher_), of.divergence, of.coefficient, of.slope, 1,
                  of.gradient.data ? row_of(student_) : Rows{}},
        work_(outcomes_) {
    if (match_.unmatched == Unmatched::kSorted && rest_s_.size() > 0 && rest_t_.size() > 0) {
      distance_ = std::make_unique<SortedDistance<W>>();
    }
  }

  // Returns the divergence of a row and stores its gradient times ``weight``.
  double fill(int64_t row, double weight) {
    read_student(row);
    read_teacher(of_.teacher_rows ? of_.teacher_rows[row] : row);
    double rest_s = 0, rest_t = 0;
    if (bucket_) {
      student_[n_] = W(rest_s = rest_s_.logit());
      teacher_[n_] = W(rest_t = rest_t_.logit());
    }
    double distance = 0, p_s = 0;
    const double loss = work_.fill(0, weight, [&](const Part& whole) {
      if (!distance_) return 0.0;
      p_s = probability(rest_s, whole.base_s, whole.total_s);
      distance = distance_->fill(rest_s_, p_s, rest_t_,
                                 probability(rest_t, whole.base_t, whole.total_t));
      return weight * distance_->mean();
    });
    if (of_.gradient.data == nullptr) return loss + distance;
    if (distance_) {
      distance_->differentiate(rest_s_, p_s == 0 ? 0 : double(student_[n_]) / p_s, weight);
    } else if (bucket_) {
      rest_s_.normalise(double(student_[n_]));
    }
    write_gradient(row);
    return loss + distance;
  }

 private:
  Rows row_of(const std::unique_ptr<W[]>& x) const {
    constexpr Type type = std::is_same_v<W, float> ? Type::kFloat : Type::kDouble;
    return {reinterpret_cast<char*>(x.get()), 0, n_ + bucket_, type};
  }

  // p of a logit, from the sum of a row's raised exponentials.
  double probability(double logit, double base, double total) const {
    return std::exp((logit - base) * of_.slope) / (total * double(FloatFormat<W>::kDown));
  }

  // Calls body(z, bits, start, count) for the blocks of a row.
  template <typename Body>
  void each_block(const Rows& rows, int64_t row, const std::vector<uint16_t>& bits,
                  const Body& body) {
    for (int64_t start = 0; start < rows.n; start += kBlock) {
      const int64_t count = std::min(kBlock, rows.n - start);
      body(rows.read(row, start, count, copy_), bits.data() + start / kColumns, start, count);
    }
  }

  void read_student(int64_t row) {
    W* matched = student_.get();
    each_block(of_.student, row, match_.in_student,
               [&](const W* z, const uint16_t* bits, int64_t start, int64_t count) {
                 matched = FASTKD_CALL(select, z, bits, true, count, matched);
                 if (bucket_) rest_s_.read(z, bits, start, count);
               });
  }

  // The unmatched logits come first: reading them in order brings the row into the cache.
  void read_teacher(int64_t row) {
    const Rows& rows = of_.teacher;
    if (bucket_) {
      each_block(rows, row, match_.in_teacher,
                 [&](const W* z, const uint16_t* bits, int64_t start, int64_t count) {
                   rest_t_.read(z, bits, start, count);
                 });
    }
    const char* from = rows.place(row, 0);
    for (int64_t start = 0; start < n_; start += kBlock) {
      const int64_t count = std::min(kBlock, n_ - start);
      const int32_t* ids = match_.teacher.data() + start;
      W* out = teacher_.get() + start;
      if (size_of(rows.type) == sizeof(W)) {
        FASTKD_CALL(pick, reinterpret_cast<const W*>(from), ids, count, out);
      } else if (size_of(rows.type) == sizeof(float)) {
        float picked[kBlock];
        FASTKD_CALL(pick, reinterpret_cast<const float*>(from), ids, count, picked);
        std::copy_n(picked, count, out);
      } else {
        uint16_t picked[kBlock];
        FASTKD_CALL(pick, reinterpret_cast<const uint16_t*>(from), ids, count, picked);
        widen(picked, rows.type, count, out);
      }
    }
  }

  void write_gradient(int64_t row) {
    const W *matched = student_.get(), *rest = bucket_ ? rest_s_.weights() : nullptr;
    const Rows& rows = of_.gradient;
    for (int64_t start = 0; start < rows.n; start += kBlock) {
      const int64_t count = std::min(kBlock, rows.n - start);
      W* out = rows.write(row, start, copy_);
      const uint16_t* bits = match_.in_student.data() + start / kColumns;
      matched = FASTKD_CALL(merge, matched, rest, bits, count, out);
      if (rest) rest = rest_s_.weights() + (start + count - (matched - student_.get()));
      rows.written(row, start, count, out);
    }
  }

  const SoftTargets& of_;
  const Match& match_;
  const bool bucket_;
  const int64_t n_;  // number of matched tokens
  const std::unique_ptr<W[]> student_, teacher_;  // logits of the outcomes; the student's gradient
  Rest<W> rest_s_, rest_t_;
  const SoftTargets outcomes_;
  Work<W> work_;
  std::unique_ptr<SortedDistance<W>> distance_;
  W copy_[kBlock];
};
