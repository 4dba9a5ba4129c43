// The gradient of the gates: each range of samples adds up its own, and only of the gates that its samples used.
// Axes: L layers, N experts per layer (P with padding), O = N + 1 outlets.
#pragma once

#include <cstring>

#include "gates.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

// In the layouts of PackedGates.
template <class S> struct GateGradient {
  typedef typename S::T T;
  const Size<S> size;
  T *first, *first_out, *out;
  unsigned char* used;  // (L-2, N): whether `outlets` has numbers for this node
  unsigned char* input_used;  // (L-1, N): the same of `input_gates`
  T *outlets, *input_gates;
  i64 rank, bytes;

  GateGradient(const SequenceArgs& args, void* memory) : size(args), rank(args.rank) {
    const i64 N = size.N(), P = size.P();
    Pieces pieces(memory);
    first = pieces.take<T>(N * P), first_out = pieces.take<T>(P), out = pieces.take<T>(size.inner() * P);
    used = pieces.take<unsigned char>(size.inner()), input_used = pieces.take<unsigned char>(rank ? size.gates() : 0);
    outlets = pieces.take<T>(size.inner() * N * P), input_gates = pieces.take<T>(size.gates() * rank * size.num_inputs());
    bytes = pieces.used();
  }

  // Zeros, those of a node's rows when it is first used.
  void start() { std::memset((void*)first, 0, (char*)outlets - (char*)first); }

  inline T* rows(i64 node) {
    const i64 count = (i64)size.N() * size.P();
    if (!used[node]) std::memset((void*)(outlets + node * count), 0, count * sizeof(T));
    used[node] = 1;
    return outlets + node * count;
  }
  inline T* input_rows(i64 gate) {
    const i64 count = rank * size.num_inputs();
    if (!input_used[gate]) std::memset((void*)(input_gates + gate * count), 0, count * sizeof(T));
    input_used[gate] = 1;
    return input_gates + gate * count;
  }
};

// Sums the gradients of all ranges, in their order, into grad_first, grad_inner and grad_factor.
template <class S> void reduce(const SequenceArgs& args, const void* gradients, i64 num_gradients) {
  typedef typename S::T T;
  GateGradient<S> sum(args, (void*)gradients);
  const Size<S>& size = sum.size;
  const i64 N = size.N(), P = size.P(), count = N * P;
  if (size.L < 2) return;
  const i64 num_small = (T*)sum.used - sum.first;
  for (i64 g = 1; g < num_gradients; ++g) {
    GateGradient<S> part(args, (char*)gradients + g * sum.bytes);
    for (i64 i = 0; i < num_small; i += S::W) S::store(sum.first + i, S::load(sum.first + i) + S::load(part.first + i));
    for (i64 node = 0; node < size.inner(); ++node) {
      if (!part.used[node]) continue;
      T *rows = sum.rows(node), *more = part.rows(node);
      for (i64 i = 0; i < count; i += S::W) S::store(rows + i, S::load(rows + i) + S::load(more + i));
    }
    for (i64 gate = 0; args.rank && gate < size.gates(); ++gate) {
      if (!part.input_used[gate]) continue;
      T *rows = sum.input_rows(gate), *more = part.input_rows(gate);
      for (i64 i = 0; i < args.rank * size.num_inputs(); i += S::W) S::store(rows + i, S::load(rows + i) + S::load(more + i));
    }
  }
  for (i64 gate = 0; args.rank && gate < size.gates(); ++gate) {
    const T* rows = sum.input_rows(gate);
    T* to = (T*)args.grad_factor + gate * (N + 1) * args.rank;
    for (i64 r = 0; r < args.rank; ++r)
      for (i64 o = 0; o <= N; ++o) to[o * args.rank + r] = rows[r * size.num_inputs() + (o < N ? o : P)];
  }
  T *first = (T*)args.grad_first, *inner = (T*)args.grad_inner;
  for (i64 i = 0; i < N; ++i) {
    for (i64 o = 0; o < N; ++o) first[i * (N + 1) + o] = sum.first[i * P + o];
    first[i * (N + 1) + N] = sum.first_out[i];
  }
  for (i64 node = 0; node < size.inner(); ++node) {
    T* gate = inner + node * (N + 1) * N;
    if (!sum.used[node]) {
      std::memset((void*)gate, 0, (N + 1) * N * sizeof(T));
      continue;
    }
    const T *rows = sum.rows(node), *out = sum.out + node / N * N * P + node % N;
    for (i64 o = 0; o < N; ++o)
      for (i64 k = 0; k < N; ++k) gate[o * N + k] = rows[k * P + o];
    for (i64 k = 0; k < N; ++k) gate[N * N + k] = out[k * P];
  }
}

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
