// Entry gate, activation sequence, weights and experts in one call, for batches so small that the calls would take longer than the
// arithmetic. Axes: as in sequence.h and experts.h.
#include <cmath>

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

// As class Args in cpp_raytrace.py: what stays the same from call to call; what a call brings is not filled in.
struct RaytraceArgs {
  SequenceArgs sequence;
  ExpertsArgs experts;
  long long weighting, rank;  // rank 0: gates do not see the hidden vectors
  const void* maps[4];        // the entry gate's (N, D) and (N); if gates see, (R, D) and (L-1, N, O, R)
};

// What passes from one part to the next.
template <typename T> struct Between {
  T *entry, *sight, *mix, *states, *results;
  int* rows;
  long long* offsets;
  char* next;

  Between(const ExpertsArgs& args, long long num_seen, void* memory) : next((char*)memory) {
    const long long B = args.batch, M = args.nodes(), D = args.dim();
    entry = take<T>(B * args.experts), sight = take<T>(B * num_seen);
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

// A start and the sum of products. It runs in several lanes, in the same order for every row.
template <typename T> T dot(T start, const T* weight, const T* hidden, long long D) {
  constexpr int LANES = 8;
  T sums[LANES] = {};
  long long d = 0;
  for (; d + LANES <= D; d += LANES)
    for (int lane = 0; lane < LANES; ++lane) sums[lane] += weight[d + lane] * hidden[d + lane];
  for (; d < D; ++d) sums[d % LANES] += weight[d] * hidden[d];
  for (int lane = 0; lane < LANES; ++lane) start += sums[lane];
  return start;
}

// One row's entry rates: softmax(W h + b), W (N, D).
template <typename T> void enter(const T* weight, const T* bias, const T* hidden, long long D, long long N, T* entry) {
  T most = 0, total = 0;
  for (long long i = 0; i < N; ++i) {
    const T sum = dot(bias[i], weight + i * D, hidden, D);
    entry[i] = sum;
    most = i && most >= sum ? most : sum;  // a NaN stays
  }
  for (long long i = 0; i < N; ++i) total += entry[i] = std::exp(entry[i] - most);
  for (long long i = 0; i < N; ++i) entry[i] /= total;
}

// What the gates of one row see: V (U h), U (R, D), V (num, R).
template <typename T> void see(const T* into, const T* out, const T* hidden, long long D, long long R, long long num, T* sight) {
  T seen[64];
  for (long long first = 0; first < R; first += 64) {
    const long long part = R - first < 64 ? R - first : 64;
    for (long long r = 0; r < part; ++r) seen[r] = dot(T(0), into + (first + r) * D, hidden, D);
    for (long long i = 0; i < num; ++i) sight[i] = dot(first ? sight[i] : T(0), out + i * R + first, seen, part);
  }
}

template <typename T>
int run(const RaytraceArgs& args, SequenceArgs& sequence, ExpertsArgs& experts) {
  const long long B = experts.batch, N = experts.experts, M = experts.nodes(), D = experts.dim();
  const long long num_seen = args.rank ? (experts.layers - 1) * N * (N + 1) : 0;
  void* memory = scratch(BETWEEN, Between<T>(experts, num_seen, nullptr).next - (char*)nullptr);
  if (!memory) return 1;
  const Between<T> between(experts, num_seen, memory);
  const T* const* maps = (const T* const*)args.maps;
  for (long long b = 0; b < B; ++b) {
    const T* hidden = (const T*)experts.hidden + b * D;
    enter(maps[0], maps[1], hidden, D, N, between.entry + b * N);
    if (args.rank) see(maps[2], maps[3], hidden, D, args.rank, num_seen, between.sight + b * num_seen);
  }
  sequence.entry = between.entry, sequence.sight = args.rank ? between.sight : nullptr;
  if (raytraced_sequence_forward(&sequence)) return 1;
  const T *active = (const T*)sequence.active, *rates = (const T*)sequence.rates;
  for (long long i = 0; i < B * M; i += N)
    weigh(active + i, rates + i, N, args.weighting, (T)sequence.rate_floor, between.mix + i);
  raytraced_experts_plan(B, M, sizeof(T) == 8, active, experts.chunk, 1, between.rows, between.offsets);
  experts.rows = between.rows, experts.offsets = between.offsets, experts.mix = between.mix;
  experts.states = between.states, experts.results = between.results;
  return raytraced_experts_forward(&experts);
}

}  // namespace
}  // namespace raytraced

// Hidden vectors to hidden vectors, with what was activated for them, shaped as in sequence.h; returns 0, or 1 where memory has
// run out.
extern "C" int raytraced_raytrace(const raytraced::RaytraceArgs* args, long long batch, const void* hidden, void* out,
                                  void* active, void* rates, void* output, long long* nodes, long long* num_active,
                                  const long long* seed, const long long* rows) {
  raytraced::SequenceArgs sequence = args->sequence;
  raytraced::ExpertsArgs experts = args->experts;
  sequence.batch = experts.batch = experts.chunk = batch;  // all rows in one chunk
  experts.hidden = hidden, experts.out = out, sequence.seed = seed, sequence.rows = rows;
  sequence.active = active, sequence.rates = rates, sequence.output = output;
  sequence.nodes = nodes, sequence.num_active = num_active;
  return sequence.is_double ? raytraced::run<double>(*args, sequence, experts) : raytraced::run<float>(*args, sequence, experts);
}
