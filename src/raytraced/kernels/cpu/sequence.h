// The activation sequence of a batch: what Python passes, and what each instruction set's copy of the kernel offers.
// Axes: B batch, L layers, N experts per layer, M = L*N nodes, O = N + 1 outlets, T steps.
#pragma once

namespace raytraced {

enum Estimator : long long { STRAIGHT_THROUGH = 0, REINMAX = 1, GUMBEL = 2, NONE = 3 };

// As class SequenceArgs in cpp_sequence.py; every field takes 8 bytes, tensors are contiguous.
struct SequenceArgs {
  long long batch, layers, experts, steps, is_double, estimator, dominant, threads, rank;
  double temperature, rate_floor, output_counts;  // the last: how much, beside the nodes, when one is drawn
  const void *first, *inner, *entry;  // gates (N, O) and (L-2, N, O, N), entry rates (B, N)
  // What the input adds to the logits of gates: (B, L-1, N, O), or two factors (B, R) and (L-1, N, O, R), or null.
  const void *input_logits, *projected, *factor;
  const long long *seed, *rows;       // one number, null for greedy; (B,), null for 0 ... B-1
  const void* stops;                  // (B,), in place of output_counts, a number for each sample; or null
  const long long* followed;          // (B, T), the nodes of a recorded sequence, -1 after the last; null: they are chosen
  void* active;                       // (B, M)
  long long *nodes, *num_active;      // (B, T), (B,)
  void *rates, *output;               // (B, M), (B,)
  // The backward pass reads nodes and num_active; a null gradient is zero.
  const void *grad_active, *grad_rates, *grad_output;
  void *grad_first, *grad_inner, *grad_entry, *grad_input_logits, *grad_projected, *grad_factor;
};

// The gates in the layouts of the kernel, rows padded with zeros to whole vectors. All but `inputs` are multiplied by
// 1 / ln 2, so that a softmax can take powers of two.
struct PackedGates {
  void* outlets;         // (L-2, N, N inputs, outlets): a node's gate, outlets in lanes
  void* inputs;          // (L-2, N, O, inputs): the same gate, inputs in lanes
  void* out;             // (L-2, N inputs, nodes): the weights of the outlet to the output node, nodes in lanes
  void* first;           // (N, outlets)
  void* first_out;       // (nodes)
  unsigned char* ready;  // (L-2, N): is `outlets` filled in for this node?
  void* largest;         // (L-1, N): a gate's largest |W|
  void* input_gates;           // (L-1, N, R, outlets and then the output node): the shared factor; not multiplied
};

// One specialisation: a type, a vector width, and perhaps a fixed N.
struct SequenceKernel {
  long long (*packed_bytes)(const SequenceArgs&);
  void (*lay_out)(const SequenceArgs&, void* memory, PackedGates&);
  void (*pack_all)(const SequenceArgs&, PackedGates&);
  void (*pack_used)(const SequenceArgs&, PackedGates&);
  long long (*forward_bytes)(const SequenceArgs&);
  void (*forward)(const SequenceArgs&, PackedGates&, void* scratch, long long begin, long long end);
  long long (*backward_bytes)(const SequenceArgs&, long long max_active);
  long long (*gradient_bytes)(const SequenceArgs&);
  // What the samples of one range give, into `gradient`.
  void (*backward)(const SequenceArgs&, PackedGates&, void* scratch, void* gradient, long long max_active, long long begin,
                   long long end);
  // Sums the ranges' gradients in their order into grad_first and grad_inner.
  void (*reduce)(const SequenceArgs&, const void* gradients, long long num_gradients);
};

SequenceKernel sequence_kernel_baseline(const SequenceArgs&);
SequenceKernel sequence_kernel_avx2(const SequenceArgs&);

}  // namespace raytraced
