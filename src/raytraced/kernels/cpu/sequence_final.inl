// The backward pass where draws have no gradient: once through the routing under the final set, and of it the active nodes alone.
// Axes: L layers, N experts per layer (P with padding), O = N + 1 outlets.
#pragma once

#include <cstring>

#include "gate_gradient.inl"
#include "sequence_forward.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Final : Forward<S> {
  typedef Forward<S> F;
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;
  using F::active, F::args, F::count, F::gates, F::rates, F::sent, F::input_gates, F::size;

  GateGradient<S> gradient;
  T *soft, *soft_out;     // (L, N, P), (L, P): splits of active nodes
  T *received, *next;     // (N, P): of what a layer's active nodes, in their order, send: its gradient; that of the layer above
  T *logits, *grad_rate;  // (P): the gradient of a gate's logits; of all rates of a layer

  Final(const SequenceArgs& args, PackedGates& gates, Pieces& pieces, void* gradient_memory)
      : F(args, gates, pieces), gradient(args, gradient_memory) {
    const i64 L = size.L, N = size.N(), P = size.P();
    soft = pieces.take<T>(L * N * P), soft_out = pieces.take<T>(L * P);
    received = pieces.take<T>(N * P), next = pieces.take<T>(N * P);
    logits = pieces.take<T>(P), grad_rate = pieces.take<T>(P);
  }

  static i64 bytes(const SequenceArgs& args) {
    PackedGates none = {};
    Pieces pieces(nullptr);
    Final(args, none, pieces, nullptr);
    return pieces.used();
  }

  // Rates and splits down to the first empty layer; returns how many layers have active nodes.
  inline int settle(const i64* nodes, i64 num_active) {
    const int L = size.L, N = size.N(), P = size.P();
    for (i64 step = 0; step < num_active; ++step) {
      const int l = (int)nodes[step] / N;
      active[l * N + count[l]++] = (int)nodes[step] % N;
    }
    int l = 0;
    for (; l < L && count[l]; ++l) {
      for (int s = 0; s < count[l] && l < L - 1; ++s) {
        const int i = active[l * N + s];
        if (input_gates.any) input_gates.read((i64)l * N + i);
        T *row = soft + ((i64)l * N + i) * P, *to = sent + ((i64)l * N + i) * P;
        V share_out;
        const V scale = 1 / this->shares(l, i, row, share_out);
        soft_out[l * P + i] = (share_out * scale)[0];
        for (int v = 0; v < size.vectors(); ++v) {
          const V share = S::load(row + v * W) * scale;
          S::store(row + v * W, share), S::store(to + v * W, rates[l * P + i] * share);
        }
      }
      if (l < L - 1) this->pass_on(l);
    }
    return l;
  }

  // The gradient of a layer's rates from outside, or zeros.
  inline void arrive(i64 b, int l) {
    const T* grad = (const T*)args.grad_rates;
    for (int v = 0; v < size.vectors(); ++v)
      S::store(grad_rate + v * W, grad ? size.load(grad + (b * size.L + l) * size.N(), v) : S::zero());
  }

  // Adds to one number of a row; a scalar store would stall the vector load that follows it.
  static inline void add(T* row, int i, T x) {
    T* part = row + i / W * W;
    S::store(part, S::load(part) + (S::iota() == S::splat((T)(i % W)) ? S::splat(x) : S::zero()));
  }

  // Node i of layer l, from the gradient of what it sends: the gradient of its rate. Its gate's goes to the weights, and to
  // what the nodes above sent it.
  inline T back(int l, int i, const T* received, T grad_output) {
    const int N = size.N(), P = size.P(), num_vectors = size.vectors();
    const T *row = soft + ((i64)l * N + i) * P, rate = rates[l * P + i], to_output = soft_out[l * P + i];
    V sum = S::zero();
    for (int v = 0; v < num_vectors; ++v) sum += S::load(row + v * W) * S::load(received + v * W);
    const V mean = S::sum(sum) + to_output * grad_output;
    const T grad_out = rate * to_output * (grad_output - mean[0]);
    for (int v = 0; v < num_vectors; ++v)
      S::store(logits + v * W, rate * S::load(row + v * W) * (S::load(received + v * W) - mean));
    if (input_gates.any) input_gates.learn(gradient, (i64)l * N + i, logits, grad_out);
    if (l == 0) {
      const T through = learn(gradient.first + i * P, (const T*)gates.first + i * P, rate);
      gradient.first_out[i] += rate * grad_out;
      return mean[0] + through + ((const T*)gates.first_out)[i] * S::ln_2 * grad_out;
    }
    const i64 node = (i64)(l - 1) * N + i;
    const T *weight = (const T*)gates.outlets + node * N * P, *weight_out = (const T*)args.inner + (node * (N + 1) + N) * N;
    T *rows = gradient.rows(node), *out = gradient.out + (i64)(l - 1) * N * P + i;
    for (int s = 0; s < count[l - 1]; ++s) {
      const i64 k = active[(l - 1) * N + s];
      const T input = sent[((i64)(l - 1) * N + k) * P + i];
      const T through = learn(rows + k * P, weight + k * P, input);
      out[k * P] += input * grad_out;
      add(next + s * P, i, through + weight_out[k] * grad_out);
    }
    return mean[0];
  }

  // Adds a gate's gradient by one input to its weights'; returns that of the input.
  inline T learn(T* row, const T* weight, T input) {
    V sum = S::zero();
    for (int v = 0; v < size.vectors(); ++v) {
      const V grad = S::load(logits + v * W);
      S::store(row + v * W, S::load(row + v * W) + input * grad);
      sum += S::load(weight + v * W) * grad;
    }
    return S::sum(sum)[0] * S::ln_2;
  }

  void run(i64 b) {
    const int L = size.L, N = size.N(), P = size.P(), num_vectors = size.vectors();
    this->start(b);
    input_gates.start_back();
    const int depth = settle(args.nodes + b * args.steps, args.num_active[b]);
    const T grad_output = args.grad_output ? ((const T*)args.grad_output)[b] : 0;
    arrive(b, depth < L ? depth : L - 1);
    if (depth == L)  // the last layer sends all it has to the output node
      for (int s = 0; s < count[L - 1]; ++s) add(grad_rate, active[(L - 1) * N + s], grad_output);
    const int deepest = depth < L ? depth - 1 : L - 2;
    for (int s = 0; deepest >= 0 && s < count[deepest]; ++s)
      for (int v = 0; v < num_vectors; ++v) S::store(received + s * P + v * W, S::zero());
    for (int l = deepest; l >= 0; --l) {
      for (int s = 0; s < count[l]; ++s)
        for (int v = 0; v < num_vectors; ++v)
          S::store(received + s * P + v * W, S::load(received + s * P + v * W) + S::load(grad_rate + v * W));
      for (int s = 0; l && s < count[l - 1]; ++s)
        for (int v = 0; v < num_vectors; ++v) S::store(next + s * P + v * W, S::zero());
      arrive(b, l);
      for (int s = 0; s < count[l]; ++s) {
        const int i = active[l * N + s];
        add(grad_rate, i, back(l, i, received + s * P, grad_output));
      }
      T* const spare = received;
      received = next, next = spare;
    }
    T* entry = (T*)args.grad_entry + b * N;
    for (int i = 0; i < N; ++i) entry[i] = grad_rate[i];
    input_gates.finish();
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
