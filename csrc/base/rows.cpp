// Conversions between half precision and the types that losses are computed in.
#include "base/rows.h"

#include "base/processors.h"

#if defined(FASTKD_KINDS)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns about its own header
#include <immintrin.h>
#endif

#define FASTKD_KERNELS "base/rows_kernels.h"
#include "base/each_processor.h"

namespace fastkd {
namespace {

constexpr int64_t kBlock = 512;

}  // namespace

void widen(const void* row, Type type, int64_t n, float* wide) {
  FASTKD_CALL(widen_row, row, type, n, wide);
}

void narrow(const float* wide, int64_t n, Type type, void* row) {
  FASTKD_CALL(narrow_row, wide, n, type, row);
}

void widen(const void* row, Type type, int64_t n, double* wide) {
  float block[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = n - start < kBlock ? n - start : kBlock;
    widen(static_cast<const char*>(row) + start * size_of(type), type, count, block);
    for (int64_t i = 0; i < count; ++i) wide[start + i] = block[i];
  }
}

void narrow(const double* wide, int64_t n, Type type, void* row) {
  float block[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = n - start < kBlock ? n - start : kBlock;
    for (int64_t i = 0; i < count; ++i) block[i] = float(wide[start + i]);
    narrow(block, count, type, static_cast<char*>(row) + start * size_of(type));
  }
}

}  // namespace fastkd
