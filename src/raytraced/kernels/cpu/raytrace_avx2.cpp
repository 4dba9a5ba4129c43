#define RAYTRACED_ISA avx2
#include "raytrace.inl"

raytraced::RaytraceKernel raytraced::raytrace_kernel_avx2(const RaytraceArgs& args) { return avx2::raytrace_kernel(args); }
