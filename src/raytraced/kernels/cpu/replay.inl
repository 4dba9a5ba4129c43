// The routing of a sample at every step of its sequence, recomputed from the nodes it drew and kept for the backward pass.
// A version of a layer is its state between two changes of its inputs; `slot` numbers the versions of all layers.
// Axes: L layers, N experts per layer (P with padding).
#pragma once

#include "input_gates.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Replay {
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;

  const SequenceArgs& args;
  const PackedGates& gates;
  const Size<S> size;
  const i64 num_versions;
  T *rates, *soft, *soft_out;  // (slots, P), (slots, P, P), (slots, P): firing rates and splits s~
  T *on;                       // (L, P): the active set of now, as 1 and 0
  int *active, *count;         // (L, N), (L): the same as a list
  T *sent;                     // (L, N, P): what active nodes send at the newest step
  T *out, *outputs;            // (L), (steps + 1): to the output node by layer, and in sum at every step
  int *slots, *depths, *next;  // (steps + 1, L), (steps + 1), (L)
  T *inside, *largest;         // (P), (L): 1 for a real lane; the largest |W| of a layer
  bool careful;
  InputGates<S> input_gates;

  Replay(const SequenceArgs& args, const PackedGates& gates, Pieces& pieces, i64 max_active)
      : args(args), gates(gates), size(args), num_versions(max_active + 1), input_gates(args, gates, pieces) {
    const i64 L = size.L, N = size.N(), P = size.P(), num_slots = 1 + (L - 1) * num_versions;
    rates = pieces.take<T>(num_slots * P), soft_out = pieces.take<T>(num_slots * P), on = pieces.take<T>(L * P);
    active = pieces.take<int>(L * N), count = pieces.take<int>(L), sent = pieces.take<T>(L * N * P);
    out = pieces.take<T>(L), outputs = pieces.take<T>(num_versions);
    slots = pieces.take<int>(num_versions * L), depths = pieces.take<int>(num_versions), next = pieces.take<int>(L);
    inside = pieces.take<T>(P), largest = pieces.take<T>(L);
    // The last layer, whose slots come last, has no gates.
    soft = pieces.take<T>((L < 2 ? 0 : 1 + (L - 2) * num_versions) * P * P);
  }

  void prepare() {
    const int N = size.N();
    for (int i = 0; i < size.P(); ++i) inside[i] = i < N;
    for (int l = 0; l < size.L - 1; ++l) largest[l] = Gates<S>::largest((const T*)gates.largest + l * N, N);
  }

  // The splits of all nodes of a layer under one version of its inputs.
  inline void split(int l, i64 slot) {
    const int N = size.N(), P = size.P(), num_vectors = size.vectors();
    const T* rate = rates + slot * P;
    const int* sender = active + (l - 1) * N;
    const int num_senders = l ? count[l - 1] : 0;
    for (int group = 0; group < num_vectors; ++group) {
      T* const rows = soft + (slot * P + group * W) * P;
      V logit_out;
      if (l == 0) {
        logit_out = S::load(rate + group * W) * S::load((const T*)gates.first_out + group * W);
      } else {
        const T* weight_out = (const T*)gates.out + (i64)(l - 1) * N * P + group * W;
        logit_out = S::zero();
        for (int s = 0; s < num_senders; ++s)
          logit_out += S::load(sent + ((i64)(l - 1) * N + sender[s]) * P + group * W) * S::load(weight_out + sender[s] * P);
      }
      // A group's rows grow together: one loop over the senders, whose number is unpredictable, not one for each row.
      const int in_group = size.whole() || N - group * W > W ? W : N - group * W;
      for (int v = 0; v < num_vectors; ++v) {
        V logits[W];
        for (int w = 0; w < W; ++w) logits[w] = S::zero();
        if (l == 0) {
          const T* weight = (const T*)gates.first + group * W * P + v * W;
          for (int w = 0; w < in_group; ++w) logits[w] = rate[group * W + w] * S::load(weight + w * P);
        } else {
          const T* weight = (const T*)gates.outlets + ((i64)(l - 1) * N + group * W) * N * P + v * W;
          const T* above = sent + (i64)(l - 1) * N * P + group * W;
          for (int s = 0; s < num_senders; ++s) {
            const T *input = above + (i64)sender[s] * P, *part = weight + (i64)sender[s] * P;
            for (int w = 0; w < W; ++w)
              if (w < in_group) logits[w] += input[w] * S::load(part + (i64)w * N * P);
          }
        }
        for (int w = 0; w < W; ++w) S::store(rows + w * P + v * W, logits[w]);
      }
      bool is_careful = careful;
      if (input_gates.any) {
        typename S::VI tame = S::zero() == S::zero();
        for (int w = 0; w < in_group; ++w) {
          const T* input_row = input_gates.row((i64)l * N + group * W + w);
          for (int v = 0; v < num_vectors; ++v) {
            const V logits = S::load(rows + w * P + v * W) + S::load(input_row + v * W);
            S::store(rows + w * P + v * W, logits);
            tame &= Gates<S>::is_tame(logits);
          }
          logit_out[w] += input_row[P];
        }
        is_careful = S::count(tame & Gates<S>::is_tame(logit_out)) < W;
      }
      V totals[W], share_out;
      if (is_careful) {
        const V without_softmax = lower(rows, logit_out, in_group);
        share_out = powers<true>(rows, logit_out, totals) + without_softmax;
      } else {
        share_out = powers<false>(rows, logit_out, totals);
      }
      const V scale = 1 / (S::sums(totals) + share_out);
      S::store(soft_out + slot * P + group * W, share_out * scale);
      alignas(sizeof(V)) T scales[W];
      S::store(scales, scale);
      for (int w = 0; w < W; ++w)
        for (int v = 0; v < num_vectors; ++v)
          S::store(rows + w * P + v * W, S::load(rows + w * P + v * W) * scales[w]);
    }
  }

  // Logits to powers of two, in place, and the sum of every row.
  template <bool CAREFUL> inline V powers(T* rows, V logit_out, V* totals) {
    const int P = size.P(), num_vectors = size.vectors();
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) {
      totals[w] = S::zero();
      for (int v = 0; v < num_vectors; ++v) {
        V share = S::load(rows + w * P + v * W);
        share = CAREFUL ? S::exp2_of_negative(share) : S::exp2(share);
        if (!size.whole()) share *= S::load(inside + v * W);
        S::store(rows + w * P + v * W, share);
        totals[w] += share;
      }
    }
    return CAREFUL ? S::exp2_of_negative(logit_out) : S::exp2(logit_out);
  }

  // Subtracts from each row of logits its largest one; returns 0 for each row, NaN for one that has no softmax.
  V lower(T* rows, V& logit_out, int in_group) {
    const int P = size.P(), num_vectors = size.vectors();
    V without_softmax = S::zero();
    for (int w = 0; w < in_group; ++w) {
      V most = S::splat(logit_out[w]);
      typename S::VI is_nan = most != most;
      for (int v = 0; v < num_vectors; ++v) {
        const V logits = S::load(inside + v * W) > 0 ? S::load(rows + w * P + v * W) : most;
        is_nan |= logits != logits;
        most = S::max(most, logits);
      }
      most = S::largest(most);
      if (!Gates<S>::has_softmax(most[0], S::count(is_nan))) without_softmax[w] = Gates<S>::nan;
      logit_out[w] -= most[0];
      for (int v = 0; v < num_vectors; ++v) S::store(rows + w * P + v * W, S::load(rows + w * P + v * W) - most);
    }
    return without_softmax;
  }

  inline void send(int l, int i, i64 slot) {
    const int P = size.P();
    for (int v = 0; v < size.vectors(); ++v)
      S::store(sent + ((i64)l * size.N() + i) * P + v * W, rates[slot * P + i] * S::load(soft + (slot * P + i) * P + v * W));
  }

  inline void start(i64 b) {
    const int L = size.L, N = size.N(), P = size.P();
    const T* entry = (const T*)args.entry + b * N;
    input_gates.sample = b;
    for (i64 gate = 0; input_gates.any && gate < size.gates(); ++gate) input_gates.read(gate);
    for (i64 i = 0; i < (i64)L * P; i += W) S::store(on + i, S::zero());
    T total = 0;
    for (int i = 0; i < P; ++i) rates[i] = i < N ? entry[i] : 0, total += rates[i];
    careful = false;
    for (int l = 0; l < L - 1; ++l) careful |= !(largest[l] * total < Gates<S>::tame);
    for (int l = 0; l < L; ++l) out[l] = 0, count[l] = 0, next[l] = l ? 1 + (int)((l - 1) * num_versions) : 0, slots[l] = -1;
    slots[0] = 0, depths[0] = 1, outputs[0] = 0;
    if (L > 1) split(0, 0);
  }

  // Step `step` drew node i of layer l: the state of step + 1.
  inline void activate(int l, int i, i64 step) {
    const int L = size.L, N = size.N(), P = size.P();
    int* slot = slots + (step + 1) * L;
    for (int m = 0; m < L; ++m) slot[m] = slots[step * L + m];
    active[l * N + count[l]++] = i;
    S::set(on + l * P, i, 1);
    depths[step + 1] = depths[step];
    if (l < L - 1) send(l, i, slot[l]);
    for (;; ++l) {
      T total = 0;
      const T* to_output = l == L - 1 ? rates + (i64)slot[l] * P : soft_out + (i64)slot[l] * P;
      for (int s = 0; s < count[l]; ++s) {
        const int k = active[l * N + s];
        total += l == L - 1 ? to_output[k] : to_output[k] * rates[(i64)slot[l] * P + k];
      }
      out[l] = total;
      if (l == L - 1) break;
      const i64 below = slot[l + 1] = next[l + 1]++;
      for (int v = 0; v < size.vectors(); ++v) {
        V sum = S::zero();
        for (int s = 0; s < count[l]; ++s) sum += S::load(sent + ((i64)l * N + active[l * N + s]) * P + v * W);
        S::store(rates + below * P + v * W, sum);
      }
      if (depths[step + 1] < l + 2) depths[step + 1] = l + 2;
      if (l + 1 < L - 1) split(l + 1, below);
      if (count[l + 1] == 0) break;
      if (l + 1 < L - 1)
        for (int s = 0; s < count[l + 1]; ++s) send(l + 1, active[(l + 1) * N + s], below);
    }
    T total = 0;
    for (int m = 0; m < depths[step + 1]; ++m) total += out[m];
    outputs[step + 1] = total;
  }

  // Takes the newest node of layer l back out of the active set.
  inline void deactivate(int l, int i) {
    --count[l];
    S::set(on + l * size.P(), i, 0);
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
