// Included in every file on Linux (setup.py), so that a wheel built on a newer system runs from
// glibc 2.28 on: older versions of symbols whose newest version the headers would ask for. Symbols
// without an older version are in glibc_2_28.cpp. This file includes nothing, because Python.h has
// to come first.
#pragma once

#if __has_include(<gnu/libc-version.h>)
#if defined(__x86_64__)
#define FASTKD_GLIBC "@GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FASTKD_GLIBC "@GLIBC_2.17"
#endif
#endif

#if defined(FASTKD_GLIBC)
// glibc 2.34 moved these from libdl to libc, under a new version.
__asm__(".symver dladdr, dladdr" FASTKD_GLIBC);
__asm__(".symver dlclose, dlclose" FASTKD_GLIBC);
__asm__(".symver dlopen, dlopen" FASTKD_GLIBC);
__asm__(".symver dlsym, dlsym" FASTKD_GLIBC);
// glibc 2.29 has new versions that do not set errno; the results are the same.
__asm__(".symver exp, exp" FASTKD_GLIBC);
__asm__(".symver exp2, exp2" FASTKD_GLIBC);
__asm__(".symver log, log" FASTKD_GLIBC);
__asm__(".symver log2, log2" FASTKD_GLIBC);

#if __has_include(<bits/c++config.h>)
// libstdc++ 12 has a new version, which may throw.
#define FASTKD_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
__asm__(".symver " FASTKD_WAIT ", " FASTKD_WAIT "@GLIBCXX_3.4.11");
#endif
#endif
