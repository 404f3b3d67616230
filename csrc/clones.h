#pragma once

// One binary for every x86-64: the loader picks the clone that the processor can run.
#if defined(FASTKD_CLONES)  // none for sanitizers, which are not ready when the loader asks
#elif defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTKD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define FASTKD_CLONES
#endif
