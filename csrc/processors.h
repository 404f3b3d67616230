// What kernels for every kind of processor share, and which of them is called.
//
// A file of kernels, such as attention_kernels.h, is compiled once for each kind, in a namespace of
// its own and with vectors as wide as the kind's registers: see each_processor.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace fastkd {

template <typename T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using VectorN = typename VectorOf<T, N>::Type;

template <typename W>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  using Bits = int32_t;
  using Unsigned = uint32_t;  // in which nothing overflows
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr int kExpTerms = 8;  // what they leave out lies below half a rounding
  static constexpr float kLeastExp = -103.9721f;  // below e^x is 0
  static constexpr int kUp = 32;                  // e^kLeastExp·2^kUp is a normal number
  static constexpr float kDown = 0x1p-32f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440054690583e-4f;
};
template <>
struct FloatFormat<double> {
  using Bits = int64_t;
  using Unsigned = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int kExpTerms = 14;
  static constexpr double kLeastExp = -745.1332;
  static constexpr int kUp = 64;
  static constexpr double kDown = 0x1p-64;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770e-10;
};

constexpr long double kLn2 = 0.693147180559945309417232121458176568L;

// What makes exponents of numbers: a slope, that over log(2), and what is too low.
template <typename W>
struct Exponents {
  W slope, turn, least;

  explicit Exponents(double slope)
      : slope(W(slope)), turn(W(slope / kLn2)), least(W(FloatFormat<W>::kLeastExp / slope)) {}
};

// A line that is read soon, from memory that may end before it.
inline void fetch(const void* p) { __builtin_prefetch(p); }

// Near, but not into the nearest cache, where what is computed with stays.
inline void fetch_near(const char* p) { __builtin_prefetch(p, 0, 2); }

// A row that is read or written soon, fetched while another is worked on, number by number: of more
// lines at once than a few a processor would wait.
struct Next {
  const char* row = nullptr;
  int64_t size = 0;  // of a number, in bytes

  void fetch(int64_t i) const {
    if (row) fetch_near(row + i * size);
  }
};

// Other compilers don't bring the helpers of a kernel to its instructions, and sanitizers, which
// define FASTKD_BYTES, look at one kind.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(FASTKD_BYTES)
#define FASTKD_KINDS
#endif

// Instructions of x86-64-v4 and v3, and what every processor has.
enum class Processor { kUsual, kAvx2, kAvx512 };

// This one; less of it where PyTorch is told so, by ATEN_CPU_CAPABILITY=avx2 or default.
inline Processor find_processor() {
#if defined(FASTKD_KINDS)
  const char* const most = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string allowed = most ? most : "";
  __builtin_cpu_init();
  if (allowed == "default" || !__builtin_cpu_supports("x86-64-v3")) return Processor::kUsual;
  if (allowed == "avx2" || !__builtin_cpu_supports("x86-64-v4")) return Processor::kAvx2;
  return Processor::kAvx512;
#else
  return Processor::kUsual;
#endif
}
const Processor processor = find_processor();  // each file's own: libraries may differ

// What a kernel is called by.
#if defined(FASTKD_KINDS)
#define FASTKD_CALL(f, ...)                                 \
  (processor == Processor::kAvx512 ? avx512::f(__VA_ARGS__) \
   : processor == Processor::kAvx2 ? avx2::f(__VA_ARGS__)   \
                                   : usual::f(__VA_ARGS__))
#else
#define FASTKD_CALL(f, ...) usual::f(__VA_ARGS__)
#endif

}  // namespace fastkd
