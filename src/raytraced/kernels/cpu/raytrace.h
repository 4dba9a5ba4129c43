// Hidden vectors through the entry gate, the activation sequence, the weights and the experts: what Python passes, and what each
// instruction set's copy of the parts between offers. Axes: as in sequence.h and experts.h; R the rank of the input maps.
#pragma once

#include "experts.h"
#include "sequence.h"

namespace raytraced {

// The numbers of cpp_raytrace.py.
enum Weighting : long long { UNIT = 0, RATES_TO_ONE = 1, RATES = 2, RELATIVE = 3 };

constexpr int MOST_WIDTHS = 18;

// As class RaytraceLayer in cpp_raytrace.py: a layer, and how its sequences are found; every number takes 8 bytes.
struct RaytraceLayer {
  long long layers, experts, steps, is_double, estimator, dominant, rank, linears, stream, weighting;
  double temperature, rate_floor, output_counts, weight_scale;
  long long widths[MOST_WIDTHS];  // (J + 1), as in experts.h
  void* const* parameters;  // as RaytraceTable has them
};

// A table of pointers to all parameters of a layer, or to their gradients, by name; a null table gives null pointers.
struct RaytraceTable {
  void* maps[4] = {};     // of the hidden vector: the entry gate's (N, D) and (N); the input maps (R, D) and (L-1, N, O, R) if R > 0
  void* gates[2] = {};    // (N, O) and (L-2, N, O, N), as far as there are any
  void* const* experts = nullptr;  // weights and biases, as in experts.h

  RaytraceTable(void* const* table, long long rank, long long layers) {
    if (!table) return;
    for (long long i = 0; i < (rank ? 4 : 2); ++i) maps[i] = *table++;
    for (long long i = 0; i < 2 && i < layers - 1; ++i) gates[i] = *table++;
    experts = table;
  }
};

// The same as arguments of the parts; what a call brings is not filled in.
struct RaytraceArgs {
  SequenceArgs sequence;
  ExpertsArgs experts;
  long long weighting;
  double weight_scale;  // of all weights
  RaytraceTable table;

  explicit RaytraceArgs(const RaytraceLayer& layer)
      : sequence(), experts(), weighting(layer.weighting), weight_scale(layer.weight_scale),
        table(layer.parameters, layer.rank, layer.layers) {
    sequence.layers = experts.layers = layer.layers, sequence.experts = experts.experts = layer.experts;
    sequence.is_double = experts.is_double = layer.is_double, sequence.steps = layer.steps;
    sequence.estimator = layer.estimator, sequence.dominant = layer.dominant, sequence.rank = layer.rank;
    sequence.temperature = layer.temperature, sequence.rate_floor = layer.rate_floor;
    sequence.output_counts = layer.output_counts, sequence.first = table.gates[0], sequence.inner = table.gates[1];
    experts.linears = layer.linears, experts.stream = layer.stream;
    experts.widths = layer.widths, experts.parameters = table.experts;
  }
};

// As class RaytraceCall in cpp_raytrace.py: what a call brings; every field takes 8 bytes, tensors are contiguous.
struct RaytraceCall {
  long long batch, threads, chunk, num_chunks;
  void *active, *rates, *output;           // as in sequence.h
  long long *nodes, *num_active;
  const void* hidden;                      // (B, D)
  const void* stops;                       // as in sequence.h, and so the next three
  const long long *seed, *rows, *followed;
  void *out, *states, *start;              // (B, D); with exits (L-1, B, D) and (B, D), else null: each layer's output, and the first input
  void *memory, *pairs;                    // for what passes from one part to the next, see RaytraceBetween
  const void *grad_out, *grad_states, *grad_start, *grad_output;
  void *grad_active, *grad_rates;          // (B, L, N): what came from outside, and then what comes from the weights too
  void* grad_hidden;
  void* const* gradients;                  // as the layer's parameters
};

// As class EarlyExitCall in cpp_early_exit.py: each row leaves with the first answer that is confident enough. Y classes, S steps.
struct EarlyExitCall {
  long long batch, threads, classes;
  const void *hidden, *weight, *bias;      // (B, D); the output layer's (Y, D) and (Y)
  const double* thresholds;                // (L + 1), of the largest probability, before the first layer and after each
  const unsigned char* mask;               // (B), null for ones: a row of 0 leaves with its first answer
  const void* stops;                       // (B), null: as in sequence.h
  void *logits, *active;                   // (B, Y), (B, L, N): which experts ran
  long long *nodes, *num_active, *num_exits;  // (B, S): the whole sequence, if it was asked for; (B), (B)
};

// What passes from one part to the next.
struct RaytraceBetween {
  void *entry, *projected, *mix, *states;  // (B, N), (B, R), (B, L, N); as in experts.h, and so all that follow
  int* pair_rows;
  long long* pair_offsets;
  void *results, *inner[16];
  void *grad_mix, *grad_results, *grad_entry, *grad_projected;
};

struct RaytracePass {
  const RaytraceArgs& args;
  const RaytraceCall& call;
  RaytraceBetween between;

  long long num_maps() const {  // numbers of all maps but the last
    return (args.sequence.experts + args.sequence.rank) * args.experts.dim() + args.sequence.experts;
  }
};

// Each for the rows begin ... end.
struct RaytraceKernel {
  void (*enter)(const RaytracePass&, long long begin, long long end);
  void (*weigh)(const RaytracePass&, long long begin, long long end);
  void (*weigh_back)(const RaytracePass&, long long begin, long long end);
  // Adds to grad_hidden; the gradient of the maps, one after the other, goes into `partial`.
  void (*enter_back)(const RaytracePass&, void* partial, long long begin, long long end);
  // The logits of one row from its vector; whether they are confident enough for this exit.
  bool (*answer)(const EarlyExitCall&, const void* vector, long long dim, long long row, long long exit);
};

RaytraceKernel raytrace_kernel_baseline(const RaytraceArgs&);
RaytraceKernel raytrace_kernel_avx2(const RaytraceArgs&);

}  // namespace raytraced
