// Kernels of products.cpp; see each_processor.h.

// Keeps x in a register: gcc would load it from memory for each use.
template <typename Part>
inline void hold([[maybe_unused]] Part& x) {
#if defined(FASTKD_KINDS) && defined(__OPTIMIZE__)
  asm("" : "+v"(x));
#endif
}

// Calls body(0), body(1), ... with constants, so that arrays indexed by them stay in registers.
template <typename Body, int... i>
inline void unrolled(const Body& body, std::integer_sequence<int, i...>) {
  (body(std::integral_constant<int, i>()), ...);
}
template <int kCount, typename Body>
inline void unrolled(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, kCount>());
}

// Adds the two halves of each part of kPart lanes, of x and then of y: N sums.
template <int kPart, typename Part, int... lane>
inline Part halves_of(const Part& x, const Part& y, std::integer_sequence<int, lane...>) {
  constexpr int N = sizeof...(lane), kHalf = kPart / 2;
  const auto at = [&](int i) { return i < N ? x[i] : y[i - N]; };
  return Part{at(lane / kHalf * kPart + lane % kHalf)...} +
         Part{at(lane / kHalf * kPart + lane % kHalf + kHalf)...};
}

// Replaces the first of kCount vectors of N lanes by the sums of each. Each step makes one vector
// of two.
template <int N, int kCount, int kPart = N, typename Part>
inline void add_lanes(Part* x) {
  if constexpr (kPart > 1) {
    constexpr int kPairs = (kCount + 1) / 2;
    unrolled<kPairs>([&](auto i) {
      const Part second = 2 * i + 1 < kCount ? x[2 * i + 1] : Part{};
      x[i] = halves_of<kPart>(x[2 * i], second, std::make_integer_sequence<int, N>());
    });
    add_lanes<N, kPairs, kPart / 2>(x);
  }
}

// sums (kLeft, kRight): Σ term(x, y) over vectors of rows a and b. meanwhile(k) is called for each
// vector.
template <typename W, int kLeft, int kRight, typename Term, typename Meanwhile>
inline void sum_terms(const W* const* a, const W* const* b, int64_t count, const Term& term,
                      const Meanwhile& meanwhile, W* sums) {
  constexpr int kNumbers = kLanes<W>;
  using Part = Vector<W>;
  Part totals[kLeft * kRight];
  unrolled<kLeft * kRight>([&](auto i) { totals[i] = Part{}; });
  for (int64_t k = 0; k < count; k += kNumbers) {
    meanwhile(k);
    Part right[kRight];
    unrolled<kRight>([&](auto j) { right[j] = load(b[j] + k); });
    unrolled<kLeft>([&](auto i) {
      Part left = load(a[i] + k);
      hold(left);
      unrolled<kRight>([&](auto j) { totals[i * kRight + j] += term(left, right[j]); });
    });
  }
  Part added[kLeft * kRight];  // a copy: otherwise gcc loads the rows again in the loop
  unrolled<kLeft * kRight>([&](auto i) { added[i] = totals[i]; });
  add_lanes<kNumbers, kLeft * kRight>(added);
  std::memcpy(sums, added, kLeft * kRight * sizeof(W));
}

template <typename W>
FASTKD_KERNEL void multiply_block(const W* rows, int64_t N, int64_t D, int64_t block, W* R) {
  constexpr int kRows = kBytes == 32 ? 3 : 4;
  const int64_t room = room_of<W>(D), first = block * kBlock, end = std::min(N, first + kBlock);
  const int64_t parts = D * int64_t(sizeof(W)) / kDepth + 1;
  const int64_t depth = (D / parts / kBytes + 1) * kBytes;
  const auto find = [&](int64_t i, int64_t start, const W** found) {
    for (int64_t k = 0; k < kRows; ++k) found[k] = rows + std::min(i + k, N - 1) * room + start;
  };
  const auto tile = [&](int64_t i, int64_t j, int64_t start) {
    const W *left[kRows], *right[kRows];
    find(i, start, left);
    find(j, start, right);
    W sums[kRows * kRows];
    const auto product = [](const auto& x, const auto& y) { return x * y; };
    const int64_t count = std::min(depth, D - start);
    sum_terms<W, kRows, kRows>(left, right, count, product, [](int64_t) {}, sums);
    const int64_t columns = std::min<int64_t>(kRows, N - j);
    for (int64_t k = 0; k < std::min<int64_t>(kRows, end - i); ++k) {
      W *row = R + (i + k) * N + j, *sum = sums + k * kRows;
      for (int64_t c = 0; start && c < columns; ++c) sum[c] += row[c];
      if (columns == kRows) {
        std::memcpy(row, sum, kRows * sizeof(W));
      } else {
        std::copy_n(sum, columns, row);
      }
    }
  };
  for (int64_t start = 0; start == 0 || start < D; start += depth) {
    for (int64_t j = first; j < N; j += 2 * kRows) {
      for (int64_t i = first; i < std::min(end, j + 2 * kRows); i += kRows) {
        if (i <= j) tile(i, j, start);
        if (j + kRows < N) tile(i, j + kRows, start);
      }
    }
  }
}

