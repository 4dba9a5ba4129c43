// One instruction set's copy of the convolution stages: a file that includes this names it in RAYTRACED_ISA.
// W samples at a time, one in each lane: every load is of a whole vector, nothing is shuffled, and any number of channels or
// pixels will do. A plane is (H + 2, W + 2) pixels with a border of zeros, W lanes each; axes otherwise as in convolution.h.
#pragma once

#include "convolution.h"
#include "lanes.h"
#include "pieces.h"

namespace raytraced {
namespace RAYTRACED_ISA {

struct Convolution {
#if defined(__AVX2__)
  typedef Lanes<float, 8> S;
#else
  typedef Lanes<float, 4> S;
#endif
  static constexpr int W = S::W;
  static constexpr int CUT = 4;
  typedef S::V V;
  typedef S::VI VI;
  typedef VI AnywhereI __attribute__((aligned(4)));

  static V load(const float* p) { return S::load_any(p); }
  static void store(float* p, V x) { S::store_any(p, x); }
  static i64 half_up(i64 n) { return (n + 1) / 2; }

  // Several planes side by side.
  struct Planes {
    float* data;
    i64 row, plane;  // the distance of two rows, of two planes
    Planes(float* data, i64 rows, i64 columns) : data(data), row((columns + 2) * W), plane((rows + 2) * row) {}
    float* at(i64 channel, i64 y, i64 x) const { return data + channel * plane + y * row + x * W; }  // 0, 0: the border
  };

  static void zero(float* to, i64 count) {
    for (i64 i = 0; i < count; ++i) to[i] = 0;
  }
  // All but the pixels 1 ... rows, 1 ... columns of a plane that may have more.
  static void clear_border(const Planes& planes, i64 channels, i64 rows, i64 columns) {
    for (i64 c = 0; c < channels; ++c) {
      float *plane = planes.at(c, 0, 0), *below = planes.at(c, rows + 1, 0);
      zero(plane, planes.row);
      zero(below, plane + planes.plane - below);
      for (i64 y = 1; y <= rows; ++y) {
        zero(planes.at(c, y, 0), W);
        zero(planes.at(c, y, columns + 1), planes.row - (columns + 1) * W);
      }
    }
  }

  // n numbers of each of `count` samples, `stride` apart, to one lane each, and back; the lanes that are left over get 0.
  static void to_lanes(const float* from, i64 stride, i64 count, i64 n, float* to) {
    i64 i = 0;
    for (; i + W <= n; i += W) {
      V r[W];
      for (int s = 0; s < W; ++s) r[s] = s < count ? load(from + s * stride + i) : V{};
      S::transpose(r);
      for (int s = 0; s < W; ++s) store(to + (i + s) * W, r[s]);
    }
    for (; i < n; ++i)
      for (int s = 0; s < W; ++s) to[i * W + s] = s < count ? from[s * stride + i] : 0;
  }
  static void from_lanes(const float* from, i64 n, float* to, i64 stride, i64 count) {
    i64 i = 0;
    for (; i + W <= n; i += W) {
      V r[W];
      for (int s = 0; s < W; ++s) r[s] = load(from + (i + s) * W);
      S::transpose(r);
      for (int s = 0; s < W; ++s)
        if (s < count) store(to + s * stride + i, r[s]);
    }
    for (; i < n; ++i)
      for (int s = 0; s < count; ++s) to[s * stride + i] = from[i * W + s];
  }

  // Adds to a block of 2×2 pixels, in row-major order, of N output channels: the 4×4 pixels at `window` of each input channel
  // times weights (N, C, 3, 3).
  template <int N>
  static inline __attribute__((always_inline)) void convolve(const float* window, const Planes& planes, i64 C, const float* weights,
                                                             V (&sum)[N][4]) {
    for (i64 c = 0; c < C; ++c, window += planes.plane, weights += 9) {
#pragma GCC unroll 9
      for (int tap = 0; tap < 9; ++tap) {
        V w[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) w[n] = S::splat(weights[n * C * 9 + tap]);
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          const V pixel = load(window + (tap / 3 + q / 2) * planes.row + (tap % 3 + q % 2) * W);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) sum[n][q] += w[n] * pixel;
        }
      }
    }
  }

  // The maximum of four, as PyTorch finds it (the first of equals, the last NaN), then ReLU; and which one it was.
  static V pool(const V (&of)[4], VI& winner) {
    V best = of[0];
    winner = VI{};
#pragma GCC unroll 4
    for (int q = 1; q < 4; ++q) {
      const VI better = (of[q] > best) | (of[q] != of[q]);
      best = better ? of[q] : best;
      winner = better ? VI{} + q : winner;
    }
    const VI cut = best <= V{};
    winner = cut ? VI{} + CUT : winner;
    return cut ? V{} : best;
  }

