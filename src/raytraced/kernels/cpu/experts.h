// The expert grid on the rows that each expert has: what Python passes, and what each instruction set's copy offers.
// Axes: B batch, L layers, N experts a layer, J linear layers of an expert, P pairs (row, expert), D width, O and K a linear
// layer's outputs and inputs. Pairs are sorted by chunk of rows, layer, expert and row.
#pragma once

namespace raytraced {

enum Stream : long long { RESIDUAL = 0, SKIP_SUM = 1, LAST = 2 };

// Every field takes 8 bytes, in the order of the format in kernels/experts.py; tensors are contiguous.
struct ExpertsArgs {
  long long batch, layers, experts, linears, is_double, stream, threads, chunk, num_chunks;
  const int* rows;           // (P)
  const long long* offsets;  // (chunks, L * N + 1): where in `rows` an expert's pairs start
  const void *mix, *hidden;  // the experts' weights (B, L, N); (B, D)
  void *states, *out;        // what each layer gives, (L, B, D), the last only for SKIP_SUM; (B, D)
  void* results;             // of each pair, (P, D)
  const void* grad_out;      // (B, D); null in the forward pass
  void *grad_hidden, *grad_mix, *grad_results;  // (B, D), (B, L, N), (P, D)
  // After this come, 8 bytes each: J + 1 widths; then pointers, J each: weights (L, N, O, K), biases (L, N, O), the hidden
  // activations of each pair (P, O padded to 16; null where none are kept), the gradients of the weights, of the biases.

  const long long* widths() const { return (const long long*)(this + 1); }
  void* const* pointers(int kind) const { return (void* const*)(widths() + linears + 1) + kind * linears; }
  void* const* weights() const { return pointers(0); }
  void* const* biases() const { return pointers(1); }
  void* const* inner() const { return pointers(2); }
  void* const* grad_weights() const { return pointers(3); }
  void* const* grad_biases() const { return pointers(4); }

  long long nodes() const { return layers * experts; }
  long long dim() const { return widths()[0]; }
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
  // y (n, O) = b + x (n, K) w (O, K), with memory for n * (K + O) numbers and a vector's padding of n.
  void (*linear)(const void* x, long long n, long long K, const void* w, const void* b, long long O, void* y, void* scratch);
};

ExpertsKernel experts_kernel_baseline(const ExpertsArgs&);
ExpertsKernel experts_kernel_avx2(const ExpertsArgs&);

}  // namespace raytraced
