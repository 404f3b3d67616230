// Symbols that glibc and libstdc++ of systems with glibc 2.28 lack, see glibc_2_28.h.
#include <new>
#include <sstream>

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// glibc 2.32. With 0 shared pointers count atomically, as before.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// libstdc++ 13 (the standard streams are initialised by torch), 11 (weak, as a libstdc++.a has its
// own), and two constructors of libstdc++ 9.
namespace std {
__attribute__((visibility("hidden"))) void ios_base_library_init() {}
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
}  // namespace std

#endif
