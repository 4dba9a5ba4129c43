#define RAYTRACED_ISA baseline
#include "experts.inl"

raytraced::ExpertsKernel raytraced::experts_kernel_baseline(const ExpertsArgs& args) { return baseline::experts_kernel(args); }
