// Early exit: layer by layer until each row has a confident answer, in one call and without gradients. The rows that have not
// left yet are kept together. Blocks of rows are distributed over threads; no row's result depends on the others.
#include <atomic>
#include <cstring>

#include "instructions.h"
#include "pieces.h"
#include "raytrace.h"
#include "threads.h"

extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs*);
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs*);
extern "C" long long raytraced_experts_plan(long long batch, long long nodes, long long is_double, const void* active,
                                            long long chunk, long long num_chunks, int* rows, long long* offsets);

namespace raytraced {
namespace {

typedef long long i64;
enum Purpose { BETWEEN = 3 };
constexpr i64 BLOCK = 256;

// One block; n of its rows have not left yet, in the order of `staying`.
template <typename T> struct Block {
  const RaytraceArgs& args;
  const EarlyExitCall& call;
  const RaytraceKernel kernel = RAYTRACED_KERNEL(raytrace_kernel, (args));
  const i64 L = args.sequence.layers, N = args.sequence.experts, S = args.sequence.steps, D = args.experts.dim();
  const i64 stream = args.experts.stream;
  i64 n = 0;
  RaytraceCall routed = {};                     // of the rows that did not leave at the first exit
  RaytraceBetween between = {};
  T *hidden, *given, *sum;                      // (n, D): a layer's input and output; the sum so far of the skip-sum stream
  T *active, *mix, *results;                    // of one layer: (n, N), (n, N), (pairs, D)
  T* stops;                                     // (n): how much the output node's rate counts, where rows differ
  int* pair_rows;
  i64 *offsets, *staying, *place, *last;          // (N + 1); (n): the row, where in `routed`, the last layer in which an expert is active for it
  void* parameters[2 * 17];                     // of one layer

  i64 lay_out(void* memory, i64 rows) {
    Pieces pieces(memory, sizeof(T));
    hidden = (T*)pieces.numbers(rows * D), given = (T*)pieces.numbers(rows * D), sum = (T*)pieces.numbers(rows * D);
    active = (T*)pieces.numbers(rows * N), mix = (T*)pieces.numbers(rows * N), results = (T*)pieces.numbers(rows * N * D);
    stops = (T*)pieces.numbers(rows);
    between.entry = pieces.numbers(rows * N), between.projected = pieces.numbers(rows * args.sequence.rank);
    between.mix = pieces.numbers(rows * L * N);
    routed.active = pieces.numbers(rows * L * N), routed.rates = pieces.numbers(rows * L * N), routed.output = pieces.numbers(rows);
    routed.nodes = (i64*)pieces.bytes(rows * S * sizeof(i64)), routed.num_active = (i64*)pieces.bytes(rows * sizeof(i64));
    offsets = (i64*)pieces.bytes((N + 1) * sizeof(i64)), staying = (i64*)pieces.bytes(rows * sizeof(i64));
    place = (i64*)pieces.bytes(rows * sizeof(i64)), last = (i64*)pieces.bytes(rows * sizeof(i64));
    pair_rows = (int*)pieces.bytes(rows * N * sizeof(int));
    return pieces.used();
  }

  static void copy(T* to, const T* from, i64 count) { std::memcpy(to, from, count * sizeof(T)); }

  void first_exit(i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      const T* vector = (const T*)call.hidden + row * D;
      std::memset(sum + n * D, 0, D * sizeof(T));
      std::memset((T*)call.active + row * L * N, 0, L * N * sizeof(T));
      for (i64 s = 0; s < S; ++s) call.nodes[row * S + s] = -1;
      const bool may_stay = !call.mask || call.mask[row];
      call.num_active[row] = 0, call.num_exits[row] = may_stay;
      const bool is_confident = kernel.answer(call, stream == RESIDUAL ? vector : sum + n * D, D, row, 0);
      if (is_confident || !may_stay) continue;
      copy(hidden + n * D, vector, D);
      if (call.stops) stops[n] = ((const T*)call.stops)[row];
      staying[n++] = row;
    }
  }

  // Every sequence is known before any expert runs.
  bool route() {
    routed.batch = n, routed.threads = 1, routed.hidden = hidden;
    const RaytracePass pass{args, routed, between};
    kernel.enter(pass, 0, n);
    SequenceArgs one = args.sequence;
    one.batch = n, one.threads = 1, one.entry = between.entry, one.active = routed.active, one.rates = routed.rates;
    one.output = routed.output, one.nodes = routed.nodes, one.num_active = routed.num_active;
    if (call.stops) one.stops = stops;
    if (one.rank) one.projected = between.projected, one.factor = args.table.maps[3];
    if (raytraced_sequence_forward(&one)) return false;
    kernel.weigh(pass, 0, n);
    for (i64 i = 0; i < n; ++i) {
      for (i64 s = 0; s < S; ++s) call.nodes[staying[i] * S + s] = routed.nodes[i * S + s];
      place[i] = i, last[i] = 0;
      for (i64 s = 0; s < routed.num_active[i]; ++s) {
        const i64 layer = routed.nodes[i * S + s] / N;
        last[i] = layer > last[i] ? layer : last[i];
      }
    }
    return true;
  }

