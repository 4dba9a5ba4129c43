// What the input adds to the logits of gates: given for every sample, or as two factors, of which one belongs to the sample (R)
// and one is shared by all samples; and its gradient. Axes: L layers, N experts per layer (P with padding), O = N + 1 outlets.
#pragma once

#include "gate_gradient.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct InputGates {
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;

  const SequenceArgs& args;
  const PackedGates& gates;
  const Size<S> size;
  const bool any;
  T *rows, *sums;  // (L-1, N, P + W): a sample's input_gates times 1 / ln 2; (R, W): the gradient of its factor, not yet added up
  i64 sample = 0;

  InputGates(const SequenceArgs& args, const PackedGates& gates, Pieces& pieces)
      : args(args), gates(gates), size(args), any(args.input_logits || args.projected) {
    rows = pieces.take<T>(any ? size.gates() * size.num_inputs() : 0), sums = pieces.take<T>(args.rank * W);
  }

  const T* row(i64 gate) const { return rows + gate * size.num_inputs(); }
  T out(i64 gate) const { return row(gate)[size.P()]; }  // to the output node
  const T* factor(i64 gate) const { return (const T*)gates.input_gates + gate * args.rank * size.num_inputs(); }
  const T* projected() const { return (const T*)args.projected + sample * args.rank; }

  // Fills in one gate's input logits for this sample.
  inline void read(i64 gate) {
    const int num_vectors = size.vectors();
    T* to = rows + gate * size.num_inputs();
    if (args.input_logits) {
      const T* given = (const T*)args.input_logits + (sample * size.gates() + gate) * (size.N() + 1);
      for (int v = 0; v < num_vectors; ++v) S::store(to + v * W, size.load(given, v) * S::log2_e);
      to[size.P()] = given[size.N()] * S::log2_e;
      return;
    }
    const T *from = factor(gate), *by = projected();
    for (int v = 0; v <= num_vectors; ++v) {
      V sum = S::zero();
      for (i64 r = 0; r < args.rank; ++r) sum += by[r] * S::load(from + r * size.num_inputs() + v * W);
      S::store(to + v * W, sum * S::log2_e);
    }
  }

  inline void start_back() {
    if (args.grad_input_logits) {
      const i64 count = size.gates() * (size.N() + 1);
      std::memset((void*)((T*)args.grad_input_logits + sample * count), 0, count * sizeof(T));
    }
    for (i64 r = 0; r < args.rank; ++r) S::store(sums + r * W, S::zero());
  }

  // Adds what one gate's logits (P), and that to the output node, give.
  inline void learn(GateGradient<S>& gradient, i64 gate, const T* logits, T out) {
    const int N = size.N(), num_vectors = size.vectors();
    if (args.grad_input_logits) {
      T* to = (T*)args.grad_input_logits + (sample * size.gates() + gate) * (N + 1);
      for (int o = 0; o < N; ++o) to[o] += logits[o];
      to[N] += out;
    } else if (args.rank) {
      const T *from = factor(gate), *by = projected();
      T* learnt = gradient.input_rows(gate);
      for (int v = 0; v <= num_vectors; ++v) {
        const V grad = v < num_vectors ? S::load(logits + v * W) : S::iota() == S::zero() ? S::splat(out) : S::zero();
        for (i64 r = 0; r < args.rank; ++r) {
          const i64 at = r * size.num_inputs() + v * W;
          S::store(learnt + at, S::load(learnt + at) + by[r] * grad);
          S::store(sums + r * W, S::load(sums + r * W) + S::load(from + at) * grad);
        }
      }
    }
  }

  inline void finish() {
    for (i64 r = 0; r < args.rank; ++r) ((T*)args.grad_projected)[sample * args.rank + r] = S::sum(S::load(sums + r * W))[0];
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
