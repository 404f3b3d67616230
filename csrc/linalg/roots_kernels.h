// Kernel of roots.cpp; see base/each_processor.h. The compiler vectorises its loops.

FASTKD_KERNEL void eigen_of(const double* in, double* values, double* vectors,
                            const EigenScratch& scratch) {
  decompose(in, values, vectors, scratch, OneLane());
}
