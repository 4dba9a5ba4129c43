#define RAYTRACED_ISA avx2
#include "convolution.inl"

raytraced::ConvolutionKernel raytraced::convolution_kernel_avx2() { return avx2::convolution_kernel(); }