  bool run(i64 layer) {
    for (i64 i = 0; i < n; ++i) {
      const i64 from = (place[i] * L + layer) * N;
      copy(active + i * N, (const T*)routed.active + from, N), copy(mix + i * N, (const T*)between.mix + from, N);
    }
    raytraced_experts_plan(n, N, sizeof(T) == 8, active, n, 1, pair_rows, offsets);
    ExpertsArgs one = args.experts;
    for (i64 j = 0; j < one.linears; ++j) {
      const i64 outputs = one.widths[j + 1], first = layer * N * outputs;
      parameters[j] = (T*)one.weights()[j] + first * one.widths[j], parameters[one.linears + j] = (T*)one.biases()[j] + first;
    }
    one.batch = one.chunk = n, one.layers = one.threads = one.num_chunks = 1, one.stream = stream == RESIDUAL ? RESIDUAL : LAST;
    one.rows = pair_rows, one.offsets = offsets, one.mix = mix, one.hidden = hidden, one.out = given, one.results = results;
    one.parameters = parameters;
    return !raytraced_experts_forward(&one);
  }

  void take_exit(i64 layer) {
    i64 kept = 0;
    for (i64 i = 0; i < n; ++i) {
      const i64 row = staying[i];
      T *vector = given + i * D, *so_far = sum + i * D;
      if (stream == SKIP_SUM)
        for (i64 d = 0; d < D; ++d) so_far[d] += vector[d];
      copy((T*)call.active + (row * L + layer) * N, active + i * N, N);
      for (i64 e = 0; e < N; ++e) call.num_active[row] += active[i * N + e] != 0;
      ++call.num_exits[row];
      const bool is_confident = kernel.answer(call, stream == SKIP_SUM ? so_far : vector, D, row, layer + 1);
      if (is_confident || layer == L - 1 || (stream != LAST && layer >= last[place[i]])) continue;  // empty layers change nothing
      staying[kept] = row, place[kept] = place[i];
      copy(hidden + kept * D, vector, D);
      std::memmove(sum + kept * D, so_far, D * sizeof(T));
      ++kept;
    }
    n = kept;
  }

  bool answer(i64 begin, i64 end) {
    void* memory = scratch(BETWEEN, lay_out(nullptr, end - begin));
    if (!memory) return false;
    lay_out(memory, end - begin);
    first_exit(begin, end);
    if (n && !route()) return false;
    for (i64 layer = 0; layer < L && n; ++layer) {
      if (!run(layer)) return false;
      take_exit(layer);
    }
    return true;
  }
};

struct Job {
  const RaytraceArgs& args;
  const EarlyExitCall& call;
  std::atomic<bool> failed{false};

  static void block(void* context, i64 index) {
    Job& job = *(Job*)context;
    const i64 begin = index * BLOCK, end = begin + BLOCK < job.call.batch ? begin + BLOCK : job.call.batch;
    const bool done = job.args.sequence.is_double ? Block<double>{job.args, job.call}.answer(begin, end)
                                                  : Block<float>{job.args, job.call}.answer(begin, end);
    if (!done) job.failed.store(true);
  }
};

}  // namespace
}  // namespace raytraced

// Returns 0, or 1 where memory has run out.
extern "C" int raytraced_early_exit(const raytraced::RaytraceLayer* layer, const raytraced::EarlyExitCall* call) {
  using namespace raytraced;
  const RaytraceArgs args(*layer);
  Job job{args, *call};
  parallel((call->batch + BLOCK - 1) / BLOCK, call->threads, Job::block, &job);
  return job.failed;
}

// One exit alone, for experts that run elsewhere: the logits of all rows of `hidden`, and which are confident enough (B).
extern "C" int raytraced_early_exit_answers(const raytraced::RaytraceLayer* layer, const raytraced::EarlyExitCall* call,
                                            long long exit, unsigned char* is_confident) {
  using namespace raytraced;
  const RaytraceArgs args(*layer);
  const RaytraceKernel kernel = RAYTRACED_KERNEL(raytrace_kernel, (args));
  const i64 dim = args.experts.dim(), row_bytes = dim * (args.sequence.is_double ? 8 : 4);
  for (i64 row = 0; row < call->batch; ++row)
    is_confident[row] = kernel.answer(*call, (const char*)call->hidden + row * row_bytes, dim, row, exit);
  return 0;
}