// kCount rows from row i on; the last row stands in for rows beyond ``count``.
template <int kCount, typename W>
inline void pick(const W* const* rows, int64_t i, int64_t count, const W** picked) {
  for (int64_t k = 0; k < kCount; ++k) picked[k] = rows[std::min(i + k, count - 1)];
}

template <typename W>
FASTKD_KERNEL void compare_all(const W* const* a, int64_t A, const W* const* b, int64_t B,
                               int64_t n, const Ahead& ahead, W* sums) {
  constexpr int64_t kNumbers = kLanes<W>;
  constexpr int kLeft = kBytes == 64 ? 8 : 4, kRight = 2, kMostAhead = 3;
  const auto square = [](const auto& x, const auto& y) { return (x - y) * (x - y); };
  const int64_t whole = n / kNumbers * kNumbers;
  const int64_t tiles = ((A + kLeft - 1) / kLeft) * ((B + kRight - 1) / kRight);
  const int64_t share = (ahead.count + tiles - 1) / tiles;
  int64_t at = 0;
  for (int64_t i = 0; i < A; i += kLeft) {
    for (int64_t j = 0; j < B; j += kRight, at += share) {
      const W *left[kLeft], *right[kRight];
      pick<kLeft>(a, i, A, left), pick<kRight>(b, j, B, right);
      const char* next[kMostAhead];
      for (int64_t k = 0; k < kMostAhead; ++k) {
        const int64_t row = std::min(at + std::min(k, share - 1), ahead.count - 1);
        next[k] = ahead.count ? ahead.rows[row] : reinterpret_cast<const char*>(left[0]);
      }
      W tile[kLeft * kRight], more[kLeft * kRight]{};
      const auto fetch = [&](int64_t k) {
        for (int row = 0; row < kMostAhead; ++row) fetch_near(next[row] + k * ahead.stride);
      };
      sum_terms<W, kLeft, kRight>(left, right, whole, square, fetch, tile);
      if (whole < n) {
        W rests[kLeft + kRight][kNumbers]{};
        const auto move = [&](const W*& row, W* rest) {
          std::memcpy(rest, row + whole, (n - whole) * sizeof(W)), row = rest;
        };
        for (int64_t k = 0; k < kLeft; ++k) move(left[k], rests[k]);
        for (int64_t k = 0; k < kRight; ++k) move(right[k], rests[kLeft + k]);
        sum_terms<W, kLeft, kRight>(left, right, kNumbers, square, [](int64_t) {}, more);
      }
      for (int64_t k = 0; k < std::min<int64_t>(kLeft, A - i); ++k) {
        for (int64_t c = 0; c < std::min<int64_t>(kRight, B - j); ++c) {
          sums[(i + k) * B + j + c] = tile[k * kRight + c] + more[k * kRight + c];
        }
      }
    }
  }
}

template <typename W>
FASTKD_KERNEL void combine_block(const W* A, const W* rows, int64_t N, int64_t D, int64_t block,
                                 W* h) {
  constexpr int kRows = kBytes == 32 ? 4 : 8;
  constexpr int kNumbers = kLanes<W>;
  using Part = Vector<W>;
  const int64_t room = room_of<W>(D), first = block * kBlock, end = std::min(N, first + kBlock);
  for (int64_t top = 0; top < N; top += kStrip) {
    const int64_t bottom = std::min(N, top + kStrip);
    for (int64_t start = 0; start < D; start += 2 * kNumbers) {
      for (int64_t i = first; i < end; i += kRows) {
        const W* factors[kRows];
        Part totals[kRows][2];
        unrolled<kRows>([&](auto k) {
          factors[k] = A + std::min(i + k, end - 1) * N;
          totals[k][0] = totals[k][1] = Part{};
          const W* sums = h + (i - first + k) * room + start;
          if (top) std::memcpy(totals[k], sums, sizeof(totals[k]));
        });
        for (int64_t j = top; j < bottom; ++j) {
          const W* row = rows + j * room + start;
          const Part low = load(row), high = load(row + kNumbers);
          unrolled<kRows>([&](auto k) {
            const W factor = factors[k][j];
            totals[k][0] += low * factor;
            totals[k][1] += high * factor;
          });
        }
        unrolled<kRows>([&](auto k) {
          std::memcpy(h + (i - first + k) * room + start, totals[k], sizeof(totals[k]));
        });
      }
    }
  }
}
