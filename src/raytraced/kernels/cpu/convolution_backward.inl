// The backward half of struct Convolution, included inside it. `grads` are a stage's gradients (K, H, W) after the pooling, W
// lanes each; `dense` are those before it: 0 but for the winners, with a border and an even number of rows and columns.

  static void spread(const ConvolutionArgs& args, i64 s, const float* grads, int* winners, const Planes& dense,
                     float* bias_sums) {
    const i64 K = args.channels[s + 1], rows = args.rows(s + 1), columns = args.columns(s + 1);
    clear_border(dense, K, 2 * rows, 2 * columns);
    for (i64 k = 0; k < K; ++k) {
      V all{};
      for (i64 y = 0; y < rows; ++y) {
        V sum{};
        for (i64 x = 0; x < columns; ++x) {
          const i64 i = ((k * rows + y) * columns + x) * W;
          const V grad = load(grads + i);
          const VI winner = *(const AnywhereI*)winners_at(args, s, winners, k, y, x) >> (int)(8 * (x % 4)) & 255;
          for (int q = 0; q < 4; ++q)
            store(dense.at(k, 2 * y + 1 + q / 2, 2 * x + 1 + q % 2), winner == VI{} + q ? grad : V{});
          sum += winner == VI{} + CUT ? V{} : grad;
        }
        all += sum;
      }
      store(bias_sums + k * W, load(bias_sums + k * W) + all);
    }
  }

  // A row's sums are added to those so far, which keeps the rounding of long sums small.
  static void weight_gradients(const ConvolutionArgs& args, i64 s, const Planes& in, const Planes& dense, float* sums) {
    const i64 C = args.channels[s], K = args.channels[s + 1], rows = args.rows(s + 1), columns = args.columns(s + 1);
    for (i64 y = 0; y < rows; ++y)
      for (i64 k = 0; k < K; ++k)
        for (i64 c = 0; c < C; ++c) {
          V sum[9] = {};
          const float *window = in.at(c, 2 * y, 0), *grads = dense.at(k, 2 * y + 1, 1);
          for (i64 x = 0; x < columns; ++x, window += 2 * W, grads += 2 * W) {
            // Hides how far the next window is: the compiler would keep the pixels that both have, more than there are registers.
            asm("" : "+r"(window), "+r"(grads));
            V grad[4];
#pragma GCC unroll 4
            for (int q = 0; q < 4; ++q) grad[q] = load(grads + q / 2 * dense.row + q % 2 * W);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
              for (int i = 0; i < 4; ++i) {
                const V pixel = load(window + r * in.row + i * W);
#pragma GCC unroll 4
                for (int q = 0; q < 4; ++q) {
                  const int dy = r - q / 2, dx = i - q % 2;
                  if (dy >= 0 && dy < 3 && dx >= 0 && dx < 3) sum[dy * 3 + dx] += grad[q] * pixel;
                }
              }
          }
          float* to = sums + (k * C + c) * 9 * W;
#pragma GCC unroll 9
          for (int t = 0; t < 9; ++t) store(to + t * W, load(to + t * W) + sum[t]);
        }
  }

  // The gradients of input channels c ... c + N - 1: a convolution too, of the dense gradients with the flipped weights.
  template <int N>
  static void input_row(const ConvolutionArgs& args, i64 s, const Planes& dense, const float* flipped, i64 c, i64 y, float* to) {
    const i64 K = args.channels[s + 1], rows = args.rows(s), columns = args.columns(s);
    for (i64 x = 0; x < half_up(columns); ++x) {
      V sum[N][4] = {};
      convolve<N>(dense.at(0, 2 * y, 2 * x), dense, K, flipped + c * K * 9, sum);
      for (int n = 0; n < N; ++n)
        for (int q = 0; q < 4; ++q) {
          const i64 at_y = 2 * y + q / 2, at_x = 2 * x + q % 2;
          if (at_y < rows && at_x < columns) store(to + (((c + n) * rows + at_y) * columns + at_x) * W, sum[n][q]);
        }
    }
  }
  static void input_gradients(const ConvolutionArgs& args, i64 s, const Planes& dense, float* flipped, float* to) {
    const i64 C = args.channels[s], K = args.channels[s + 1];
    for (i64 c = 0; c < C; ++c)
      for (i64 k = 0; k < K; ++k)
        for (i64 t = 0; t < 9; ++t) flipped[(c * K + k) * 9 + t] = args.weight(s)[(k * C + c) * 9 + 8 - t];
    for (i64 y = 0; y < half_up(args.rows(s)); ++y) {
      i64 c = 0;
      for (; c + 2 <= C; c += 2) input_row<2>(args, s, dense, flipped, c, y, to);
      if (c < C) input_row<1>(args, s, dense, flipped, c, y, to);
    }
  }

  static void backward(const ConvolutionArgs& args, void* scratch, float* partial, i64 begin, i64 end) {
    Memory memory(args, scratch);
    const i64 num_parameters = args.num_parameters();
    zero(memory.sums, num_parameters * W);
    for (; begin < end; begin += W) {
      const i64 count = end - begin < W ? end - begin : W, size = args.pooled(args.stages - 1);
      const Planes images = read_images(args, memory, begin, count);
      float* inputs = args.kept + (begin + W) * args.kept_size();  // both from their ends
      int* winners = args.winners + (begin + W) * args.num_winners();
      float* sums = memory.sums + num_parameters * W;
      float *grads = memory.results, *before = memory.other;
      to_lanes(args.grad_out + begin * size, size, count, size, grads);
      for (i64 s = args.stages - 1; s >= 0; --s) {
        const i64 K = args.channels[s + 1];
        winners -= args.winners_of(s) * W, sums -= (args.num_weights(s) + K) * W;
        if (s) inputs -= args.bordered(s) * W;
        const Planes in = s ? Planes(inputs, args.rows(s), args.columns(s)) : images;
        const Planes dense(memory.dense, 2 * half_up(args.rows(s)), 2 * half_up(args.columns(s)));
        spread(args, s, grads, winners, dense, sums + args.num_weights(s) * W);
        weight_gradients(args, s, in, dense, sums);
        if (!s && !args.grad_images) break;
        input_gradients(args, s, dense, memory.flipped, before);
        float* swap = grads;
        grads = before, before = swap;
      }
      const i64 pixels = args.channels[0] * args.height * args.width;
      if (args.grad_images) from_lanes(grads, pixels, args.grad_images + begin * pixels, pixels, count);
    }
    for (i64 i = 0; i < num_parameters; ++i) partial[i] = S::sum(load(memory.sums + i * W))[0];
  }
