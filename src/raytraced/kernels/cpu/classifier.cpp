// A whole classifier in one call, for batches so small that the calls would take longer than the arithmetic: input layer,
// entry gate, activation sequence, experts, output layer. Axes: as in sequence.h and experts.h; I inputs, Y classes.
#include <cmath>
#include <cstring>

#include "experts.h"
#include "instructions.h"
#include "sequence.h"
#include "threads.h"

extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs*);
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs*);
extern "C" long long raytraced_experts_plan(long long, long long, long long, const void*, long long, long long, int*, long long*);

namespace raytraced {

enum Weighting : long long { UNIT = 0, RATES = 1, RATES_TO_ONE = 2 };

// Every field takes 8 bytes, in the order of the format in kernels/fused_classifier.py; tensors are contiguous.
struct ClassifierArgs {
  long long inputs, classes, weighting;
  const void *images;                      // (B, I)
  const void *input_weight, *input_bias;   // (D, I), (D)
  const void *gate_weight, *gate_bias;     // (N, D), (N)
  const void *output_weight, *output_bias; // (Y, D), (Y)
  void *logits;                            // (B, Y)
  SequenceArgs sequence;  // `entry` is filled in here
  ExpertsArgs experts;    // so are all tensors but `out`
};

namespace {

enum Purpose { WORK = 1, MODEL = 3 };

struct Pieces {
  char* next;
  template <typename T> T* take(long long count) {
    T* piece = (T*)next;
    next += (count * (long long)sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

template <typename T> struct Model {
  T *hidden, *entry, *mix, *states, *results;
  int* rows;
  long long* offsets;
  char* end;

  Model(const ClassifierArgs& args, char* memory) {
    const long long B = args.experts.batch, M = args.experts.nodes(), D = args.experts.dim();
    Pieces pieces = {memory};
    hidden = pieces.take<T>(B * D), entry = pieces.take<T>(B * args.experts.experts), mix = pieces.take<T>(B * M);
    states = pieces.take<T>(args.experts.layers * B * D), results = pieces.take<T>(B * M * D);
    rows = pieces.take<int>(B * M), offsets = pieces.take<long long>(M + 1);
    end = pieces.next;
  }
};

template <typename T> void softmax(T* row, long long count) {
  T most = row[0], total = 0;
  for (long long i = 1; i < count; ++i) most = row[i] > most ? row[i] : most;
  for (long long i = 0; i < count; ++i) total += row[i] = std::exp(row[i] - most);
  for (long long i = 0; i < count; ++i) row[i] /= total;
}

// The weights of one layer's active experts, as layer.py defines them.
template <typename T> void weigh(const T* active, const T* rates, long long N, long long weighting, T floor, T* mix) {
  T total = 0, count = 0;
  for (long long i = 0; i < N; ++i) total += active[i] * rates[i], count += active[i];
  const T scale = weighting == RATES ? count : T(1);
  for (long long i = 0; i < N; ++i)
    mix[i] = weighting == UNIT || !(total > 0) ? active[i] : active[i] * (rates[i] / (total > floor ? total : floor)) * scale;
}

template <typename T> int classify(ClassifierArgs& args) {
  ExpertsArgs& experts = args.experts;
  SequenceArgs& sequence = args.sequence;
  const long long B = experts.batch, N = experts.experts, M = experts.nodes(), D = experts.dim();
  char* memory = (char*)scratch(MODEL, Model<T>(args, nullptr).end - (char*)nullptr);
  // One block of rows at a time has 16 lanes or fewer.
  const long long most = D > args.inputs ? D : args.inputs, wide = N > args.classes ? N : args.classes;
  void* work = scratch(WORK, (B + 32) * (most + (wide > D ? wide : D) + 32) * sizeof(T));
  if (!memory || !work) return 1;
  const Model<T> model(args, memory);
#if defined(__x86_64__)
  const auto kernel = instructions() == Instructions::avx2 ? experts_kernel_avx2(experts) : experts_kernel_baseline(experts);
#else
  const auto kernel = experts_kernel_baseline(experts);
#endif
  kernel.linear(args.images, B, args.inputs, args.input_weight, args.input_bias, D, model.hidden, work);
  kernel.linear(model.hidden, B, D, args.gate_weight, args.gate_bias, N, model.entry, work);
  for (long long b = 0; b < B; ++b) softmax(model.entry + b * N, N);
  sequence.entry = model.entry;
  if (raytraced_sequence_forward(&sequence)) return 1;
  const T *active = (const T*)sequence.active, *rates = (const T*)sequence.rates;
  for (long long i = 0; i < B * M; i += N)
    weigh(active + i, rates + i, N, args.weighting, (T)sequence.rate_floor, model.mix + i);
  raytraced_experts_plan(B, M, sizeof(T) == 8, active, experts.chunk, 1, model.rows, model.offsets);
  experts.rows = model.rows, experts.offsets = model.offsets, experts.mix = model.mix, experts.hidden = model.hidden;
  experts.states = model.states, experts.results = model.results;
  if (raytraced_experts_forward(&experts)) return 1;
  work = scratch(WORK, (B + 32) * (most + (wide > D ? wide : D) + 32) * sizeof(T));
  if (!work) return 1;
  kernel.linear(experts.out, B, D, args.output_weight, args.output_bias, args.classes, args.logits, work);
  return 0;
}

}  // namespace
}  // namespace raytraced

// Returns 0, or 1 where memory has run out; at most 16 linear layers an expert.
extern "C" int raytraced_classifier(const raytraced::ClassifierArgs* given) {
  using namespace raytraced;
  // A copy to fill in, with what follows the experts' arguments.
  struct {
    ClassifierArgs args;
    long long tail[6 * 16 + 1];
  } copy;
  std::memcpy(&copy, given, sizeof(ClassifierArgs) + (6 * given->experts.linears + 1) * sizeof(long long));
  return copy.args.experts.is_double ? classify<double>(copy.args) : classify<float>(copy.args);
}
