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
int run(const SequenceArgs& sequence, ExpertsArgs& experts, long long weighting, const T* const* maps, long long rank) {
  const long long B = experts.batch, N = experts.experts, M = experts.nodes(), D = experts.dim();
  const long long num_seen = (experts.layers - 1) * N * (N + 1);
  for (long long b = 0; b < B; ++b) {
    const T* hidden = (const T*)experts.hidden + b * D;
    enter(maps[0], maps[1], hidden, D, N, (T*)sequence.entry + b * N);
    if (rank) see(maps[2], maps[3], hidden, D, rank, num_seen, (T*)sequence.sight + b * num_seen);
  }
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

// Fills in what the sequence gets from the hidden vectors, by the entry gate and by the maps of gates that see them (rank 0: they
// do not), and the experts from the sequence; returns 0, or 1 where memory has run out.
extern "C" int raytraced_raytrace(const raytraced::SequenceArgs* sequence, raytraced::ExpertsArgs* experts, long long weighting,
                                  const void* weight, const void* bias, const void* into, const void* out, long long rank) {
  const void* const maps[] = {weight, bias, into, out};
  if (sequence->is_double) return raytraced::run(*sequence, *experts, weighting, (const double* const*)maps, rank);
  return raytraced::run(*sequence, *experts, weighting, (const float* const*)maps, rank);
}
