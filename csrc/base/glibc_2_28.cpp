// What glibc and libstdc++ of systems with glibc 2.28 lack, see glibc_2_28.h.
#include <new>
#include <sstream>

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// Of glibc 2.32; with 0 shared pointers count atomically, as ever.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// Of libstdc++ 13, for streams that torch has ready and nothing here writes to; 11; and constructors
// of libstdc++ 9.
namespace std {
__attribute__((visibility("hidden"))) void ios_base_library_init() {}
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
}  // namespace std

#endif
