// Roots of one symmetric matrix by two-sided Jacobi rotations, many lanes on one matrix: the lanes
// of a CUDA block in shared memory, or a single lane on the CPU, where the tests run it.
//
// A sweep rotates every pair of rows once, in n − 1 rounds of n / 2 disjoint pairs (round robin), so
// that a round's rotations are independent. It stops when a whole sweep found nothing to rotate.
// In double precision throughout: float results are then right to their last digit.
#pragma once

#include <cstdint>

#include "roots.h"

namespace fastkd {

constexpr int kMaxSweeps = 20;

// Scratch of one matrix. Rows are padded to an odd length: columns then hit different banks.
struct JacobiScratch {
  double* a;        // (n, stride)
  double* rows;     // (n, stride), row k the eigenvector of a[k, k]
  double* sines;    // (pairs)
  double* taus;     // (pairs), tan of half the angle
  double* partial;  // (lanes)
  int* places;      // (n) + 1 flag

  static FASTKD_HOST_DEVICE int stride(int n) { return n | 1; }

  static FASTKD_HOST_DEVICE size_t bytes(int n, int lanes) {
    return (2 * size_t(n) * stride(n) + n + 2 + lanes) * sizeof(double) + (n + 1) * sizeof(int);
  }

  FASTKD_HOST_DEVICE JacobiScratch(void* memory, int n, int lanes) {
    a = static_cast<double*>(memory);
    rows = a + n * stride(n);
    sines = rows + n * stride(n);
    taus = sines + (n + 1) / 2;
    partial = taus + (n + 1) / 2;
    places = reinterpret_cast<int*>(partial + lanes + 1);
  }
};

// The pair of rows (first < second) that slot i rotates in this round; second == n means none.
FASTKD_HOST_DEVICE void pair_of(int slot, int round, int n, int* first, int* second) {
  const int players = n + (n & 1), ring = players - 1;
  const int x = slot == 0 ? ring : (round + slot) % ring;
  const int y = slot == 0 ? round : (round - slot + ring) % ring;
  *first = x < y ? x : y;
  *second = x < y ? y : x;
}

// x and y turned by an angle, as small changes to both (Rutishauser): hundreds of turns add up to
// far less rounding than cosine·x − sine·y would.
FASTKD_HOST_DEVICE void rotate(double* x, double* y, double sine, double tau) {
  const double before = *x;
  *x = before - sine * (*y + tau * before);
  *y = *y + sine * (before - tau * *y);
}

// in, root, vectors: (n, n); values: (n). ``lanes`` has index, count and sync().
template <typename T, typename Lanes>
FASTKD_HOST_DEVICE void jacobi_roots(const T* in, int n, Options options, T* root, T* values,
                                     T* vectors, JacobiScratch s, Lanes lanes) {
  const int stride = JacobiScratch::stride(n);
  const double eps = std::numeric_limits<double>::epsilon();
  int* flag = s.places + n;

  // Scaled to at most 1, so that no square overflows; 0·x is NaN for NaN and inf, 0 otherwise.
  double largest = 0, poison = 0;
  for (int e = lanes.index; e < n * n; e += lanes.count) {
    const double x = (double(in[e]) + double(in[(e % n) * n + e / n])) / 2;
    largest = fabs(x) > largest ? fabs(x) : largest;
    poison += 0 * x;
    s.a[(e / n) * stride + e % n] = x;
    s.rows[(e / n) * stride + e % n] = e / n == e % n;
  }
  s.partial[lanes.index] = largest + poison;
  lanes.sync();
  double scale = 0;
  for (int i = 0; i < lanes.count; ++i) {
    const double x = s.partial[i];
    scale = x > scale || x != x ? x : scale;
    if (scale != scale) break;
  }
  if (scale != scale) {
    for (int e = lanes.index; e < n * n; e += lanes.count) root[e] = vectors[e] = T(scale);
    for (int e = lanes.index; e < n; e += lanes.count) values[e] = T(scale);
    return;
  }
  const double inverse_scale = scale > 0 ? 1 / scale : 1.0;
  for (int e = lanes.index; e < n * n; e += lanes.count) {
    s.a[(e / n) * stride + e % n] *= inverse_scale;
  }
  lanes.sync();

  // Below this share of the trace an entry is rounding: chasing it would only add more.
  double floor = 0;
  for (int i = 0; i < n; ++i) floor += fabs(s.a[i * stride + i]) / 8;

  const int pairs = (n + 1) / 2, rounds = n + (n & 1) - 1;
  for (int sweep = 0; sweep < kMaxSweeps && n > 1; ++sweep) {
    if (lanes.index == 0) *flag = 0;
    lanes.sync();
    for (int round = 0; round < rounds; ++round) {
      for (int slot = lanes.index; slot < pairs; slot += lanes.count) {
        int p, q;
        pair_of(slot, round, n, &p, &q);
        double sine = 0, tau = 0;
        if (q < n) {
          const double app = s.a[p * stride + p], aqq = s.a[q * stride + q], apq = s.a[p * stride + q];
          const double size = sqrt(fabs(app)) * sqrt(fabs(aqq));
          if (fabs(apq) > eps * (size > floor ? size : floor)) {
            const double theta = (aqq - app) / (2 * apq);
            const double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(1 + theta * theta));
            const double cosine = 1 / sqrt(1 + t * t);
            sine = t * cosine;
            tau = sine / (1 + cosine);
            *flag = 1;  // by any number of lanes, always the same value
          }
        }
        s.sines[slot] = sine;
        s.taus[slot] = tau;
      }
      lanes.sync();
      for (int e = lanes.index; e < pairs * n; e += lanes.count) {
        int p, q;
        pair_of(e / n, round, n, &p, &q);
        const double sine = s.sines[e / n], tau = s.taus[e / n];
        if (q < n && sine != 0) {
          const int k = e % n;
          double* m = s.a;
          for (int matrix = 0; matrix < 2; ++matrix, m = s.rows) {
            rotate(&m[p * stride + k], &m[q * stride + k], sine, tau);
          }
        }
      }
      lanes.sync();
      for (int e = lanes.index; e < pairs * n; e += lanes.count) {
        int p, q;
        pair_of(e / n, round, n, &p, &q);
        const double sine = s.sines[e / n], tau = s.taus[e / n];
        if (q < n && sine != 0) {
          double* row = s.a + (e % n) * stride;
          rotate(&row[p], &row[q], sine, tau);
        }
      }
      lanes.sync();
    }
    const bool rotated = *flag;
    lanes.sync();
    if (!rotated) break;
  }

