// The convolution stages for a whole batch. Chunks of samples are shared out over threads; each has its own sum of the weights'
// gradients, and these are added up in the chunks' order, so no result depends on the threads.
#include "convolution.h"

#include <atomic>
#include <cstring>

#include "instructions.h"
#include "threads.h"

namespace raytraced {
namespace {

enum Purpose { WORK = 1, PARTIAL = 2 };

struct Batch {
  static constexpr long long CHUNK = 32;  // a multiple of 8
  const ConvolutionArgs& args;
  ConvolutionKernel kernel = RAYTRACED_KERNEL(convolution_kernel, ());
  float* partial = nullptr;
  std::atomic<bool> failed{false};

  explicit Batch(const ConvolutionArgs& args) : args(args) {}

  long long num_chunks() const { return (args.batch + CHUNK - 1) / CHUNK; }
  long long end(long long chunk) const { return (chunk + 1) * CHUNK < args.batch ? (chunk + 1) * CHUNK : args.batch; }
  void* memory() {
    void* block = scratch(WORK, kernel.scratch_bytes(args));
    if (!block) failed.store(true);
    return block;
  }

  static void forward_chunk(void* context, long long chunk) {
    Batch& batch = *(Batch*)context;
    if (void* block = batch.memory()) batch.kernel.forward(batch.args, block, chunk * CHUNK, batch.end(chunk));
  }
  static void backward_chunk(void* context, long long chunk) {
    Batch& batch = *(Batch*)context;
    float* partial = batch.partial + chunk * batch.args.num_parameters();
    if (void* block = batch.memory()) batch.kernel.backward(batch.args, block, partial, chunk * CHUNK, batch.end(chunk));
  }

  void add_up(float* gradient, long long offset, long long count) const {
    std::memset(gradient, 0, count * sizeof(float));
    for (long long chunk = 0; chunk < num_chunks(); ++chunk) {
      const float* part = partial + chunk * args.num_parameters() + offset;
      for (long long i = 0; i < count; ++i) gradient[i] += part[i];
    }
  }
};

}  // namespace
}  // namespace raytraced

// Both return 0, or 1 where memory has run out.
extern "C" int raytraced_convolution_forward(const raytraced::ConvolutionArgs* args) {
  using namespace raytraced;
  Batch batch(*args);
  parallel(batch.num_chunks(), args->threads, Batch::forward_chunk, &batch);
  return batch.failed;
}

extern "C" int raytraced_convolution_backward(const raytraced::ConvolutionArgs* args) {
  using namespace raytraced;
  Batch batch(*args);
  batch.partial = (float*)scratch(PARTIAL, (batch.num_chunks() * args->num_parameters() + 1) * sizeof(float));
  if (!batch.partial) return 1;
  parallel(batch.num_chunks(), args->threads, Batch::backward_chunk, &batch);
  if (batch.failed) return 1;
  long long offset = 0;
  for (long long s = 0; s < args->stages; ++s) {
    batch.add_up(args->grad_weight(s), offset, args->num_weights(s));
    offset += args->num_weights(s);
    batch.add_up(args->grad_bias(s), offset, args->channels[s + 1]);
    offset += args->channels[s + 1];
  }
  return 0;
}
