// One draw among the candidates, as _choose and apply_stop in sequence.py define it.
// Axes: L layers, N experts per layer (P with padding), K = M + 1 candidates (the nodes, then the output node).
#pragma once

#include "gates.inl"
#include "philox.h"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Draw {
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;

  const SequenceArgs& args;
  const Size<S> size;
  u64 row;
  T output_counts;  // how much the output node's rate counts for this sample
  u32* words;       // (K, rounded up, and a vector more): of a race
  T* ratios;        // (L, P): of a race
  u32 uniforms[4];  // the words of four steps

  Draw(const SequenceArgs& args, const Size<S>& size) : args(args), size(size) {}

  void start(i64 b) {
    row = args.rows ? (u64)args.rows[b] : (u64)b;
    output_counts = args.stops ? ((const T*)args.stops)[b] : (T)args.output_counts;
  }

  // The node drawn, or M for the output node; M, too, where no candidate has a positive rate.
  inline int choose(const T* probs, const T* mass, const T* peak, T output, int depth, int step) {
    const int M = size.L * size.N();
    output *= output_counts;
    if (args.dominant) {
      T most = 0;
      for (int l = 0; l < depth; ++l) most = peak[l] > most ? peak[l] : most;
      if (output > most) return M;
      output = 0;
    }
    if (!args.seed) return largest(probs, peak, output, depth);
    if (args.estimator == GUMBEL) return race(probs, output, depth, step);
    return fall(probs, mass, output, depth, step);
  }

  // The most likely candidate, the first of equals.
  inline int largest(const T* probs, const T* peak, T output, int depth) {
    int best = 0;
    for (int l = 1; l < depth; ++l) best = peak[l] > peak[best] ? l : best;
    if (output > peak[best] || !(peak[best] > 0)) return size.L * size.N();
    int i = 0;
    while (i < size.N() - 1 && probs[best * size.P() + i] != peak[best]) ++i;
    return best * size.N() + i;
  }

  // Where a uniform number falls in the cumulative sum: first in which layer, then at which node.
  inline int fall(const T* probs, const T* mass, T output, int depth, int step) {
    const int N = size.N(), P = size.P();
    if (step % 4 == 0) philox((u64)*args.seed, row, (u32)(step / 4), 0, uniforms);
    double total = output;
    for (int l = 0; l < depth; ++l) total += mass[l];
    if (!(total > 0)) return size.L * N;
    const double target = uniform(uniforms[step % 4]) * total;
    double reached = 0, before = 0;
    int layer = 0;
    for (int l = 0; l < depth; ++l) {  // without a jump: which layer it is cannot be predicted
      reached += mass[l];
      const bool passed = reached < target;
      layer += passed;
      before = passed ? reached : before;
    }
    if (layer == depth) return output > 0 ? size.L * N : last(probs, depth * P);
    int node = 0;
    for (int v = 0; v < size.vectors(); ++v) {
      const V sum = S::running_sum(S::load(probs + layer * P + v * W));
      const int passed = S::count(sum < (T)(target - before));
      node += passed;
      before += sum[W - 1];
      if (passed < W) break;
    }
    // Sums in another order may differ by a rounding: never draw a node that is no candidate.
    node = node < N ? node : N - 1;
    if (!(probs[layer * P + node] > 0)) return last(probs, layer * P + node + 1);
    return layer * N + node;
  }

  // The last candidate among the first `count` (padded) nodes, else the first after them; there is one.
  int last(const T* probs, int count) const {
    const int P = size.P();
    int i = count - 1;
    while (i > 0 && !(probs[i] > 0)) --i;
    while (i < size.L * P - 1 && !(probs[i] > 0)) ++i;
    return i / P * size.N() + i % P;
  }

  // Standard exponential numbers for the nodes of layer l, once `shuffle` has drawn the words.
  inline V noise(int l, int v) const { return exponential(words + l * size.N() + v * W); }
  inline T noise_out() const { return exponential(words + size.L * size.N())[0]; }

  static inline V exponential(const u32* words) {
    typedef u32 Words __attribute__((vector_size(4 * W), aligned(4), may_alias));
    typedef int Ints __attribute__((vector_size(4 * W)));
    const V u = __builtin_convertvector((Ints)(*(const Words*)words >> 9), V);
    return -S::log((u + T(0.5)) * T(0x1p-23));
  }

  inline void shuffle(int depth, int step) {
    const int M = size.L * size.N(), used = (depth * size.N() + 3) / 4;
    for (int block = 0; block < used; ++block)
      philox((u64)*args.seed, row, (u32)step, (u32)(1 + block), words + 4 * block);
    if (M / 4 >= used) philox((u64)*args.seed, row, (u32)step, (u32)(1 + M / 4), words + M / 4 * 4);
  }

  // The first to arrive of exponential clocks that tick at the candidates' rates.
  inline int race(const T* probs, T output, int depth, int step) {
    shuffle(depth, step);
    const int P = size.P();
    V most = S::zero();
    for (int l = 0; l < depth; ++l)
      for (int v = 0; v < size.vectors(); ++v) {
        const V ratio = S::load(probs + l * P + v * W) / noise(l, v);
        S::store(ratios + l * P + v * W, ratio);
        most = S::max(most, ratio);
      }
    const T best = S::largest(most)[0];
    if (output / noise_out() > best || !(best > 0)) return size.L * size.N();
    int i = 0;
    while (i < depth * P - 1 && ratios[i] != best) ++i;
    return i / P * size.N() + i % P;
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
