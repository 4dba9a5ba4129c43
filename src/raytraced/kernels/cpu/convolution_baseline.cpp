#define RAYTRACED_ISA baseline
#include "convolution.inl"

raytraced::ConvolutionKernel raytraced::convolution_kernel_baseline() { return baseline::convolution_kernel(); }
