// The expert grid on the rows that each expert has: what Python passes, and what each instruction set's copy offers.
// Axes: B batch, L layers, N experts per layer, J linear layers of an expert, P pairs (row, expert), D width, O and K a linear
// layer's outputs and inputs. Pairs are sorted by chunk of rows, layer, expert and row.
#pragma once

namespace raytraced {

enum Stream : long long { RESIDUAL = 0, SKIP_SUM = 1, LAST = 2 };

// As class ExpertsArgs in cpp_experts.py; every field takes 8 bytes, tensors are contiguous.
struct ExpertsArgs {
  long long batch, layers, experts, linears, is_double, stream, threads, chunk, num_chunks;
  const int* rows;           // (P)
  const long long* offsets;  // (chunks, L * N + 1): where in `rows` an expert's pairs start
  const void *mix, *hidden;  // the experts' weights (B, L, N); (B, D)
  void *states, *out;        // what each layer gives, (L, B, D), the last only for SKIP_SUM; (B, D)
  void* results;             // of each pair, (P, D)
  const void* grad_out;      // (B, D); null in the forward pass
  const void* grad_states;   // as `states`, null for zeros; what is there for the last layer is not read
  void *grad_hidden, *grad_mix, *grad_results;  // (B, D), (B, L, N), (P, D)
  const long long* widths;  // (J + 1)
  // Tables of pointers: J weights (L, N, O, K), then J biases (L, N, O); the hidden activations of each pair, J - 1 times
  // (P, O padded to 16), null where none are kept; gradients as the parameters.
  void* const *parameters, *const *inner, *const *gradients;

  void* const* weights() const { return parameters; }
  void* const* biases() const { return parameters + linears; }
  void* const* grad_weights() const { return gradients; }
  void* const* grad_biases() const { return gradients + linears; }

  long long nodes() const { return layers * experts; }
  long long dim() const { return widths[0]; }
  const long long* chunk_offsets(long long c) const { return offsets + c * (nodes() + 1); }
  long long chunk_end(long long c) const { return (c + 1) * chunk < batch ? (c + 1) * chunk : batch; }
};

struct ExpertsKernel {
  long long (*scratch_bytes)(const ExpertsArgs&, long long num_rows);
  // One expert on its pairs of one chunk, into `results`; back, into `grad_results`, `grad_mix` and its weights' gradients.
  void (*run)(const ExpertsArgs&, void* scratch, long long chunk, long long node);
  void (*run_back)(const ExpertsArgs&, void* scratch, void* partial, long long chunk, long long node);
  // A layer's results for the rows begin ... end of a chunk, added up in the experts' order; back, their gradients.
  void (*join)(const ExpertsArgs&, long long chunk, long long layer, long long begin, long long end);
  void (*join_back)(const ExpertsArgs&, long long chunk, long long layer, long long begin, long long end);
  // The chunks' gradients of one expert's weights, added up in the chunks' order.
  void (*reduce)(const ExpertsArgs&, const void* partial, long long node);
};

ExpertsKernel experts_kernel_baseline(const ExpertsArgs&);
ExpertsKernel experts_kernel_avx2(const ExpertsArgs&);

}  // namespace raytraced
