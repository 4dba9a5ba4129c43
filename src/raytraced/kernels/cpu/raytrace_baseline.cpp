#define RAYTRACED_ISA baseline
#include "raytrace.inl"

raytraced::RaytraceKernel raytraced::raytrace_kernel_baseline(const RaytraceArgs& args) { return baseline::raytrace_kernel(args); }
