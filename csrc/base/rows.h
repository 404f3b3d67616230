// Rows of memory of any dtype, read and written in the type W that a loss is computed in.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace fastkd {

enum class Type { kBFloat16, kHalf, kFloat, kDouble };

inline int64_t size_of(Type type) {
  return type == Type::kDouble ? 8 : type == Type::kFloat ? 4 : 2;
}

inline bool is_of(Type type, float) { return type == Type::kFloat; }
inline bool is_of(Type type, double) { return type == Type::kDouble; }

// Convert n numbers from and to another type, rounding to nearest even.
void widen(const void* row, Type type, int64_t n, float* wide);
void widen(const void* row, Type type, int64_t n, double* wide);
void narrow(const float* wide, int64_t n, Type type, void* row);
void narrow(const double* wide, int64_t n, Type type, void* row);

// Buffers for rows of n numbers, allocated on first use. Null where the rows have type W already.
template <typename W>
struct Copies {
  Type type;
  int64_t n;
  std::vector<W> memory{};

  W* operator[](int i) {
    if (is_of(type, W())) return nullptr;
    if (memory.empty()) memory.resize(kMostCopies * n);
    return memory.data() + i * n;
  }

  static constexpr int kMostCopies = 4;
};

// Rows of n numbers, each dense, ``stride`` numbers apart.
struct Rows {
  char* data;
  int64_t stride, n;
  Type type;

  char* place(int64_t row, int64_t start) const {
    return data + (row * stride + start) * size_of(type);
  }

  // Pointer to ``count`` numbers of a row as W: in place if they have type W, else converted to
  // ``copy``.
  template <typename W>
  const W* read(int64_t row, int64_t start, int64_t count, W* copy) const {
    const char* from = place(row, start);
    if (is_of(type, W())) return reinterpret_cast<const W*>(from);
    widen(from, type, count, copy);
    return copy;
  }

  // Buffer for ``count`` results as W: in place, or ``copy``, which `written` then converts. Null
  // if the rows are null.
  template <typename W>
  W* write(int64_t row, int64_t start, W* copy) const {
    if (data == nullptr) return nullptr;
    return is_of(type, W()) ? reinterpret_cast<W*>(place(row, start)) : copy;
  }

  template <typename W>
  void written(int64_t row, int64_t start, int64_t count, const W* copy) const {
    if (data == nullptr || is_of(type, W())) return;
    narrow(copy, count, type, place(row, start));
  }

  // One row.
  Rows only(int64_t row) const { return {place(row, 0), 0, n, type}; }

  // Sets the first row from float64.
  void fill(const double* numbers) const {
    if (type == Type::kDouble) {
      std::memcpy(data, numbers, n * sizeof(double));
    } else {
      narrow(numbers, n, type, data);
    }
  }

  // Set and get a number; for rows of one number.
  void put(int64_t row, double value) const {
    *write(row, 0, &value) = value;
    written(row, 0, 1, &value);
  }

  double get(int64_t row) const {
    double copy;
    return *read(row, 0, 1, &copy);
  }
};

// (samples, positions, D), each row dense.
struct Positions {
  char* data;
  int64_t samples, positions, D, stride_sample, stride_position;
  Type type;

  // Prefetch distance in rows. A row takes less time than memory needs to answer, and hardware does
  // not prefetch rows that lie apart.
  int64_t ahead() const { return positions > 1 ? 2 : 1; }

  Rows row(int64_t sample, int64_t position) const {
    const int64_t offset = sample * stride_sample + position * stride_position;
    return {data + offset * size_of(type), 0, D, type};
  }

  // The row, or null rows if there is none.
  Rows row_if_any(int64_t sample, int64_t position) const {
    const bool is_there = data != nullptr && sample < samples && position < positions;
    return is_there ? row(sample, position) : Rows{};
  }

  // Rows (positions, D) of a sample.
  Rows group(int64_t sample) const {
    return {data + sample * stride_sample * size_of(type), stride_position, D, type};
  }

  // With samples and positions exchanged.
  Positions turned() const {
    return {data, positions, samples, D, stride_position, stride_sample, type};
  }
};

}  // namespace fastkd