  // Ascending places; equal values keep their order.
  for (int i = lanes.index; i < n; i += lanes.count) {
    const double x = s.a[i * stride + i];
    int place = 0;
    for (int j = 0; j < n; ++j) {
      const double y = s.a[j * stride + j];
      place += y < x || (y == x && j < i);
    }
    s.places[i] = place;
  }
  lanes.sync();
  double top = 0;
  for (int i = 0; i < n; ++i) top = s.a[i * stride + i] > top ? s.a[i * stride + i] : top;
  top = top * scale + options.ridge;
  lanes.sync();
  for (int i = lanes.index; i < n; i += lanes.count) {
    const double x = s.a[i * stride + i];
    const double value = (x > 0 ? x * scale : 0.0) + options.ridge;
    values[s.places[i]] = T(value);
    s.a[i * stride + i] = root_of<T>(value, top, options);
  }
  lanes.sync();
  for (int e = lanes.index; e < n * n; e += lanes.count) {
    const int i = e / n, j = e % n;
    double sum = 0;
    for (int k = 0; k < n; ++k) {
      sum += s.a[k * stride + k] * (s.rows[k * stride + i] * s.rows[k * stride + j]);
    }
    root[e] = T(sum);
    vectors[j * n + s.places[i]] = T(s.rows[i * stride + j]);
  }
}

}  // namespace fastkd
