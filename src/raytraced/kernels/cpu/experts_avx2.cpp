#define RAYTRACED_ISA avx2
#include "experts.inl"

raytraced::ExpertsKernel raytraced::experts_kernel_avx2(const ExpertsArgs& args) { return avx2::experts_kernel(args); }
