// Entry gate, activation sequence, weights and experts in one call, without gradients for batches so small that the calls would
// take longer than the arithmetic, and with gradients for training. Ranges of rows depend on the batch alone and sums have a
// fixed order, so no result depends on the threads.
#include "raytrace.h"

#include <cstring>

#include "instructions.h"
#include "threads.h"

extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs*);
extern "C" int raytraced_sequence_backward(const raytraced::SequenceArgs*);
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs*);
extern "C" int raytraced_experts_backward(const raytraced::ExpertsArgs*);

namespace raytraced {
namespace {

enum Purpose { BETWEEN = 3 };

struct Pass {
  const RaytraceArgs& args;
  const RaytraceCall& call;
  RaytraceKernel kernel;
  long long range, num_ranges;
  char* partial = nullptr;

  Pass(const RaytraceArgs& args, const RaytraceCall& call) : args(args), call(call), kernel(choose(args)) {
    const long long smallest = 64, most = 32;
    range = (call.batch + most - 1) / most;
    range = range < smallest ? smallest : range;
    num_ranges = (call.batch + range - 1) / range;
  }

  static RaytraceKernel choose(const RaytraceArgs& args) {
#if defined(__x86_64__)
    if (instructions() == Instructions::avx2) return raytrace_kernel_avx2(args);
#endif
    return raytrace_kernel_baseline(args);
  }

  long long number() const { return args.sequence.is_double ? 8 : 4; }
  long long partial_bytes() const { return (call.size(args) * number() + 63) / 64 * 64; }
  long long end(long long index) const { return (index + 1) * range < call.batch ? (index + 1) * range : call.batch; }

  static void enter(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.enter(pass.args, pass.call, index * pass.range, pass.end(index));
  }
  static void weigh(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.weigh(pass.args, pass.call, index * pass.range, pass.end(index));
  }
  static void weigh_back(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.weigh_back(pass.args, pass.call, index * pass.range, pass.end(index));
  }
  static void enter_back(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    char* partial = pass.partial + index * pass.partial_bytes();
    pass.kernel.enter_back(pass.args, pass.call, partial, index * pass.range, pass.end(index));
  }
  void share(void (*part)(void*, long long)) { parallel(num_ranges, call.threads, part, this); }

  SequenceArgs sequence() const {
    SequenceArgs one = args.sequence;
    one.batch = call.batch, one.threads = call.threads, one.seed = call.seed, one.rows = call.rows, one.entry = call.entry;
    one.active = call.active, one.rates = call.rates, one.output = call.output;
    one.nodes = call.nodes, one.num_active = call.num_active;
    if (one.rank) one.seen = call.seen, one.factor = args.maps[3];
    one.grad_active = call.grad_active, one.grad_rates = call.grad_rates, one.grad_output = call.grad_output;
    one.grad_first = call.grad_first, one.grad_inner = call.grad_inner, one.grad_entry = call.grad_entry;
    one.grad_seen = call.grad_seen, one.grad_factor = call.grad_maps[3];
    return one;
  }
  ExpertsArgs experts() const {
    ExpertsArgs one = args.experts;
    one.batch = call.batch, one.threads = call.threads, one.chunk = call.chunk, one.num_chunks = call.num_chunks;
    one.rows = call.pair_rows, one.offsets = call.pair_offsets, one.mix = call.mix, one.hidden = call.hidden;
    one.states = call.states, one.out = call.out, one.results = call.results, one.inner = call.inner;
    one.grad_out = call.grad_out, one.grad_states = call.grad_states, one.grad_hidden = call.grad_hidden;
    one.grad_mix = call.grad_mix, one.grad_results = call.grad_results, one.gradients = call.gradients;
    return one;
  }

