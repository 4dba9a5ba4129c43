// Entry gate, activation sequence, weights and experts in one call, without gradients for batches so small that the calls would
// take longer than the arithmetic, and with gradients for training. Ranges of rows depend on the batch alone and sums have a
// fixed order, so no result depends on the threads.
#include "raytrace.h"

#include <cstring>

#include "instructions.h"
#include "pairs.h"
#include "pieces.h"
#include "threads.h"

extern "C" int raytraced_sequence_forward(const raytraced::SequenceArgs*);
extern "C" int raytraced_sequence_backward(const raytraced::SequenceArgs*);
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs*);
extern "C" int raytraced_experts_backward(const raytraced::ExpertsArgs*);

namespace raytraced {
namespace {

enum Purpose { BETWEEN = 3 };

struct Pass : RaytracePass {
  RaytraceKernel kernel;
  long long range, num_ranges;
  char* partial = nullptr;

  Pass(const RaytraceArgs& args, const RaytraceCall& call) : RaytracePass{args, call, {}}, kernel(RAYTRACED_KERNEL(raytrace_kernel, (args))) {
    const long long smallest = 64, most = 32;
    range = (call.batch + most - 1) / most;
    range = range < smallest ? smallest : range;
    num_ranges = (call.batch + range - 1) / range;
  }

  long long number() const { return args.sequence.is_double ? 8 : 4; }
  long long partial_bytes() const { return (num_maps() * number() + 63) / 64 * 64; }
  long long end(long long index) const { return (index + 1) * range < call.batch ? (index + 1) * range : call.batch; }

  // All three return how many bytes they take.
  long long lay_out(void* memory) {
    const ExpertsArgs& grid = args.experts;
    const long long B = call.batch, M = grid.nodes();
    Pieces pieces(memory, number());
    between.entry = pieces.numbers(B * grid.experts), between.projected = pieces.numbers(B * args.sequence.rank);
    between.mix = pieces.numbers(B * M);
    between.pair_rows = (int*)pieces.bytes(B * M * sizeof(int));
    between.pair_offsets = (long long*)pieces.bytes(call.num_chunks * (M + 1) * sizeof(long long));
    between.states = call.states ? call.states : pieces.numbers(grid.layers * B * grid.dim());
    return pieces.used();
  }
  long long lay_out_pairs(void* memory, long long num_pairs) {
    Pieces pieces(memory, number());
    between.results = pieces.numbers(num_pairs * args.experts.dim());
    for (long long j = 0; j + 1 < args.experts.linears; ++j)
      between.inner[j] = pieces.numbers(num_pairs * ((args.experts.widths[j + 1] + 15) / 16 * 16));
    return pieces.used();
  }
  long long lay_out_back(void* memory, long long num_pairs) {
    const long long B = call.batch;
    Pieces pieces(memory, number());
    between.grad_mix = pieces.numbers(B * args.experts.nodes()), between.grad_entry = pieces.numbers(B * args.experts.experts);
    between.grad_projected = pieces.numbers(B * args.sequence.rank);
    between.grad_results = pieces.numbers(num_pairs * args.experts.dim());
    return pieces.used();
  }
  long long num_pairs() const { return between.pair_offsets[call.num_chunks * (args.experts.nodes() + 1) - 1]; }

  static void enter(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.enter(pass, index * pass.range, pass.end(index));
  }
  static void weigh(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.weigh(pass, index * pass.range, pass.end(index));
  }
  static void weigh_back(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.weigh_back(pass, index * pass.range, pass.end(index));
  }
  static void enter_back(void* context, long long index) {
    Pass& pass = *(Pass*)context;
    pass.kernel.enter_back(pass, pass.partial + index * pass.partial_bytes(), index * pass.range, pass.end(index));
  }
  void share(void (*part)(void*, long long)) { parallel(num_ranges, call.threads, part, this); }

  RaytraceTable gradients() const { return {call.gradients, args.sequence.rank, args.sequence.layers}; }
  SequenceArgs sequence() const {
    SequenceArgs one = args.sequence;
    one.batch = call.batch, one.threads = call.threads, one.seed = call.seed, one.rows = call.rows, one.entry = between.entry;
    one.stops = call.stops, one.followed = call.followed;
    one.active = call.active, one.rates = call.rates, one.output = call.output;
    one.nodes = call.nodes, one.num_active = call.num_active;
    if (one.rank) one.projected = between.projected, one.factor = args.table.maps[3];
    one.grad_active = call.grad_active, one.grad_rates = call.grad_rates, one.grad_output = call.grad_output;
    const RaytraceTable gradients = this->gradients();
    one.grad_first = gradients.gates[0], one.grad_inner = gradients.gates[1], one.grad_entry = between.grad_entry;
    one.grad_projected = between.grad_projected, one.grad_factor = gradients.maps[3];
    return one;
  }
  ExpertsArgs experts(bool keep) const {
    ExpertsArgs one = args.experts;
    one.batch = call.batch, one.threads = call.threads, one.chunk = call.chunk, one.num_chunks = call.num_chunks;
    one.rows = between.pair_rows, one.offsets = between.pair_offsets, one.mix = between.mix, one.hidden = call.hidden;
    one.states = between.states, one.out = call.out, one.results = between.results;
    one.inner = keep ? between.inner : nullptr;
    one.grad_out = call.grad_out, one.grad_states = call.grad_states, one.grad_hidden = call.grad_hidden;
    one.grad_mix = between.grad_mix, one.grad_results = between.grad_results;
    one.gradients = gradients().experts;
    return one;
  }

