// Ahead of every file on Linux (setup.py): names that the oldest systems wheels are for, of glibc
// 2.28, have for what a newer system's headers ask of glibc and libstdc++ under newer ones. What has
// no older name is in glibc_2_28.cpp. Nothing is included: Python.h wants to be the first.
#pragma once

#if __has_include(<gnu/libc-version.h>)
#if defined(__x86_64__)
#define FASTKD_GLIBC "@GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FASTKD_GLIBC "@GLIBC_2.17"
#endif
#endif

#if defined(FASTKD_GLIBC)
// These moved to libc's own library, under a new version.
__asm__(".symver dladdr, dladdr" FASTKD_GLIBC);
__asm__(".symver dlclose, dlclose" FASTKD_GLIBC);
__asm__(".symver dlopen, dlopen" FASTKD_GLIBC);
__asm__(".symver dlsym, dlsym" FASTKD_GLIBC);
// The same numbers; glibc 2.29 has names for them that leave errno alone.
__asm__(".symver exp, exp" FASTKD_GLIBC);
__asm__(".symver exp2, exp2" FASTKD_GLIBC);
__asm__(".symver log, log" FASTKD_GLIBC);
__asm__(".symver log2, log2" FASTKD_GLIBC);

#if __has_include(<bits/c++config.h>)
// libstdc++ 12 has another name for one that may end in an exception.
#define FASTKD_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
__asm__(".symver " FASTKD_WAIT ", " FASTKD_WAIT "@GLIBCXX_3.4.11");
#endif
#endif
