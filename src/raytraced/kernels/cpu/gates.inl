// The gates' weights in the kernel's layouts, and the softmax splits that both passes need.
// Template parameter S: Lanes<T, W> with N, the number of experts where it is fixed (0: any).
#pragma once

#include "lanes.h"
#include "pieces.h"
#include "sequence.h"

namespace raytraced {
namespace RAYTRACED_ISA {

template <typename T, int W, int N_> struct Shape : Lanes<T, W> { static constexpr int N = N_; };

// Sizes that are constants where N is fixed.
template <class S> struct Size {
  typedef typename S::T T;
  int L, any_N;
  explicit Size(const SequenceArgs& args) : L((int)args.layers), any_N((int)args.experts) {}
  int N() const { return S::N ? S::N : any_N; }
  int vectors() const { return (N() + S::W - 1) / S::W; }
  int P() const { return vectors() * S::W; }                  // N, padded
  static constexpr bool whole() { return S::N && S::N % S::W == 0; }  // no padding
  i64 gates() const { return (i64)(L - 1) * N(); }
  int num_inputs() const { return P() + S::W; }  // input logits of a gate: of its outlets, and a vector for the output node
  i64 inner() const { return L > 2 ? (i64)(L - 2) * N() : 0; }  // nodes whose gates have N inputs
  // Vector v of a row of N numbers in memory without padding.
  typename S::V load(const T* row, int v) const {
    if (whole() || (v + 1) * S::W <= N()) return S::load_any(row + v * S::W);
    typename S::V x = S::zero();
    for (int i = v * S::W; i < N(); ++i) x[i - v * S::W] = row[i];
    return x;
  }
};

template <class S> struct Gates {
  typedef typename S::T T;
  static PackedGates lay_out(const SequenceArgs& args, Pieces& pieces) {
    const Size<S> size(args);
    const i64 N = size.N(), P = size.P(), inner = size.inner();
    PackedGates g = {};
    g.outlets = pieces.take<T>(inner * N * P);
    g.inputs = pieces.take<T>(inner * (N + 1) * P);
    g.out = pieces.take<T>(inner * P);
    g.first = pieces.take<T>(N * P);
    g.first_out = pieces.take<T>(P);
    g.ready = pieces.take<unsigned char>(inner);
    g.largest = pieces.take<T>(inner + N);
    g.input_gates = pieces.take<T>(size.gates() * args.rank * size.num_inputs());
    return g;
  }

  static i64 bytes(const SequenceArgs& args) {
    Pieces pieces(nullptr);
    lay_out(args, pieces);
    return pieces.used();
  }

  // The first layer's gates, which are few; and forget every other.
  static void start(const SequenceArgs& args, PackedGates& g) {
    const Size<S> size(args);
    const int N = size.N(), P = size.P();
    for (i64 i = 0; i < size.inner(); ++i) g.ready[i] = 0, ((T*)g.largest)[N + i] = 0;
    T *first = (T*)g.first, *out = (T*)g.first_out;
    for (int i = 0; i < P; ++i) out[i] = 0;
    if (size.L < 2) return;
    const T* W = (const T*)args.first;
    for (int i = 0; i < N; ++i) {
      for (int o = 0; o < P; ++o) first[i * P + o] = o < N ? W[i * (N + 1) + o] * S::log2_e : 0;
      out[i] = W[i * (N + 1) + N] * S::log2_e;
      ((T*)g.largest)[i] = largest(W + i * (N + 1), N + 1);
    }
    for (i64 gate = 0; gate < size.gates(); ++gate)
      for (i64 r = 0; r < args.rank; ++r) {
        const T* from = (const T*)args.factor + gate * (N + 1) * args.rank + r;
        T* to = (T*)g.input_gates + (gate * args.rank + r) * size.num_inputs();
        for (int o = 0; o < size.num_inputs(); ++o) to[o] = 0;
        for (int o = 0; o < N; ++o) to[o] = from[o * args.rank];
        to[P] = from[N * args.rank];
      }
  }

  // One node's gate with its outlets in lanes.
  static inline void pack(const SequenceArgs& args, PackedGates& g, i64 node) {
    const Size<S> size(args);
    const int N = size.N(), P = size.P();
    const T* W = (const T*)args.inner + node * (N + 1) * N;
    T* packed = (T*)g.outlets + node * N * P;
    for (int o = 0; o < P; ++o)
      for (int k = 0; k < N; ++k) packed[k * P + o] = o < N ? W[o * N + k] * S::log2_e : 0;
    ((T*)g.largest)[N + node] = largest(W, (N + 1) * N);
    g.ready[node] = 1;
  }

  static void pack_all(const SequenceArgs& args, PackedGates& g) {
    for (i64 node = 0; node < Size<S>(args).inner(); ++node) pack(args, g, node);
  }

  // What the backward pass reads: gates of nodes that some sample activated and, where draws have a gradient, of all that
  // could have been drawn.
  static void pack_used(const SequenceArgs& args, PackedGates& g) {
    const Size<S> size(args);
    const int N = size.N(), P = size.P();
    const i64 num_inner = size.inner();
    const T* W = (const T*)args.inner;
    i64 last = -1;
    for (i64 b = 0; b < args.batch; ++b)
      for (i64 step = 0; step < args.num_active[b]; ++step) {
        const i64 node = args.nodes[b * args.steps + step] - N;
        last = node > last ? node : last;
        if (node < 0 || node >= num_inner || g.ready[node]) continue;
        pack(args, g, node);
        if (args.estimator == NONE) continue;
        T* inputs = (T*)g.inputs + node * (N + 1) * P;
        for (int o = 0; o <= N; ++o)
          for (int k = 0; k < P; ++k) inputs[o * P + k] = k < N ? W[(node * (N + 1) + o) * N + k] : 0;
      }
    if (args.estimator == NONE) return;
    const i64 below = (last + N) / N * N + N, end = below < num_inner ? below : num_inner;  // candidates are one layer deeper
    T* out = (T*)g.out;
    for (i64 i = 0; !size.whole() && i < end * P; ++i) out[i] = 0;
    for (i64 node = 0; node < end; ++node) {
      if (!g.ready[node]) pack(args, g, node);
      for (int k = 0; k < N; ++k) out[(node / N * N + k) * P + node % N] = W[(node * (N + 1) + N) * N + k] * S::log2_e;
    }
  }

  // No logit of a gate exceeds its largest |W| times its firing rate. Below this limit no exponential over- or
  // underflows, and the softmax can do without its maximum.
  static constexpr T tame = sizeof(T) == 4 ? 60 : 500;
  // The same of logits that are there, to the base of two.
  static inline typename S::VI is_tame(typename S::V logits) {
    return (logits < S::splat(tame * S::log2_e)) & (logits > S::splat(-tame * S::log2_e));
  }

  static constexpr T nan = T(__builtin_nan(""));
  // Whether logits have a softmax: none of them is NaN, and their largest is finite.
  static inline bool has_softmax(T largest_logit, int num_nan) { return num_nan == 0 && largest_logit - largest_logit == 0; }

  static inline T largest(const T* W, i64 count) {
    T most = 0;
    for (i64 i = 0; i < count; ++i) {
      const T size = W[i] < 0 ? -W[i] : W[i];
      most = size <= most || most != most ? most : size;  // a NaN is kept
    }
    return most;
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