  bool find_paths() {
    share(enter);
    const SequenceArgs one = sequence();
    if (raytraced_sequence_forward(&one)) return false;
    share(weigh);
    return true;
  }
  bool route() {
    const long long bytes = call.batch * args.experts.dim() * number();
    if (call.start && args.experts.stream == RESIDUAL) std::memcpy(call.start, call.hidden, bytes);
    else if (call.start) std::memset(call.start, 0, bytes);
    if (!find_paths()) return false;
    // From the sequences: most rows activate few nodes.
    const auto each_active = [this](long long row, auto found) {
      for (long long step = 0; step < call.num_active[row]; ++step) found(call.nodes[row * args.sequence.steps + step]);
    };
    const long long nodes = args.experts.nodes();
    sort_pairs(call.batch, nodes, call.chunk, call.num_chunks, between.pair_rows, between.pair_offsets, each_active);
    return true;
  }
  int run(bool keep) {
    const ExpertsArgs one = experts(keep);
    return raytraced_experts_forward(&one);
  }
  int back() {
    const long long bytes = lay_out_back(nullptr, num_pairs());
    char* memory = (char*)scratch(BETWEEN, bytes + (num_ranges + 1) * partial_bytes());
    if (!memory) return 1;
    lay_out_back(memory, num_pairs()), partial = memory + bytes;
    const ExpertsArgs grid = experts(true);
    if (raytraced_experts_backward(&grid)) return 1;
    share(weigh_back);
    const SequenceArgs path = sequence();
    if (raytraced_sequence_backward(&path)) return 1;
    if (!num_ranges) std::memset(partial, 0, partial_bytes());
    share(enter_back);
    args.sequence.is_double ? finish<double>() : finish<float>();
    return 0;
  }
  // The gradient of the vectors before the first layer; and the ranges' gradients of the maps, added up in their order.
  template <typename T> void finish() {
    const long long N = args.sequence.experts, D = args.experts.dim();
    const T* start = args.experts.stream == RESIDUAL ? (const T*)call.grad_start : nullptr;
    for (long long i = 0; start && i < call.batch * D; ++i) ((T*)call.grad_hidden)[i] += start[i];
    T* sum = (T*)partial;
    for (long long index = 1; index < num_ranges; ++index) {
      const T* more = (const T*)(partial + index * partial_bytes());
      for (long long i = 0; i < num_maps(); ++i) sum[i] += more[i];
    }
    const RaytraceTable gradients = this->gradients();
    std::memcpy(gradients.maps[0], sum, N * D * sizeof(T));
    std::memcpy(gradients.maps[1], sum + N * D, N * sizeof(T));
    if (args.sequence.rank) std::memcpy(gradients.maps[2], sum + N * D + N, args.sequence.rank * D * sizeof(T));
  }
};

}  // namespace
}  // namespace raytraced

// Hidden vectors to hidden vectors, with what was activated for them, all in the library's own memory; returns 0, or 1 where
// that has run out.
extern "C" int raytraced_raytrace(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call) {
  using namespace raytraced;
  const RaytraceArgs args(*layer);
  Pass pass(args, *call);
  const long long most = call->batch * args.experts.nodes(), first = pass.lay_out(nullptr);
  char* memory = (char*)scratch(BETWEEN, first + pass.lay_out_pairs(nullptr, most));
  if (!memory) return 1;
  pass.lay_out(memory), pass.lay_out_pairs(memory + first, most);
  return !pass.route() || pass.run(false);
}

// The first half alone, for experts that run elsewhere: what is activated, and the weights in the sum (B, L, N). Returns as above.
extern "C" int raytraced_raytrace_paths(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call, void* mix) {
  using namespace raytraced;
  const RaytraceArgs args(*layer);
  Pass pass(args, *call);
  void* memory = scratch(BETWEEN, pass.lay_out(nullptr));
  if (!memory) return 1;
  pass.lay_out(memory), pass.between.mix = mix;
  return !pass.find_paths();
}

// The same with gradients, in memory that the caller keeps for the backward pass: `memory`, of so many bytes, and `pairs`.
extern "C" long long raytraced_raytrace_bytes(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call) {
  const raytraced::RaytraceArgs args(*layer);
  return raytraced::Pass(args, *call).lay_out(nullptr);
}

// Who runs, and with which weight; returns how many bytes `pairs` needs, or -1 where memory has run out.
extern "C" long long raytraced_raytrace_route(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call) {
  const raytraced::RaytraceArgs args(*layer);
  raytraced::Pass pass(args, *call);
  pass.lay_out(call->memory);
  return pass.route() ? pass.lay_out_pairs(nullptr, pass.num_pairs()) : -1;
}

extern "C" int raytraced_raytrace_run(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call) {
  const raytraced::RaytraceArgs args(*layer);
  raytraced::Pass pass(args, *call);
  pass.lay_out(call->memory), pass.lay_out_pairs(call->pairs, pass.num_pairs());
  return pass.run(true);
}

extern "C" int raytraced_raytrace_back(const raytraced::RaytraceLayer* layer, const raytraced::RaytraceCall* call) {
  const raytraced::RaytraceArgs args(*layer);
  raytraced::Pass pass(args, *call);
  pass.lay_out(call->memory), pass.lay_out_pairs(call->pairs, pass.num_pairs());
  return pass.back();
}
