// One instruction set's copy of what lies between the sequence and the experts: a file that includes this names it in
// RAYTRACED_ISA. As routing.py and sequence.py define it; the sums of a row run in the same order whatever the rows around it.
#pragma once

#include "raytrace.h"

namespace raytraced {
namespace RAYTRACED_ISA {

template <typename T> struct Raytrace {
  typedef long long i64;
  static float exp(float x) { return __builtin_expf(x); }
  static double exp(double x) { return __builtin_exp(x); }

  static T dot(const T* a, const T* b, i64 count) {
    constexpr int LANES = 8;
    T sums[LANES] = {};
    i64 d = 0;
    for (; d + LANES <= count; d += LANES)
      for (int lane = 0; lane < LANES; ++lane) sums[lane] += a[d + lane] * b[d + lane];
    for (; d < count; ++d) sums[d % LANES] += a[d] * b[d];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }
  static void add(T* __restrict__ to, T scale, const T* __restrict__ from, i64 count) {
    for (i64 d = 0; d < count; ++d) to[d] += scale * from[d];
  }

  // Entry rates, softmax(W h + b), and the projection of the input for the gates, U h.
  static void enter(const RaytracePass& pass, i64 begin, i64 end) {
    const RaytraceArgs& args = pass.args;
    const i64 N = args.sequence.experts, R = args.sequence.rank, D = args.experts.dim();
    const T* const* maps = (const T* const*)args.table.maps;
    for (i64 b = begin; b < end; ++b) {
      const T* hidden = (const T*)pass.call.hidden + b * D;
      T *entry = (T*)pass.between.entry + b * N, *projected = (T*)pass.between.projected + b * R, total = 0;
      for (i64 i = 0; i < N; ++i) entry[i] = maps[1][i] + dot(maps[0] + i * D, hidden, D);
      for (i64 r = 0; r < R; ++r) projected[r] = dot(maps[2] + r * D, hidden, D);
      T most = entry[0];
      for (i64 i = 1; i < N; ++i) most = most >= entry[i] ? most : entry[i];
      for (i64 i = 0; i < N; ++i) total += entry[i] = exp(entry[i] - most);
      for (i64 i = 0; i < N; ++i) entry[i] /= total;
    }
  }

  static void enter_back(const RaytracePass& pass, void* partial, i64 begin, i64 end) {
    const RaytraceArgs& args = pass.args;
    const i64 N = args.sequence.experts, R = args.sequence.rank, D = args.experts.dim();
    const T* const* maps = (const T* const*)args.table.maps;
    T *weight = (T*)partial, *bias = weight + N * D, *into = bias + N;
    for (i64 i = 0; i < pass.num_maps(); ++i) weight[i] = 0;
    for (i64 b = begin; b < end; ++b) {
      const T *hidden = (const T*)pass.call.hidden + b * D, *entry = (const T*)pass.between.entry + b * N;
      const T *grad = (const T*)pass.between.grad_entry + b * N, *projected = (const T*)pass.between.grad_projected + b * R;
      T* grad_hidden = (T*)pass.call.grad_hidden + b * D;
      const T mean = dot(entry, grad, N);
      for (i64 i = 0; i < N; ++i) {
        const T logit = entry[i] * (grad[i] - mean);
        bias[i] += logit;
        add(weight + i * D, logit, hidden, D);
        add(grad_hidden, logit, maps[0] + i * D, D);
      }
      for (i64 r = 0; r < R; ++r) {
        add(into + r * D, projected[r], hidden, D);
        add(grad_hidden, projected[r], maps[2] + r * D, D);
      }
    }
  }

  // The largest rate of a layer's active experts; NaN where there is a NaN.
  static T largest(const T* active, const T* rates, i64 count) {
    T most = 0;
    for (i64 i = 0; i < count; ++i) {
      const T rate = active[i] * rates[i];
      most = rate > most || rate != rate ? rate : most;
    }
    return most;
  }

  // How much each active expert counts.
  static void weigh(const RaytracePass& pass, i64 begin, i64 end) {
    const RaytraceArgs& args = pass.args;
    const i64 N = args.sequence.experts, L = args.sequence.layers;
    const T floor = (T)args.sequence.rate_floor;
    for (i64 at = begin * L * N; at < end * L * N; at += N) {
      const T *active = (const T*)pass.call.active + at, *rates = (const T*)pass.call.rates + at;
      T *mix = (T*)pass.between.mix + at, total = 0, count = 0;
      for (i64 i = 0; i < N; ++i) total += active[i] * rates[i], count += active[i];
      if (args.weighting == RELATIVE) total = largest(active, rates, N);
      const T constant = (T)args.weight_scale, scale = args.weighting == RATES ? count * constant : constant;
      const T least = total > floor ? total : floor;
      if (args.weighting == UNIT || !(total > 0))
        for (i64 i = 0; i < N; ++i) mix[i] = active[i] * constant;
      else
        for (i64 i = 0; i < N; ++i) mix[i] = active[i] * (rates[i] / least) * scale;
    }
  }

  static void weigh_back(const RaytracePass& pass, i64 begin, i64 end) {
    const RaytraceArgs& args = pass.args;
    const i64 N = args.sequence.experts, L = args.sequence.layers;
    const T floor = (T)args.sequence.rate_floor;
    for (i64 at = begin * L * N; at < end * L * N; at += N) {
      const T *active = (const T*)pass.call.active + at, *rates = (const T*)pass.call.rates + at, *grad = (const T*)pass.between.grad_mix + at;
      T *grad_rates = (T*)pass.call.grad_rates + at, *grad_active = pass.call.grad_active ? (T*)pass.call.grad_active + at : nullptr;
      T total = 0, count = 0, sum = 0;
      for (i64 i = 0; i < N; ++i) {
        const T passed = active[i] * rates[i];
        total += passed, sum += grad[i] * passed, count += active[i];
      }
      if (args.weighting == RELATIVE) total = largest(active, rates, N);
      const T constant = (T)args.weight_scale;
      if (args.weighting == UNIT || !(total > 0)) {
        for (i64 i = 0; grad_active && i < N; ++i) grad_active[i] += grad[i] * constant;
        continue;
      }
      const T scale = (args.weighting == RATES ? count * constant : constant) / (total > floor ? total : floor);
      // Below the floor the total is a constant; the largest rate always is one.
      const T mean = total >= floor && args.weighting != RELATIVE ? sum / total : T(0);
      for (i64 i = 0; i < N; ++i) grad_rates[i] += active[i] * (grad[i] - mean) * scale;
      for (i64 i = 0; grad_active && i < N; ++i) grad_active[i] += rates[i] * (grad[i] - mean) * scale;
    }
  }

  static bool answer(const EarlyExitCall& call, const void* vector, i64 dim, i64 row, i64 exit) {
    const T *weight = (const T*)call.weight, *bias = (const T*)call.bias;
    T* logits = (T*)call.logits + row * call.classes;
    for (i64 y = 0; y < call.classes; ++y) logits[y] = bias[y] + dot(weight + y * dim, (const T*)vector, dim);
    T most = logits[0], total = 0;
    for (i64 y = 1; y < call.classes; ++y) most = most >= logits[y] ? most : logits[y];
    for (i64 y = 0; y < call.classes; ++y) total += exp(logits[y] - most);
    return !(1 / total < (T)call.thresholds[exit]);
  }

  static RaytraceKernel kernel() { return {enter, weigh, weigh_back, enter_back, answer}; }
};

static RaytraceKernel raytrace_kernel(const RaytraceArgs& args) {
  return args.sequence.is_double ? Raytrace<double>::kernel() : Raytrace<float>::kernel();
}

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