  long long route() {
    const long long bytes = call.batch * args.experts.dim() * number();
    if (call.start && args.experts.stream == RESIDUAL) std::memcpy(call.start, call.hidden, bytes);
    else if (call.start) std::memset(call.start, 0, bytes);
    share(enter);
    const SequenceArgs one = sequence();
    if (raytraced_sequence_forward(&one)) return -1;
    share(weigh);
    return plan();
  }
  // As raytraced_experts_plan, from the sequences: most rows activate few nodes.
  long long plan() const {
    const long long M = args.experts.nodes(), T = args.sequence.steps;
    long long total = 0;
    for (long long c = 0; c < call.num_chunks; ++c) {
      const long long begin = c * call.chunk, end = begin + call.chunk < call.batch ? begin + call.chunk : call.batch;
      long long* offset = call.pair_offsets + c * (M + 1);
      std::memset(offset, 0, (M + 1) * sizeof(long long));
      for (long long b = begin; b < end; ++b)
        for (long long step = 0; step < call.num_active[b]; ++step) ++offset[call.nodes[b * T + step]];
      for (long long node = 0; node < M; ++node) {
        const long long count = offset[node];
        offset[node] = total, total += count;
      }
      for (long long b = begin; b < end; ++b)
        for (long long step = 0; step < call.num_active[b]; ++step) call.pair_rows[offset[call.nodes[b * T + step]]++] = (int)b;
      for (long long node = M; node > 0; --node) offset[node] = offset[node - 1];  // each had moved on to its end
      offset[0] = c ? offset[-1] : 0;
    }
    return total;
  }
  int run() {
    const ExpertsArgs one = experts();
    return raytraced_experts_forward(&one);
  }
  int back() {
    const ExpertsArgs grid = experts();
    if (raytraced_experts_backward(&grid)) return 1;
    share(weigh_back);
    const SequenceArgs path = sequence();
    if (raytraced_sequence_backward(&path)) return 1;
    partial = (char*)scratch(BETWEEN, (num_ranges + 1) * partial_bytes());
    if (!partial) return 1;
    if (!num_ranges) std::memset(partial, 0, partial_bytes());
    share(enter_back);
    if (call.start && args.experts.stream == RESIDUAL) args.sequence.is_double ? begin<double>() : begin<float>();
    args.sequence.is_double ? reduce<double>() : reduce<float>();
    return 0;
  }
  // What the looks' start gives, last of all.
  template <typename T> void begin() {
    const T* start = (const T*)call.start;
    for (long long i = 0; i < call.batch * args.experts.dim(); ++i) ((T*)call.grad_hidden)[i] += start[i];
  }
  // The ranges' gradients of the maps, added up in their order.
  template <typename T> void reduce() {
    const long long N = args.sequence.experts, D = args.experts.dim(), size = call.size(args);
    T* sum = (T*)partial;
    for (long long index = 1; index < num_ranges; ++index) {
      const T* more = (const T*)(partial + index * partial_bytes());
      for (long long i = 0; i < size; ++i) sum[i] += more[i];
    }
    std::memcpy(call.grad_maps[0], sum, N * D * sizeof(T));
    std::memcpy(call.grad_maps[1], sum + N * D, N * sizeof(T));
    if (args.sequence.rank) std::memcpy(call.grad_maps[2], sum + N * D + N, args.sequence.rank * D * sizeof(T));
  }
};

// What passes from one part to the next, where nobody keeps it.
struct Between {
  char* next;
  Between(const RaytraceArgs& args, RaytraceCall& call, void* memory) : next((char*)memory) {
    const long long B = call.batch, M = args.experts.nodes(), D = args.experts.dim(), number = args.sequence.is_double ? 8 : 4;
    call.entry = take(B * args.experts.experts * number), call.seen = take(B * args.sequence.rank * number);
    call.mix = take(B * M * number), call.states = take(args.experts.layers * B * D * number);
    call.results = take(B * M * D * number);
    call.pair_rows = (int*)take(B * M * sizeof(int)), call.pair_offsets = (long long*)take((M + 1) * sizeof(long long));
  }
  void* take(long long bytes) {
    char* piece = next;
    next += (bytes + 63) / 64 * 64;
    return piece;
  }
};

}  // namespace
}  // namespace raytraced

// Hidden vectors to hidden vectors, with what was activated for them, shaped as in sequence.h; returns 0, or 1 where memory has
// run out.
extern "C" int raytraced_raytrace(const raytraced::RaytraceArgs* args, long long batch, const void* hidden, void* out,
                                  void* active, void* rates, void* output, long long* nodes, long long* num_active,
                                  const long long* seed, const long long* rows) {
  using namespace raytraced;
  RaytraceCall call = {};
  call.batch = call.chunk = batch, call.threads = call.num_chunks = 1;  // all rows in one chunk
  call.hidden = hidden, call.out = out, call.seed = seed, call.rows = rows;
  call.active = active, call.rates = rates, call.output = output, call.nodes = nodes, call.num_active = num_active;
  void* memory = scratch(BETWEEN, Between(*args, call, nullptr).next - (char*)nullptr);
  if (!memory) return 1;
  Between(*args, call, memory);
  Pass pass(*args, call);
  return pass.route() < 0 || pass.run();
}

// The same in two steps, since nobody knows before the first how much the second needs: who runs, with which weight, and how many
// pairs of row and expert that are (-1 where memory has run out); then the experts. And back through both.
extern "C" long long raytraced_raytrace_route(const raytraced::RaytraceArgs* args, const raytraced::RaytraceCall* call) {
  return raytraced::Pass(*args, *call).route();
}
extern "C" int raytraced_raytrace_run(const raytraced::RaytraceArgs* args, const raytraced::RaytraceCall* call) {
  return raytraced::Pass(*args, *call).run();
}
extern "C" int raytraced_raytrace_back(const raytraced::RaytraceArgs* args, const raytraced::RaytraceCall* call) {
  return raytraced::Pass(*args, *call).back();
}
