// The forward pass: a sample's activation sequence, its work proportional to what is active. When a node joins the active
// set, only its own split, the splits of the active nodes below it, and the rates that these feed are computed anew.
// Axes: L layers, N experts per layer (P with padding), K = M + 1 candidates; `sent` row k of layer l: what node k of l sends.
#pragma once

#include "draws.inl"
#include "input_gates.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Forward {
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;

  const SequenceArgs& args;
  PackedGates& gates;
  Size<S> size;
  T *rates, *open, *probs;  // (L, P): firing rates; 1 where inactive, else 0; their product
  T *sent, *sent_out;       // (L, N, P), (L, P)
  T* out;                   // (L): what each layer sends to the output node
  T *mass, *peak;           // (L): sum and largest of probs
  T* inside;                // (P): 1 for a real lane, 0 for padding
  int *active, *count;      // (L, N) in order of activation; (L)
  int depth;                // layers with candidates or active nodes
  bool can_draw;            // the entry rates have a positive, finite sum, and every gate so far had a softmax
  InputGates<S> input_gates;
  Draw<S> draw;

  Forward(const SequenceArgs& args, PackedGates& gates, Pieces& pieces)
      : args(args), gates(gates), size(args), input_gates(args, gates, pieces), draw(args, size) {
    const i64 L = size.L, N = size.N(), P = size.P();
    rates = pieces.take<T>(L * P), open = pieces.take<T>(L * P), probs = pieces.take<T>(L * P);
    sent = pieces.take<T>(L * N * P), sent_out = pieces.take<T>(L * P);
    out = pieces.take<T>(L), mass = pieces.take<T>(L), peak = pieces.take<T>(L), inside = pieces.take<T>(P);
    active = pieces.take<int>(L * N), count = pieces.take<int>(L);
    draw.words = pieces.take<u32>(L * N + P + 8), draw.ratios = pieces.take<T>(L * P);
  }

  static i64 bytes(const SequenceArgs& args) {
    PackedGates none = {};
    Pieces pieces(nullptr);
    Forward(args, none, pieces);
    return pieces.used();
  }

  // How node i of layer l splits its firing rate: the powers of its softmax, to its row; to the output node; and their sum.
  inline V shares(int l, int i, T* row, V& share_out) {
    const int N = size.N(), P = size.P(), num_vectors = size.vectors();
    const T rate = rates[l * P + i];
    V logit_out;
    if (l == 0) {
      const T* first = (const T*)gates.first + i * P;
      for (int v = 0; v < num_vectors; ++v) S::store(row + v * W, rate * S::load(first + v * W));
      logit_out = S::splat(rate * ((const T*)gates.first_out)[i]);
    } else {
      const i64 node = (i64)(l - 1) * N + i;
      if (!gates.ready[node]) Gates<S>::pack(args, gates, node);
      const T* weight = (const T*)gates.outlets + node * N * P;
      const T* weight_out = (const T*)args.inner + (node * (N + 1) + N) * N;
      const T* above = sent + (i64)(l - 1) * N * P + i;
      const int* sender = active + (l - 1) * N;
      const int num_senders = count[l - 1];
      T total = 0;
      for (int v = 0; v < num_vectors; ++v) {
        V logits = S::zero();
        for (int s = 0; s < num_senders; ++s) {
          const i64 k = sender[s];
          logits += above[k * P] * S::load(weight + k * P + v * W);
          if (v == 0) total += above[k * P] * weight_out[k];
        }
        S::store(row + v * W, logits);
      }
      logit_out = S::splat(total * S::log2_e);
    }
    bool is_tame = ((const T*)gates.largest)[l * N + i] * rate < Gates<S>::tame;
    if (input_gates.any) {
      const T* input_row = input_gates.row((i64)l * N + i);
      logit_out += S::splat(input_gates.out((i64)l * N + i));
      typename S::VI tame = Gates<S>::is_tame(logit_out);
      for (int v = 0; v < num_vectors; ++v) {
        const V logits = S::load(row + v * W) + S::load(input_row + v * W);
        S::store(row + v * W, logits);
        tame &= Gates<S>::is_tame(logits);
      }
      is_tame = S::count(tame) == W;
    }
    V total = S::zero();
    if (is_tame) {
      share_out = S::exp2(logit_out);
      for (int v = 0; v < num_vectors; ++v) S::store(row + v * W, S::exp2(S::load(row + v * W)));
    } else {
      V most = logit_out;
      typename S::VI is_nan = logit_out != logit_out;
      for (int v = 0; v < num_vectors; ++v) {
        const V logits = S::load(inside + v * W) > 0 ? S::load(row + v * W) : most;
        is_nan |= logits != logits;
        most = S::max(most, logits);
      }
      most = S::largest(most);
      share_out = S::exp2_of_negative(logit_out - most);
      if (!Gates<S>::has_softmax(most[0], S::count(is_nan))) can_draw = false, share_out = S::splat(Gates<S>::nan);
      for (int v = 0; v < num_vectors; ++v) S::store(row + v * W, S::exp2_of_negative(S::load(row + v * W) - most));
    }
    for (int v = 0; v < num_vectors; ++v) {
      if (!size.whole()) S::store(row + v * W, S::load(row + v * W) * S::load(inside + v * W));
      total += S::load(row + v * W);
    }
    return S::sum(total) + share_out;
  }

  // The same as what is sent, into the node's row of `sent`.
  inline void split(int l, int i) {
    const int P = size.P();
    T* row = sent + ((i64)l * size.N() + i) * P;
    V share_out;
    const V total = shares(l, i, row, share_out), scale = rates[l * P + i] / total;
    for (int v = 0; v < size.vectors(); ++v) S::store(row + v * W, S::load(row + v * W) * scale);
    sent_out[l * P + i] = (share_out * scale)[0];
  }

  // The chance of every node of a layer to be drawn, from its rates.
  inline void refresh(int l) {
    const int P = size.P();
    V most = S::zero();
    V total = S::zero();
    for (int v = 0; v < size.vectors(); ++v) {
      const V p = S::load(rates + l * P + v * W) * S::load(open + l * P + v * W);
      S::store(probs + l * P + v * W, p);
      total += p;
      most = S::max(most, p);
    }
    if (args.seed) mass[l] = S::sum(total)[0];
    if (!args.seed || args.dominant) peak[l] = S::largest(most)[0];
  }

  // What layer l now sends, summed into the rates of the next and its part of the output's.
  inline void pass_on(int l) {
    const int N = size.N(), P = size.P();
    const int* sender = active + l * N;
    T total = 0;
    if (l == size.L - 1) {
      for (int s = 0; s < count[l]; ++s) total += rates[l * P + sender[s]];
    } else {
      for (int s = 0; s < count[l]; ++s) total += sent_out[l * P + sender[s]];
      for (int v = 0; v < size.vectors(); ++v) {
        V sum = S::zero();
        for (int s = 0; s < count[l]; ++s) sum += S::load(sent + ((i64)l * N + sender[s]) * P + v * W);
        S::store(rates + (l + 1) * P + v * W, sum);
      }
    }
    out[l] = total;
  }

  inline void activate(int l, int i) {
    const int L = size.L, N = size.N(), P = size.P();
    active[l * N + count[l]++] = i;
    S::set(open + l * P, i, 0);
    refresh(l);
    if (l < L - 1) {
      if (input_gates.any) input_gates.read((i64)l * N + i);
      split(l, i);
    }
    pass_on(l);
    for (++l; l < L; ++l) {
      depth = depth > l ? depth : l + 1;
      refresh(l);
      if (count[l] == 0) return;
      if (l < L - 1)
        for (int s = 0; s < count[l]; ++s) split(l, active[l * N + s]);
      pass_on(l);
    }
  }

  inline void start(i64 b) {
    const int L = size.L, N = size.N(), P = size.P();
    const T* entry = (const T*)args.entry + b * N;
    input_gates.sample = b;
    for (i64 i = 0; i < (i64)L * P; i += W) {
      S::store(rates + i, S::zero()), S::store(probs + i, S::zero());
      S::store(open + i, S::splat(1));
    }
    for (int i = 0; i < P; ++i) inside[i] = i < N;
    for (int i = 0; i < N; ++i) rates[i] = entry[i];
    for (int l = 0; l < L; ++l) out[l] = 0, mass[l] = 0, peak[l] = 0, count[l] = 0;
    depth = 1, can_draw = true;
    refresh(0);
  }

  void run(i64 b) {
    const int L = size.L, N = size.N(), P = size.P(), M = L * N;
    start(b);
    T total = 0;
    for (int i = 0; i < N; ++i) total += rates[i];
    can_draw = total > 0 && total - total == 0;  // else the sequence is empty, as `unroll` defines it
    draw.start(b);
    i64* nodes = args.nodes + b * args.steps;
    i64 step = 0;
    T output = 0;
    const i64* followed = args.followed ? args.followed + b * args.steps : nullptr;
    for (; (followed || can_draw) && step < args.steps; ++step) {
      const int node = followed ? (int)followed[step] : draw.choose(probs, mass, peak, output, depth, (int)step);
      if (node < 0 || node == M) break;
      nodes[step] = node;
      activate(node / N, node % N);
      output = 0;
      for (int l = 0; l < depth; ++l) output += out[l];
    }
    args.num_active[b] = step;
    for (; step < args.steps; ++step) nodes[step] = -1;
    T* active_out = (T*)args.active + b * M;
    T* rates_out = (T*)args.rates + b * M;
    for (int l = 0; l < L; ++l)
      for (int i = 0; i < N; ++i) active_out[l * N + i] = 1 - open[l * P + i], rates_out[l * N + i] = rates[l * P + i];
    ((T*)args.output)[b] = output;
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
