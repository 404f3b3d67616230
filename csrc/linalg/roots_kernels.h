// The kernel of roots.cpp; see each_processor.h. Its loops are made vectors by the compiler.

template <typename T>
FASTKD_KERNEL void roots_of(const T* in, Options options, T* root, T* values, T* vectors,
                            const EigenScratch& scratch) {
  decompose(in, options, root, values, vectors, scratch, OneLane());
}
