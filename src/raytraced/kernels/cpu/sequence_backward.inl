// The backward pass: replay a sample's routing, then go back through its draws from the last to the first.
// Axes: L layers, N experts per layer (P with padding), O = N + 1 outlets, K = M + 1 candidates.
#pragma once

#include <cstring>

#include "draws.inl"
#include "gate_gradient.inl"
#include "replay.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Backward {
  typedef typename S::T T;
  typedef typename S::V V;
  static constexpr int W = S::W;

  const SequenceArgs& args;
  const PackedGates& gates;
  const Size<S> size;
  Replay<S> replay;
  GateGradient<S> gradient;
  T* grad_active;               // (L, P): of the active set, all later steps' parts together
  T* grad_rates;                // (L + 1, P): of the firing rates at this step
  T *grad_logits, *grad_out;    // (L, P, P), (L, P): of a gate's logits, summed while its inputs stay the same
  T *mixed, *mixed_rows;        // (P, P): W^T times that, node by input; its transpose plus the part common to all inputs
  T *common, *inner, *one_out;  // (P): see `routing`
  T *grad_entry, *grad_first;   // (P): directly, and through the first layer's gates
  T* work;                      // (2 L, P)
  Draw<S> draw;

  Backward(const SequenceArgs& args, const PackedGates& gates, Pieces& pieces, void* gradient_memory, i64 max_active)
      : args(args), gates(gates), size(args), replay(args, gates, pieces, max_active), gradient(args, gradient_memory), draw(args, size) {
    const i64 L = size.L, N = size.N(), P = size.P();
    grad_active = pieces.take<T>(L * P), grad_rates = pieces.take<T>((L + 1) * P);
    grad_logits = pieces.take<T>(L * P * P), grad_out = pieces.take<T>(L * P);
    mixed = pieces.take<T>(P * P), mixed_rows = pieces.take<T>(P * P);
    common = pieces.take<T>(P), inner = pieces.take<T>(P), one_out = pieces.take<T>(P), grad_entry = pieces.take<T>(P);
    grad_first = pieces.take<T>(P);
    work = pieces.take<T>(2 * L * P), draw.words = pieces.take<u32>(L * N + P + 8);
  }

  static i64 bytes(const SequenceArgs& args, i64 max_active) {
    PackedGates none = {};
    Pieces pieces(nullptr);
    Backward(args, none, pieces, nullptr, max_active);
    return pieces.used();
  }

  void prepare() {
    const i64 L = size.L, P = size.P();
    replay.prepare();
    for (i64 i = 0; i < L * P * P; ++i) grad_logits[i] = 0;
    for (i64 i = 0; i < L * P; ++i) grad_out[i] = 0;
    for (i64 i = 0; i < P * P; ++i) mixed[i] = 0;
  }

  // Adds a gate's gradient to its weights': needed only when the gate's inputs change, or the node leaves the active set.
  inline void flush(int l, int i, i64 step) {
    const int N = size.N(), P = size.P();
    T* logits = grad_logits + ((i64)l * P + i) * P;
    const T out = grad_out[l * P + i];
    if (replay.input_gates.any) replay.input_gates.learn(gradient, (i64)l * N + i, logits, out);
    const int* slot = replay.slots + step * size.L;
    if (l == 0) {
      const T rate = replay.rates[i];
      V back = S::zero();
      for (int v = 0; v < size.vectors(); ++v) {
        T* row = gradient.first + i * P + v * W;
        S::store(row, S::load(row) + rate * S::load(logits + v * W));
        back += S::load((const T*)gates.first + i * P + v * W) * S::load(logits + v * W);
      }
      gradient.first_out[i] += rate * out;
      grad_first[i] = (S::sum(back)[0] + ((const T*)gates.first_out)[i] * out) * S::ln_2;
    } else {
      const T* rates = replay.rates + (i64)slot[l - 1] * P;
      const T* soft = replay.soft + (i64)slot[l - 1] * P * P;
      T* rows = gradient.rows((i64)(l - 1) * N + i);
      T* column = gradient.out + (i64)(l - 1) * N * P + i;
      for (int s = 0; s < replay.count[l - 1]; ++s) {
        const int k = replay.active[(l - 1) * N + s];
        const T input = rates[k] * soft[k * P + i];
        for (int v = 0; v < size.vectors(); ++v) {
          T* row = rows + k * P + v * W;
          S::store(row, S::load(row) + input * S::load(logits + v * W));
        }
        column[k * P] += input * out;
      }
    }
    for (int v = 0; v < size.vectors(); ++v) S::store(logits + v * W, S::zero());
    S::set(grad_out + l * P, i, 0);
  }

  inline void take_back(int l, int i, i64 step) {
    const int L = size.L, N = size.N();
    if (l < L - 1) flush(l, i, step);
    for (int m = l + 1; m < L - 1 && replay.count[m]; ++m)
      for (int s = 0; s < replay.count[m]; ++s) flush(m, replay.active[m * N + s], step);
    replay.deactivate(l, i);
  }

  // From the gradient of the firing rates (grad_rates) and of the output's, under the active set after `step` draws,
  // to those of the active set, the gates and the entry. Where `at_frontier`, no rate below the deepest one has a gradient.
  inline void routing(i64 step, T grad_output, bool at_frontier) {
    const int L = size.L, N = size.N(), P = size.P(), num_vectors = size.vectors();
    const int deepest = replay.depths[step] - 1;
    // A node passes the same gradient (common) to all its inputs, and where it is active its gate adds another (mixed).
    bool is_mixed = false;
    if (deepest < L - 1)
      for (int v = 0; v < num_vectors; ++v) S::store(common + v * W, S::load(grad_rates + (deepest + 1) * P + v * W));
    for (int l = deepest; l >= 0; --l) {
      const i64 slot = replay.slots[step * L + l];
      const T *rates = replay.rates + slot * P, *soft = replay.soft + slot * P * P, *soft_out = replay.soft_out + slot * P;
      const T* on = replay.on + l * P;
      if (l == L - 1) {
        for (int v = 0; v < num_vectors; ++v) {
          T* grad = grad_active + l * P + v * W;
          S::store(grad, S::load(grad) + grad_output * S::load(rates + v * W));
          S::store(common + v * W, S::load(grad_rates + l * P + v * W) + grad_output * S::load(on + v * W));
        }
        continue;
      }
      // inner: the gradient of a node's rate by what it sends; one_out: of the logit of its outlet to the output node.
      for (int group = 0; group < num_vectors; ++group) {
        V total = grad_output * S::load(soft_out + group * W);
        if (!(at_frontier && l == deepest)) {
          V sums[W];
          for (int w = 0; w < W; ++w) sums[w] = S::zero();
          for (int v = 0; v < num_vectors; ++v) {
            const V base = S::load(common + v * W);
            if (is_mixed) {
              V tile[W];
              for (int w = 0; w < W; ++w) tile[w] = S::load(mixed + (v * W + w) * P + group * W);
              S::transpose(tile);
              for (int w = 0; w < W; ++w) {
                tile[w] += base;
                S::store(mixed_rows + (group * W + w) * P + v * W, tile[w]);
                sums[w] += tile[w] * S::load(soft + (group * W + w) * P + v * W);
              }
            } else {
              for (int w = 0; w < W; ++w) sums[w] += base * S::load(soft + (group * W + w) * P + v * W);
            }
          }
          total += S::sums(sums);
        }
        const V rate = S::load(rates + group * W), is_on = S::load(on + group * W);
        T *grad = grad_active + l * P + group * W, *grad_o = grad_out + l * P + group * W;
        S::store(grad, S::load(grad) + rate * total);
        S::store(inner + group * W, total);
        const V one = is_on * rate * S::load(soft_out + group * W) * (grad_output - total);
        S::store(one_out + group * W, one);
        S::store(grad_o, S::load(grad_o) + one);
      }
      const int num_below = replay.count[l + 1];
      if (is_mixed)
        for (int s = 0; s < num_below; ++s)
          for (int v = 0; v < num_vectors; ++v)
            S::store(mixed + replay.active[(l + 1) * N + s] * P + v * W, S::zero());
      for (int s = 0; s < replay.count[l]; ++s) {
        const int i = replay.active[l * N + s];
        T* sum = grad_logits + ((i64)l * P + i) * P;
        T* logits = work;
        for (int v = 0; v < num_vectors; ++v) {
          const V received = is_mixed ? S::load(mixed_rows + i * P + v * W) : S::load(common + v * W);
          const V grad = rates[i] * S::load(soft + i * P + v * W) * (received - inner[i]);
          S::store(logits + v * W, grad);
          S::store(sum + v * W, S::load(sum + v * W) + grad);
        }
        if (l == 0) continue;
        const T* weight = (const T*)gates.inputs + ((i64)(l - 1) * N + i) * (N + 1) * P;
        for (int v = 0; v < num_vectors; ++v) {
          V even = one_out[i] * S::load(weight + N * P + v * W), odd = S::zero();
          int o = 0;
          for (; o + 1 < N; o += 2) {
            even += logits[o] * S::load(weight + o * P + v * W);
            odd += logits[o + 1] * S::load(weight + (o + 1) * P + v * W);
          }
          if (o < N) even += logits[o] * S::load(weight + o * P + v * W);
          S::store(mixed + i * P + v * W, even + odd);
        }
      }
      is_mixed = l > 0 && replay.count[l] > 0;
      for (int v = 0; v < num_vectors; ++v)
        S::store(common + v * W, S::load(grad_rates + l * P + v * W) + S::load(on + v * W) * S::load(inner + v * W));
    }
    for (int v = 0; v < num_vectors; ++v)
      S::store(grad_entry + v * W, S::load(grad_entry + v * W) + S::load(common + v * W));
  }

  inline V probs(i64 step, int l, int v) const {
    const i64 slot = replay.slots[step * size.L + l];
    return S::load(replay.rates + slot * size.P() + v * W) * (1 - S::load(replay.on + l * size.P() + v * W));
  }

  // The gradient of the draw of `node` (M: the output node), made after `step` others, goes to the probabilities it was
  // made from: to grad_rates, to the active set, and, returned, to the output's rate.
  inline T estimate(i64 step, int node) {
    const int L = size.L, N = size.N(), P = size.P(), num_vectors = size.vectors(), depth = replay.depths[step];
    const T output = replay.outputs[step], floor = (T)args.rate_floor;
    const int drawn_l = node / N, drawn_i = node % N;
    if (depth < L)
      for (int v = 0; v < num_vectors; ++v) S::store(grad_rates + depth * P + v * W, S::zero());
    T grad_output = 0;
    if (args.estimator == STRAIGHT_THROUGH) {
      for (int l = 0; l < depth; ++l)
        for (int v = 0; v < num_vectors; ++v) {
          const V p = probs(step, l, v);
          settle(l, v, p, p > 0 ? S::load(grad_active + l * P + v * W) : S::zero());
        }
    } else if (args.estimator == REINMAX) {
      // With p1 = (draw + p0) / 2 the estimator comes to (g_k - g_draw) / 2 for all others,
      // and to (g_draw - sum p0 g) / 2 p0 for the drawn one.
      const T grad_drawn = drawn_l < L ? grad_active[drawn_l * P + drawn_i] : 0;
      V sum = S::zero();
      for (int l = 0; l < depth; ++l)
        for (int v = 0; v < num_vectors; ++v) sum += probs(step, l, v) * S::load(grad_active + l * P + v * W);
      const V own = (grad_drawn - S::sum(sum)) / 2;
      for (int l = 0; l < depth; ++l)
        for (int v = 0; v < num_vectors; ++v) {
          const V p = probs(step, l, v);
          V grad = (S::load(grad_active + l * P + v * W) - grad_drawn) / 2;
          if (l == drawn_l) grad = S::iota() == S::splat((T)(drawn_i - v * W)) ? own / S::max(p, S::splat(floor)) : grad;
          settle(l, v, p, p > 0 ? grad : S::zero());
        }
      if (output > 0) grad_output = drawn_l < L ? -grad_drawn / 2 : own[0] / (output > floor ? output : floor);
    } else {
      grad_output = estimate_gumbel(step);
    }
    return grad_output;
  }

  inline void settle(int l, int v, V p, V grad) {
    T* sum = grad_active + l * size.P() + v * W;
    S::store(grad_rates + l * size.P() + v * W, grad);
    S::store(sum, S::load(sum) - grad * p);
  }

  T estimate_gumbel(i64 step) {
    const int P = size.P(), num_vectors = size.vectors(), depth = replay.depths[step];
    const T output = replay.outputs[step], temperature = (T)args.temperature, lowest = T(-1e30);
    const V floor = S::splat((T)args.rate_floor);
    if (args.seed) draw.shuffle(depth, (int)step);
    T* logits = work;
    V logit_out = S::splat(lowest), most;
    if (output > 0) {
      logit_out = S::log_of_positive(S::splat(output));
      if (args.seed) logit_out -= S::log(S::splat(draw.noise_out()));
      logit_out *= S::log2_e / temperature;
    }
    most = logit_out;
    for (int l = 0; l < depth; ++l)
      for (int v = 0; v < num_vectors; ++v) {
        const V p = probs(step, l, v);
        V logit = S::log_of_positive(p);
        if (args.seed) logit -= S::log(draw.noise(l, v));
        logit = p > 0 ? logit * (S::log2_e / temperature) : S::splat(lowest);
        S::store(logits + l * P + v * W, logit);
        most = S::max(most, logit);
      }
    most = S::largest(most);
    V total = S::zero(), mean = S::zero();
    for (int l = 0; l < depth; ++l)
      for (int v = 0; v < num_vectors; ++v) {
        const V share = S::exp2_of_negative(S::load(logits + l * P + v * W) - most);
        S::store(logits + l * P + v * W, share);
        total += share;
        mean += share * S::load(grad_active + l * P + v * W);
      }
    const V share_out = S::exp2_of_negative(logit_out - most), scale = 1 / (S::sum(total) + share_out);
    mean = S::sum(mean) * scale;
    for (int l = 0; l < depth; ++l)
      for (int v = 0; v < num_vectors; ++v) {
        const V p = probs(step, l, v), soft = S::load(logits + l * P + v * W) * scale;
        const V grad = soft * (S::load(grad_active + l * P + v * W) - mean) / (temperature * S::max(p, floor));
        settle(l, v, p, p > 0 ? grad : S::zero());
      }
    return output > 0 ? (share_out * scale * -mean / (temperature * S::max(S::splat(output), floor)))[0] : 0;
  }

  void run(i64 b) {
    const int L = size.L, N = size.N(), P = size.P(), M = L * N;
    const i64 num_active = args.num_active[b];
    const i64* nodes = args.nodes + b * args.steps;
    replay.start(b);
    replay.input_gates.start_back();
    for (i64 step = 0; step < num_active; ++step) replay.activate((int)nodes[step] / N, (int)nodes[step] % N, step);

    draw.start(b);
    for (int i = 0; i < P; ++i) grad_entry[i] = 0, grad_first[i] = 0;
    arrive(grad_active, (const T*)args.grad_active, b);
    if (args.grad_rates || args.grad_output) {
      arrive(grad_rates, (const T*)args.grad_rates, b);
      routing(num_active, args.grad_output ? ((const T*)args.grad_output)[b] : 0, false);
    }
    if (num_active < args.steps) routing(num_active, estimate(num_active, M), true);
    for (i64 step = num_active - 1; step >= 0; --step) {
      const int node = (int)nodes[step];
      take_back(node / N, node % N, step + 1);
      const T grad_output = estimate(step, node);
      if (step > 0) routing(step, grad_output, true);
      else  // nothing is active: every gradient goes to the entry
        for (int v = 0; v < size.vectors(); ++v)
          S::store(grad_entry + v * W, S::load(grad_entry + v * W) + S::load(grad_rates + v * W));
    }
    T* entry = (T*)args.grad_entry + b * N;
    for (int i = 0; i < N; ++i) entry[i] = grad_entry[i] + grad_first[i];
    replay.input_gates.finish();
  }

  // A sample's gradient (L, N) from outside, or zeros, with padding.
  inline void arrive(T* padded, const T* grad, i64 b) {
    const int L = size.L, N = size.N(), P = size.P();
    for (int l = 0; l < L; ++l)
      for (int i = 0; i < P; ++i) padded[l * P + i] = grad && i < N ? grad[(b * L + l) * N + i] : 0;
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
