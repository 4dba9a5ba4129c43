// One instruction set's copy of the experts' kernel: a file that includes this names it in RAYTRACED_ISA.
// Axes as in experts.h; n rows of one expert.
#pragma once

#include "experts.h"
#include "pieces.h"
#include "tiles.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <typename T> struct Experts {
  typedef long long i64;
  static i64 padded(i64 width) { return tiles::round_up(width, 16); }

  static i64 widest(const ExpertsArgs& args) {
    i64 width = 1;
    for (i64 j = 0; j <= args.linears; ++j) width = tiles::most(width, args.widths[j]);
    return width;
  }

  // One thread's memory: two sets of panels, and for the backward pass two sets of rows, slabs and a block of weights.
  struct Memory {
    T *panels, *other, *inputs, *grads, *slabs, *packed;
    i64 bytes;
    Memory(const ExpertsArgs& args, void* scratch, i64 n) {
      Pieces pieces(scratch);
      const i64 size = tiles::panel_size<T>(n, widest(args));
      panels = pieces.take<T>(size), other = pieces.take<T>(size), inputs = pieces.take<T>(n * padded(args.dim()));
      grads = pieces.take<T>(n * padded(widest(args))), slabs = pieces.take<T>(n * padded(widest(args)));
      packed = pieces.take<T>(tiles::packed_size<T>());
      bytes = pieces.used();
    }
  };
  static i64 scratch_bytes(const ExpertsArgs& args, i64 n) { return Memory(args, nullptr, n).bytes; }

  static void zero(T* to, i64 count) {
    for (i64 i = 0; i < count; ++i) to[i] = 0;
  }

  static T* state(const ExpertsArgs& args, i64 layer) {  // what a layer gives
    const bool last = layer == args.layers - 1 && args.stream != SKIP_SUM;
    return last ? (T*)args.out : (T*)args.states + layer * args.batch * args.dim();
  }
  static const T* given(const ExpertsArgs& args, i64 layer) {  // what a layer gets
    return layer ? state(args, layer - 1) : (const T*)args.hidden;
  }

  static void run(const ExpertsArgs& args, void* scratch, i64 chunk, i64 node) {
    const i64 begin = args.chunk_offsets(chunk)[node], n = args.chunk_offsets(chunk)[node + 1] - begin, D = args.dim();
    if (!n) return;
    const int* rows = args.rows + begin;
    const T* hidden = given(args, node / args.experts);
    Memory memory(args, scratch, n);
    T *x = memory.panels, *y = memory.other;
    tiles::rows_to_panels<T>([=](i64 r) { return hidden + rows[r] * D; }, n, D, x);
    for (i64 j = 0; j < args.linears; ++j) {
      const i64 K = args.widths[j], O = args.widths[j + 1];
      const bool last = j == args.linears - 1;
      tiles::forward((const T*)args.weights()[j] + node * O * K, (const T*)args.biases()[j] + node * O, O, K, x, n, y, !last);
      if (!last && args.inner) {
        T* kept = (T*)args.inner[j] + begin * padded(O);
        tiles::panels_to_rows(y, n, O, kept, padded(O));
        for (i64 r = 0; r < n; ++r) zero(kept + r * padded(O) + O, padded(O) - O);
      }
      T* swap = x;
      x = y, y = swap;
    }
    tiles::panels_to_rows(x, n, D, (T*)args.results + begin * D, D);
  }

  // Calls visit(pair, row) for an expert's pairs with a row in begin ... end; rows are sorted.
  template <class F> static void each_pair(const ExpertsArgs& args, i64 chunk, i64 node, i64 begin, i64 end, F visit) {
    i64 low = args.chunk_offsets(chunk)[node], high = args.chunk_offsets(chunk)[node + 1];
    const i64 stop = high;
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (args.rows[middle] < begin) low = middle + 1;
      else high = middle;
    }
    for (i64 pair = low; pair < stop && args.rows[pair] < end; ++pair) visit(pair, (i64)args.rows[pair]);
  }

  static void join(const ExpertsArgs& args, i64 chunk, i64 layer, i64 begin, i64 end) {
    const i64 D = args.dim();
    const T *from = given(args, layer), *mix = (const T*)args.mix;
    T *to = state(args, layer), *out = (T*)args.out;
    if (args.stream == RESIDUAL)
      for (i64 i = begin * D; i < end * D; ++i) to[i] = from[i];
    else zero(to + begin * D, (end - begin) * D);
    for (i64 node = layer * args.experts; node < (layer + 1) * args.experts; ++node)
      each_pair(args, chunk, node, begin, end, [&](i64 pair, i64 row) {
        const T weight = mix[row * args.nodes() + node];
        const T* result = (const T*)args.results + pair * D;
        T* target = to + row * D;
        for (i64 d = 0; d < D; ++d) target[d] += weight * result[d];
      });
    if (args.stream == SKIP_SUM)
      for (i64 i = begin * D; i < end * D; ++i) out[i] = layer ? out[i] + to[i] : to[i];
  }

  // Where an expert's gradients go: to the tensors themselves, or to the chunk's own copy of them.
  struct Target {
    T *weight, *bias;
    Target(const ExpertsArgs& args, void* partial, i64 chunk, i64 node, i64 linear) {
      const i64 O = args.widths[linear + 1], K = args.widths[linear];
      if (args.num_chunks == 1) {
        weight = (T*)args.grad_weights()[linear] + node * O * K, bias = (T*)args.grad_biases()[linear] + node * O;
        return;
      }
      i64 size = 0, before = 0;
      for (i64 j = 0; j < args.linears; ++j) {
        if (j == linear) before = size;
        size += (args.widths[j] + 1) * args.widths[j + 1];
      }
      weight = (T*)partial + (chunk * args.nodes() + node) * size + before, bias = weight + O * K;
    }
  };

  static void run_back(const ExpertsArgs& args, void* scratch, void* partial, i64 chunk, i64 node) {
    const i64 begin = args.chunk_offsets(chunk)[node], n = args.chunk_offsets(chunk)[node + 1] - begin, D = args.dim();
    if (!n) {
      if (args.num_chunks == 1)
        for (i64 j = 0; j < args.linears; ++j) {
          const Target target(args, partial, chunk, node, j);
          zero(target.weight, args.widths[j] * args.widths[j + 1]);
          zero(target.bias, args.widths[j + 1]);
        }
      return;
    }
    const int* rows = args.rows + begin;
    const T *hidden = given(args, node / args.experts), *mix = (const T*)args.mix, *results = (const T*)args.results + begin * D;
    Memory memory(args, scratch, n);
    const i64 D_padded = padded(D);
    for (i64 r = 0; r < n; ++r) {
      const T *grad = (const T*)args.grad_hidden + rows[r] * D, *x = hidden + rows[r] * D;
      const i64 entry = rows[r] * args.nodes() + node;
      ((T*)args.grad_mix)[entry] = dot(grad, results + r * D, D);
      T *scaled = memory.grads + r * D_padded, *inputs = memory.inputs + r * D_padded;
      for (i64 d = 0; d < D; ++d) scaled[d] = mix[entry] * grad[d], inputs[d] = x[d];
      zero(inputs + D, D_padded - D);
    }
    T *gy = memory.panels, *grads = memory.grads;
    tiles::rows_to_panels<T>([=](i64 r) { return grads + r * D_padded; }, n, D, gy);
    for (i64 j = args.linears - 1; j >= 0; --j) {
      const i64 K = args.widths[j], O = args.widths[j + 1], K_padded = padded(K);
      const T* x = j ? (const T*)args.inner[j - 1] + begin * K_padded : memory.inputs;
      const Target target(args, partial, chunk, node, j);
      tiles::weight(gy, O, n, x, K_padded, K, target.weight, memory.slabs);
      tiles::bias_gradient(gy, O, n, target.bias);
      tiles::input(gy, O, n, (const T*)args.weights()[j] + node * O * K, K, grads, K_padded, memory.packed);
      if (!j) break;
      for (i64 i = 0; i < n * K_padded; ++i) grads[i] = x[i] > 0 ? grads[i] : T(0);
      tiles::rows_to_panels<T>([=](i64 r) { return grads + r * K_padded; }, n, K, gy);
    }
    for (i64 r = 0; r < n; ++r)
      for (i64 d = 0; d < D; ++d) ((T*)args.grad_results)[(begin + r) * D + d] = grads[r * D_padded + d];
  }

  static T dot(const T* a, const T* b, i64 count) {
    constexpr int V = tiles::lanes<T>;
    tiles::vec<T> sum = {};
    i64 i = 0;
    for (; i + V <= count; i += V) sum += tiles::load(a + i) * tiles::load(b + i);
    T total = 0;
    for (int v = 0; v < V; ++v) total += sum[v];
    for (; i < count; ++i) total += a[i] * b[i];
    return total;
  }

  // grad_hidden holds the gradient of what the layer gives; afterwards that of what it gets.
  static void join_back(const ExpertsArgs& args, i64 chunk, i64 layer, i64 begin, i64 end) {
    const i64 D = args.dim();
    T* grad = (T*)args.grad_hidden;
    const T* grad_out = (const T*)args.grad_out;
    if (args.stream == LAST || (args.stream == SKIP_SUM && !layer)) zero(grad + begin * D, (end - begin) * D);
    if (args.stream == SKIP_SUM && layer)
      for (i64 i = begin * D; i < end * D; ++i) grad[i] = grad_out[i];
    for (i64 node = layer * args.experts; node < (layer + 1) * args.experts; ++node)
      each_pair(args, chunk, node, begin, end, [&](i64 pair, i64 row) {
        const T* result = (const T*)args.grad_results + pair * D;
        for (i64 d = 0; d < D; ++d) grad[row * D + d] += result[d];
      });
    if (!layer || !args.grad_states) return;
    const T* grad_exit = (const T*)args.grad_states + (layer - 1) * args.batch * D;
    for (i64 i = begin * D; i < end * D; ++i) grad[i] += grad_exit[i];
  }

  static void reduce(const ExpertsArgs& args, const void* partial, i64 node) {
    for (i64 j = 0; j < args.linears; ++j) {
      const i64 O = args.widths[j + 1], K = args.widths[j];
      T *weight = (T*)args.grad_weights()[j] + node * O * K, *bias = (T*)args.grad_biases()[j] + node * O;
      bool any = false;
      for (i64 c = 0; c < args.num_chunks; ++c) {
        if (args.chunk_offsets(c)[node] == args.chunk_offsets(c)[node + 1]) continue;
        const Target part(args, (void*)partial, c, node, j);
        for (i64 i = 0; i < O * K; ++i) weight[i] = any ? weight[i] + part.weight[i] : part.weight[i];
        for (i64 o = 0; o < O; ++o) bias[o] = any ? bias[o] + part.bias[o] : part.bias[o];
        any = true;
      }
      if (!any) zero(weight, O * K), zero(bias, O);
    }
  }

  static ExpertsKernel kernel() { return {scratch_bytes, run, run_back, join, join_back, reduce}; }
};

static ExpertsKernel experts_kernel(const ExpertsArgs& args) {
  return args.is_double ? Experts<double>::kernel() : Experts<float>::kernel();
}

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
