// Activation sequence, weights and experts in one call, for batches so small that the calls would take longer than the
// arithmetic. Axes: as in sequence.h and experts.h.
#include "experts.h"
#include "sequence.h"
#include "threads.h"

extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs*);
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs*);
extern "C" long long raytraced_experts_plan(long long, long long, long long, const void*, long long, long long, int*, long long*);

namespace raytraced {
namespace {

// The numbers of cpp_raytrace.py.
enum Weighting : long long { UNIT = 0, RATES_TO_ONE = 1, RATES = 2 };
enum Purpose { BETWEEN = 3 };

// What passes from one part to the next.
template <typename T> struct Between {
  T *mix, *states, *results;
  int* rows;
  long long* offsets;
  char* next;

  Between(const ExpertsArgs& args, void* memory) : next((char*)memory) {
    const long long B = args.batch, M = args.nodes(), D = args.dim();
    mix = take<T>(B * M), states = take<T>(args.layers * B * D), results = take<T>(B * M * D);
    rows = take<int>(B * M), offsets = take<long long>(M + 1);
  }
  template <typename U> U* take(long long count) {
    U* piece = (U*)next;
    next += (count * (long long)sizeof(U) + 63) / 64 * 64;
    return piece;
  }
};

// The weights of one layer's active experts, as sequence.py defines them.
template <typename T> void weigh(const T* active, const T* rates, long long N, long long weighting, T floor, T* mix) {
  T total = 0, count = 0;
  for (long long i = 0; i < N; ++i) total += active[i] * rates[i], count += active[i];
  const T scale = weighting == RATES ? count : T(1);
  for (long long i = 0; i < N; ++i)
    mix[i] = weighting == UNIT || !(total > 0) ? active[i] : active[i] * (rates[i] / (total > floor ? total : floor)) * scale;
}

template <typename T> int run(const SequenceArgs& sequence, ExpertsArgs& experts, long long weighting) {
  const long long B = experts.batch, N = experts.experts, M = experts.nodes();
  void* memory = scratch(BETWEEN, Between<T>(experts, nullptr).next - (char*)nullptr);
  if (!memory || raytraced_sequence_forward(&sequence)) return 1;
  const Between<T> between(experts, memory);
  const T *active = (const T*)sequence.active, *rates = (const T*)sequence.rates;
  for (long long i = 0; i < B * M; i += N)
    weigh(active + i, rates + i, N, weighting, (T)sequence.rate_floor, between.mix + i);
  raytraced_experts_plan(B, M, sizeof(T) == 8, active, experts.chunk, 1, between.rows, between.offsets);
  experts.rows = between.rows, experts.offsets = between.offsets, experts.mix = between.mix;
  experts.states = between.states, experts.results = between.results;
  return raytraced_experts_forward(&experts);
}

}  // namespace
}  // namespace raytraced

// Fills in what the experts get from the sequence; returns 0, or 1 where memory has run out.
extern "C" int raytraced_raytrace(const raytraced::SequenceArgs* sequence, raytraced::ExpertsArgs* experts, long long weighting) {
  return sequence->is_double ? raytraced::run<double>(*sequence, *experts, weighting)
                             : raytraced::run<float>(*sequence, *experts, weighting);
}
