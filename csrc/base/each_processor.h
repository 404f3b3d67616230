// Compiles the file FASTKD_KERNELS, and vectors.h for it, once for each kind of processor. Neither
// file has includes or a namespace of its own.
//
//     #define FASTKD_KERNELS "losses/attention/attention_kernels.h"
//     #include "base/each_processor.h"
//
// A kernel, called by FASTKD_CALL, is marked FASTKD_KERNEL. It uses `flatten`: a helper left out of
// line would be compiled for baseline x86-64 and lose AVX.
#include "base/processors.h"

namespace fastkd {
namespace {

#if defined(FASTKD_KINDS)
namespace avx512 {
constexpr int kBytes = 64;
constexpr bool kFuses = true;  // has fused multiply-add
#define FASTKD_KERNEL __attribute__((target("arch=x86-64-v4"), flatten))
#include "base/vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace avx512

namespace avx2 {
constexpr int kBytes = 32;
constexpr bool kFuses = true;
#define FASTKD_KERNEL __attribute__((target("arch=x86-64-v3"), flatten))
#include "base/vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace avx2
#endif

namespace baseline {
constexpr int kBytes = kBaselineBytes;
constexpr bool kFuses = false;
#define FASTKD_KERNEL __attribute__((flatten))
#include "base/vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace baseline

}  // namespace
}  // namespace fastkd
