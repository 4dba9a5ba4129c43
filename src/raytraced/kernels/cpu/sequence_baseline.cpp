#define RAYTRACED_ISA baseline
#include "sequence.inl"

raytraced::SequenceKernel raytraced::sequence_kernel_baseline(const SequenceArgs& args) {
  return baseline::sequence_kernel<false>(args);
}
