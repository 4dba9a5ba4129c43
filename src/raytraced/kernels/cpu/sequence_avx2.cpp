#define RAYTRACED_ISA avx2
#include "sequence.inl"

raytraced::SequenceKernel raytraced::sequence_kernel_avx2(const SequenceArgs& args) {
  return avx2::sequence_kernel<true>(args);
}
