// Stages of convolution 3×3 with a border of zeros, ReLU and the maximum of each 2×2: what Python passes, and what each
// instruction set's copy offers.
// Axes: B batch, S stages, C and K a stage's input and output channels, H × W its pixels, half as many (rounded down) after it.
#pragma once

namespace raytraced {

// As class ConvolutionArgs in cpp_convolution.py; every field takes 8 bytes, tensors are contiguous.
struct ConvolutionArgs {
  long long batch, stages, height, width, threads;
  const float* images;  // (B, C, H, W)
  float* out;           // (B, K, H, W) of the last stage
  // What the backward pass reads, both null where there will be none; `kept_size` and `num_winners` for each sample of the
  // batch, rounded up to a multiple of 8.
  float* kept;   // the inputs of all stages but the first
  int* winners;  // of each 2×2, which was the maximum, in row-major order, or CUT where ReLU made it 0; four in a number
  const float* grad_out;  // as `out`; null in the forward pass
  float* grad_images;     // as `images`; null where it is not wanted
  const long long* channels;  // (S + 1)
  // Tables of pointers: S weights (K, C, 3, 3), then S biases (K); gradients as these.
  float* const *parameters, *const *gradients;

  const float* weight(long long s) const { return parameters[s]; }
  const float* bias(long long s) const { return parameters[stages + s]; }
  float* grad_weight(long long s) const { return gradients[s]; }
  float* grad_bias(long long s) const { return gradients[stages + s]; }

  long long rows(long long s) const { return height >> s; }
  long long columns(long long s) const { return width >> s; }
  // The numbers that a stage takes from one sample with their border, and how many it makes.
  long long bordered(long long s) const { return channels[s] * (rows(s) + 2) * (columns(s) + 2); }
  long long pooled(long long s) const { return channels[s + 1] * rows(s + 1) * columns(s + 1); }
  long long winner_columns(long long s) const { return (columns(s + 1) + 3) / 4; }
  long long winners_of(long long s) const { return channels[s + 1] * rows(s + 1) * winner_columns(s); }
  // Inlined always: compiled for AVX2 and shared, a loop could be the copy that the linker keeps for all files.
#define ALWAYS inline __attribute__((always_inline))
  ALWAYS long long kept_size() const {
    long long size = 0;
    for (long long s = 1; s < stages; ++s) size += bordered(s);
    return size;
  }
  ALWAYS long long num_winners() const {
    long long size = 0;
    for (long long s = 0; s < stages; ++s) size += winners_of(s);
    return size;
  }
  long long num_weights(long long s) const { return channels[s] * channels[s + 1] * 9; }
  ALWAYS long long num_parameters() const {
    long long size = 0;
    for (long long s = 0; s < stages; ++s) size += num_weights(s) + channels[s + 1];
    return size;
  }
#undef ALWAYS
};

struct ConvolutionKernel {
  long long (*scratch_bytes)(const ConvolutionArgs&);
  // The samples begin ... end; both begin at a multiple of 8.
  void (*forward)(const ConvolutionArgs&, void* scratch, long long begin, long long end);
  // The same back; the gradients of each stage's weights and biases, one after the other, are written to `partial`.
  void (*backward)(const ConvolutionArgs&, void* scratch, float* partial, long long begin, long long end);
};

ConvolutionKernel convolution_kernel_baseline();
ConvolutionKernel convolution_kernel_avx2();

}  // namespace raytraced
