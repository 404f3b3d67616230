// Kernel of roots.cpp; see base/each_processor.h. The compiler vectorises its loops.

template <typename T>
FASTKD_KERNEL void roots_of(const T* in, Options options, T* root, T* values, T* vectors,
                            const EigenScratch& scratch) {
  decompose(in, options, root, values, vectors, scratch, OneLane());
}