  static int* winners_at(const ConvolutionArgs& args, i64 s, int* winners, i64 k, i64 y, i64 x) {
    return winners + ((k * args.rows(s + 1) + y) * args.winner_columns(s) + x / 4) * W;
  }

  // `to` is the first pixel of the first output channel, in rows of `row` and planes of `plane` numbers.
  template <int N>
  static void forward_row(const ConvolutionArgs& args, i64 s, const Planes& in, i64 k, i64 y, float* to, i64 row, i64 plane,
                          int* winners) {
    const i64 C = args.channels[s], columns = args.columns(s + 1);
    const float* weights = args.weight(s) + k * C * 9;
    for (i64 x = 0; x < columns; ++x) {
      V sum[N][4];
      for (int n = 0; n < N; ++n)
        for (int q = 0; q < 4; ++q) sum[n][q] = S::splat(args.bias(s)[k + n]);
      convolve<N>(in.at(0, 2 * y, 2 * x), in, C, weights, sum);
      for (int n = 0; n < N; ++n) {
        VI winner;
        store(to + (k + n) * plane + y * row + x * W, pool(sum[n], winner));
        if (winners) {
          AnywhereI* four = (AnywhereI*)winners_at(args, s, winners, k + n, y, x);
          *four = x % 4 ? *four | winner << (int)(8 * (x % 4)) : winner;
        }
      }
    }
  }

  // One thread's memory: the first stage's input; the results, or gradients, of two stages; a dense gradient; flipped weights and
  // a sum of gradients for each parameter; the inputs of the other stages, where they are not kept.
  struct Memory {
    float *images, *results, *other, *dense, *flipped, *sums, *inputs;
    i64 bytes;
    Memory(const ConvolutionArgs& args, void* scratch) {
      i64 most = args.channels[0] * args.height * args.width, widest = 0, weights = 0;
      for (i64 s = 0; s < args.stages; ++s) {
        const i64 dense = args.channels[s + 1] * (2 * half_up(args.rows(s)) + 2) * (2 * half_up(args.columns(s)) + 2);
        most = args.pooled(s) > most ? args.pooled(s) : most;
        widest = dense > widest ? dense : widest;
        weights = args.num_weights(s) > weights ? args.num_weights(s) : weights;
      }
      Pieces pieces(scratch);
      images = pieces.take<float>(args.bordered(0) * W), results = pieces.take<float>(most * W);
      other = pieces.take<float>(most * W), dense = pieces.take<float>(widest * W);
      sums = pieces.take<float>(args.num_parameters() * W), inputs = pieces.take<float>(args.kept_size() * W);
      flipped = pieces.take<float>(weights);
      bytes = pieces.used();
    }
  };
  static i64 scratch_bytes(const ConvolutionArgs& args) { return Memory(args, nullptr).bytes; }

  static Planes read_images(const ConvolutionArgs& args, const Memory& memory, i64 begin, i64 count) {
    const i64 C = args.channels[0], size = args.height * args.width;
    const Planes images(memory.images, args.height, args.width);
    clear_border(images, C, args.height, args.width);
    for (i64 c = 0; c < C; ++c)
      for (i64 y = 0; y < args.height; ++y)
        to_lanes(args.images + (begin * C + c) * size + y * args.width, C * size, count, args.width, images.at(c, y + 1, 1));
    return images;
  }

  static void forward(const ConvolutionArgs& args, void* scratch, i64 begin, i64 end) {
    const Memory memory(args, scratch);
    for (; begin < end; begin += W) {
      const i64 count = end - begin < W ? end - begin : W, last = args.stages - 1;
      float* inputs = args.kept ? args.kept + begin * args.kept_size() : memory.inputs;
      int* winners = args.winners ? args.winners + begin * args.num_winners() : nullptr;
      Planes in = read_images(args, memory, begin, count);
      for (i64 s = 0; s <= last; ++s) {
        const i64 K = args.channels[s + 1], rows = args.rows(s + 1), columns = args.columns(s + 1);
        const Planes next(inputs, rows, columns);
        if (s < last) clear_border(next, K, rows, columns), inputs += args.bordered(s + 1) * W;
        float* to = s < last ? next.at(0, 1, 1) : memory.results;
        const i64 row = s < last ? next.row : columns * W, plane = s < last ? next.plane : rows * columns * W;
        for (i64 y = 0; y < rows; ++y) {
          i64 k = 0;
          for (; k + 2 <= K; k += 2) forward_row<2>(args, s, in, k, y, to, row, plane, winners);
          if (k < K) forward_row<1>(args, s, in, k, y, to, row, plane, winners);
        }
        if (winners) winners += args.winners_of(s) * W;
        in = next;
      }
      const i64 size = args.pooled(last);
      from_lanes(memory.results, size, args.out + begin * size, size, count);
    }
  }

#include "convolution_backward.inl"
};

inline ConvolutionKernel convolution_kernel() {
  return {Convolution::scratch_bytes, Convolution::forward, Convolution::backward};
}

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
