// Compiles the file FASTKD_KERNELS for each kind of processor, beside vectors.h. Both have neither
// includes nor a namespace of their own; a function that is called from outside is a FASTKD_KERNEL,
// and what it calls becomes part of it, or its instructions would be any processor's.
//
//     #define FASTKD_KERNELS "attention_kernels.h"
//     #include "each_processor.h"
#include "processors.h"

namespace fastkd {
namespace {

#if defined(FASTKD_KINDS)
namespace avx512 {
constexpr int kBytes = 64;
constexpr bool kFuses = true;  // sums of products
#define FASTKD_KERNEL __attribute__((target("arch=x86-64-v4"), flatten))
#include "vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace avx512

namespace avx2 {
constexpr int kBytes = 32;
constexpr bool kFuses = true;
#define FASTKD_KERNEL __attribute__((target("arch=x86-64-v3"), flatten))
#include "vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace avx2
#endif

namespace usual {
#if defined(FASTKD_BYTES)
constexpr int kBytes = FASTKD_BYTES;
#else
constexpr int kBytes = 16;
#endif
constexpr bool kFuses = false;
#define FASTKD_KERNEL __attribute__((flatten))
#include "vectors.h"
#include FASTKD_KERNELS
#undef FASTKD_KERNEL
}  // namespace usual

}  // namespace
}  // namespace fastkd
