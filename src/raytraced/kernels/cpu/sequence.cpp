// The activation sequence for a whole batch: ranges of samples shared out over threads.
// The ranges depend on the batch alone, and their gradients are added in order, so no result depends on the threads.
#include "sequence.h"

#include <atomic>
#include <cstring>

#include "instructions.h"
#include "threads.h"

namespace raytraced {
namespace {

enum Purpose { GATES, WORK, GRADIENTS };

struct Batch {
  const SequenceArgs& args;
  SequenceKernel kernel;
  PackedGates gates;
  long long range, num_ranges;
  long long max_active = 0, gradient_bytes = 0;
  char* gradients = nullptr;
  std::atomic<bool> failed{false};

  explicit Batch(const SequenceArgs& args) : args(args), kernel(RAYTRACED_KERNEL(sequence_kernel, (args))) {
    const long long smallest = 32, most = 32;
    range = (args.batch + most - 1) / most;
    range = range < smallest ? smallest : range;
    num_ranges = (args.batch + range - 1) / range;
  }

  bool lay_out() {
    void* memory = scratch(GATES, kernel.packed_bytes(args));
    if (memory) kernel.lay_out(args, memory, gates);
    return memory;
  }

  long long end(long long index) const { return (index + 1) * range < args.batch ? (index + 1) * range : args.batch; }

  static void forward_range(void* context, long long index) {
    Batch& batch = *(Batch*)context;
    void* memory = scratch(WORK, batch.kernel.forward_bytes(batch.args));
    if (!memory) return batch.failed.store(true);
    batch.kernel.forward(batch.args, batch.gates, memory, index * batch.range, batch.end(index));
  }

  static void backward_range(void* context, long long index) {
    Batch& batch = *(Batch*)context;
    void* memory = scratch(WORK, batch.kernel.backward_bytes(batch.args, batch.max_active));
    if (!memory) return batch.failed.store(true);
    char* gradient = batch.gradients + index * batch.gradient_bytes;
    batch.kernel.backward(batch.args, batch.gates, memory, gradient, batch.max_active, index * batch.range,
                          batch.end(index));
  }
};

}  // namespace
}  // namespace raytraced

// Both return 0, or 1 where memory has run out.
extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs* args) {
  using namespace raytraced;
  Batch batch(*args);
  // One thread packs a gate when a sample first needs it: few samples need few gates.
  const bool alone = args->threads <= 1 || batch.num_ranges <= 1;
  if (!batch.lay_out()) return 1;
  if (!alone) batch.kernel.pack_all(*args, batch.gates);
  parallel(batch.num_ranges, args->threads, Batch::forward_range, &batch);
  return batch.failed;
}

extern "C" int raytraced_sequence_backward(const raytraced::SequenceArgs* args) {
  using namespace raytraced;
  Batch batch(*args);
  for (long long b = 0; b < args->batch && args->estimator != NONE; ++b)
    if (args->num_active[b] > batch.max_active) batch.max_active = args->num_active[b];
  batch.gradient_bytes = batch.kernel.gradient_bytes(*args);
  const long long num_gradients = batch.num_ranges ? batch.num_ranges : 1;
  batch.gradients = (char*)scratch(GRADIENTS, num_gradients * batch.gradient_bytes + 64);
  if (!batch.gradients || !batch.lay_out()) return 1;
  batch.kernel.pack_used(*args, batch.gates);
  if (!batch.num_ranges) std::memset(batch.gradients, 0, batch.gradient_bytes);
  parallel(batch.num_ranges, args->threads, Batch::backward_range, &batch);
  if (batch.failed) return 1;
  batch.kernel.reduce(*args, batch.gradients, num_gradients);
  return 0;
}
