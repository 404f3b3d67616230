// CPU dispatch: which of the compiled copies of a kernel this processor runs.
//
// A file of kernels, such as losses/knn/knn_kernels.h, is compiled once for each kind of processor,
// in a namespace of its own and with vectors as wide as that processor's registers: see
// each_processor.h.
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

// Constants of a floating-point format, for the exponential.
template <typename W>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  using Bits = int32_t;
  using Unsigned = uint32_t;  // additions wrap around
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr int kExpTerms = 8;             // the rest of the series is below half a rounding
  static constexpr float kLeastExp = -103.9721f;  // e^x is 0 below
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

// The factor of x in e^(slope·x): slope, slope/log(2), and the x below which the result is 0.
template <typename W>
struct Exponents {
  W slope, turn, least;

  explicit Exponents(double slope)
      : slope(W(slope)), turn(W(slope / kLn2)), least(W(FloatFormat<W>::kLeastExp / slope)) {}
};

// Prefetches a cache line; p may lie beyond the end of the memory.
inline void fetch(const void* p) { __builtin_prefetch(p); }

// The same into the second cache: the first holds the current operands.
inline void fetch_near(const char* p) { __builtin_prefetch(p, 0, 2); }

// The row that is read or written next. The loop over the current row prefetches it number by
// number: a processor has few outstanding loads, so many lines at once would stall it.
struct Next {
  const char* row = nullptr;
  int64_t size = 0;  // bytes of a number

  void fetch(int64_t i) const {
    if (row) fetch_near(row + i * size);
  }
};

// Only gcc from version 12 on inlines a kernel's helpers with the kernel's instruction set.
// Sanitizers define FASTKD_BYTES and check one width of vectors.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(FASTKD_BYTES)
#define FASTKD_KINDS
#endif

// Bytes of a vector in code that runs on every processor.
#if defined(FASTKD_BYTES)
constexpr int kBaselineBytes = FASTKD_BYTES;
#else
constexpr int kBaselineBytes = 16;
#endif

enum class Processor { kBaseline, kAvx2, kAvx512 };  // any, x86-64-v3, x86-64-v4

// This processor's kind, or an older one by ATEN_CPU_CAPABILITY=avx2 or default, as in PyTorch.
inline Processor find_processor() {
#if defined(FASTKD_KINDS)
  const char* const most = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string allowed = most ? most : "";
  __builtin_cpu_init();
  if (allowed == "default" || !__builtin_cpu_supports("x86-64-v3")) return Processor::kBaseline;
  if (allowed == "avx2" || !__builtin_cpu_supports("x86-64-v4")) return Processor::kAvx2;
  return Processor::kAvx512;
#else
  return Processor::kBaseline;
#endif
}
const Processor processor = find_processor();

// Calls this processor's copy of kernel f.
#if defined(FASTKD_KINDS)
#define FASTKD_CALL(f, ...)                                 \
  (processor == Processor::kAvx512 ? avx512::f(__VA_ARGS__) \
   : processor == Processor::kAvx2 ? avx2::f(__VA_ARGS__)   \
                                   : baseline::f(__VA_ARGS__))
#else
#define FASTKD_CALL(f, ...) baseline::f(__VA_ARGS__)
#endif

}  // namespace fastkd
