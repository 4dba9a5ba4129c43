// Matrix products on the few rows that one expert gets. The weights are read once and in order.
// Axes: n rows, K inputs and O outputs of a linear layer, V lanes of a vector.
// A panel holds 2V rows side by side, transposed: panel[k * 2V + row]; the last one only V rows where that is enough.
// A sum runs over k in ascending order whatever the tile, so that a row's result never depends on the rows around it.
#pragma once

#include "lanes.h"

namespace raytraced {
namespace RAYTRACED_ISA {
namespace tiles {

#if defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 most(i64 a, i64 b) { return a < b ? b : a; }
static inline i64 round_up(i64 value, i64 step) { return (value + step - 1) / step * step; }

template <typename T> using Wide = Lanes<T, VECTOR_BYTES / sizeof(T)>;
template <typename T> using vec = typename Wide<T>::V;
template <typename T> constexpr int lanes = Wide<T>::W;
template <typename T> static inline vec<T> load(const T* p) { return Wide<T>::load_any(p); }
template <typename T> static inline void store(T* p, vec<T> x) { Wide<T>::store_any(p, x); }

template <typename T> static inline i64 num_panels(i64 n) { return (n + 2 * lanes<T> - 1) / (2 * lanes<T>); }
template <typename T> static inline i64 panel_width(i64 n, i64 panel) {
  return n - panel * 2 * lanes<T> > lanes<T> ? 2 * lanes<T> : lanes<T>;
}
template <typename T> static inline i64 panel_size(i64 n, i64 width) { return num_panels<T>(n) * 2 * lanes<T> * width; }

// Calls visit(first row, rows, panel's half, panel's width) for each V rows.
template <typename T, class F> static inline void each_half(T* panels, i64 n, i64 width, F visit) {
  constexpr int V = lanes<T>;
  for (i64 first = 0; first < n; first += V) {
    const i64 panel = first / (2 * V);
    visit(first, least(V, n - first), panels + panel * 2 * V * width + first % (2 * V), panel_width<T>(n, panel));
  }
}

// Rows, row(r) long `width`, into panels; lanes without a row are zero.
template <typename T, class Row> static inline void rows_to_panels(Row row, i64 n, i64 width, T* panels) {
  constexpr int V = lanes<T>;
  each_half(panels, n, width, [&](i64 first, i64 rows, T* half, i64 stride) {
    const T* source[V];
    for (int r = 0; r < V; ++r) source[r] = row(first + least(r, rows - 1));
    i64 k = 0;
    for (; k + V <= width; k += V) {
      vec<T> x[V];
      for (int r = 0; r < V; ++r) x[r] = load(source[r] + k);
      for (int r = (int)rows; r < V; ++r) x[r] = vec<T>{};
      Wide<T>::transpose(x);
      for (int r = 0; r < V; ++r) store(half + (k + r) * stride, x[r]);
    }
    for (; k < width; ++k)
      for (int r = 0; r < V; ++r) half[k * stride + r] = r < rows ? source[r][k] : T(0);
  });
}

// Panels into rows `stride` apart.
template <typename T> static inline void panels_to_rows(const T* panels, i64 n, i64 width, T* rows_out, i64 row_stride) {
  constexpr int V = lanes<T>;
  each_half((T*)panels, n, width, [&](i64 first, i64 rows, T* half, i64 stride) {
    T* target = rows_out + first * row_stride;
    i64 k = 0;
    for (; k + V <= width; k += V) {
      vec<T> x[V];
      for (int r = 0; r < V; ++r) x[r] = load(half + (k + r) * stride);
      Wide<T>::transpose(x);
      for (int r = 0; r < rows; ++r) store(target + r * row_stride + k, x[r]);
    }
    for (; k < width; ++k)
      for (int r = 0; r < rows; ++r) target[r * row_stride + k] = half[k * stride + r];
  });
}

// y[o, rows] = start[o, rows] + sum over k of w[o, k] x[k, rows], for R outputs and C vectors of rows. Weights that are
// needed soon are asked for on the way: memory is slower than the arithmetic of few rows.
template <typename T, int R, int C>
static inline void tile_forward(const T* w, i64 stride, i64 K, i64 valid, const T* bias, const T* x, T* y, bool relu,
                                const T* soon, int soon_rows) {
  constexpr int V = lanes<T>, UNROLL = 8;
  const T* row[R];
  vec<T> sum[R][C];
  for (int r = 0; r < R; ++r) {
    const i64 o = least(r, valid - 1);
    row[r] = w + o * stride;
    for (int c = 0; c < C; ++c) sum[r][c] = bias ? vec<T>{} + bias[o] : load(y + (o * C + c) * V);
  }
  i64 k = 0;
  for (; k + UNROLL <= K; k += UNROLL) {
    if (k * sizeof(T) % 64 == 0)
      for (int r = 0; r < soon_rows; ++r) __builtin_prefetch(soon + r * stride + k, 0, 2);
#pragma GCC unroll 8
    for (int u = 0; u < UNROLL; ++u) {
      vec<T> here[C];
      for (int c = 0; c < C; ++c) here[c] = load(x + ((k + u) * C + c) * V);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] += here[c] * row[r][k + u];
    }
  }
  for (; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] += load(x + (k * C + c) * V) * row[r][k];
  for (int r = 0; r < valid; ++r)
    for (int c = 0; c < C; ++c) store(y + (r * C + c) * V, relu ? (sum[r][c] > 0 ? sum[r][c] : vec<T>{}) : sum[r][c]);
}

// Panels y (O, n) = bias + w (O, K) x (K, n), then ReLU where asked.
template <typename T, int R>
static void forward_by(const T* w, const T* bias, i64 O, i64 K, const T* x, i64 n, T* y, bool relu) {
  constexpr int V = lanes<T>;
  constexpr i64 BLOCK = 2048 / sizeof(T);  // inputs at a time: R rows of weights stay in the first cache
  const i64 panels = num_panels<T>(n);
  for (i64 k = 0; k < K; k += BLOCK) {
    const i64 depth = least(BLOCK, K - k);
    const bool last = k + depth == K;
    for (i64 o = 0; o < O; o += R) {
      const i64 valid = least(R, O - o);
      const T* here = w + o * K + k;
      for (i64 p = 0; p < panels; ++p) {
        const i64 width = panel_width<T>(n, p);
        const T* from = x + (p * 2 * V * K + k * width);
        T* to = y + p * 2 * V * O + o * width;
        const T* start = k ? nullptr : bias + o;
        const i64 first = p * R / panels, ask = o + 2 * R <= O ? (p + 1) * R / panels - first : 0;
        const T* soon = here + (R + first) * K;
        if (width == V) tile_forward<T, R, 1>(here, K, depth, valid, start, from, to, relu && last, soon, (int)ask);
        else tile_forward<T, R, 2>(here, K, depth, valid, start, from, to, relu && last, soon, (int)ask);
      }
    }
  }
}

template <typename T> static inline void forward(const T* w, const T* bias, i64 O, i64 K, const T* x, i64 n, T* y, bool relu) {
  // Six outputs use the registers best; four waste nothing on the widths of tiny experts; few rows need more at a time.
  if (n <= lanes<T>) forward_by<T, 8>(w, bias, O, K, x, n, y, relu);
  else if (O % 6 && O < 64) forward_by<T, 4>(w, bias, O, K, x, n, y, relu);
  else forward_by<T, 6>(w, bias, O, K, x, n, y, relu);
}

// gw[o, k] = sum over rows of gy[o, row] x[row, k], for R outputs and C vectors of inputs; gy in panels, x one slab.
template <typename T, int R, int C>
static inline void tile_weight(const T* gy, i64 O, i64 n, i64 o, i64 valid, const T* x, T* gw, i64 K, i64 columns) {
  constexpr int V = lanes<T>;
  vec<T> sum[R][C];
  for (int r = 0; r < R; ++r) {
    __builtin_prefetch(gw + (R + r) * K, 1, 3);  // where the next tile will write
    for (int c = 0; c < C; ++c) sum[r][c] = vec<T>{};
  }
  for (i64 p = 0; p < num_panels<T>(n); ++p) {
    const i64 width = panel_width<T>(n, p), rows = least(n - p * 2 * V, 2 * V);
    const T* row[R];
    for (int r = 0; r < R; ++r) row[r] = gy + p * 2 * V * O + (o + least(r, valid - 1)) * width;
#pragma GCC unroll 4
    for (i64 s = 0; s < rows; ++s, x += C * V) {
      vec<T> here[C];
      for (int c = 0; c < C; ++c) here[c] = load(x + c * V);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] += here[c] * row[r][s];
    }
  }
  for (int r = 0; r < valid; ++r)
    for (int c = 0; c < C; ++c) {
      T* to = gw + r * K + c * V;
      if ((c + 1) * V <= columns) store(to, sum[r][c]);
      else for (i64 i = 0; c * V + i < columns; ++i) to[i] = sum[r][c][i];
    }
}

constexpr i64 SLABS = 32;  // of inputs at a time: they stay in a near cache while all outputs pass by

// gw (O, K) = gy (O, n) x (n, K); gy in panels, x in rows padded to whole slabs of 2V inputs. `slabs` holds n * K, padded.
template <typename T, int R> static void weight_by(const T* gy, i64 O, i64 n, const T* x, i64 stride, i64 K, T* gw, T* slabs) {
  constexpr int V = lanes<T>;
  for (i64 k = 0; k < K; k += 2 * V)
    for (i64 s = 0; s < n; ++s) {
      T* to = slabs + k * n;
      if (K - k > V) store(to + s * 2 * V, load(x + s * stride + k)), store(to + s * 2 * V + V, load(x + s * stride + k + V));
      else store(to + s * V, load(x + s * stride + k));
    }
  for (i64 first = 0; first < K; first += SLABS * 2 * V)
    for (i64 o = 0; o < O; o += R) {
      const i64 valid = least(R, O - o);
      for (i64 k = first; k < least(K, first + SLABS * 2 * V); k += 2 * V) {
        if (K - k > V) tile_weight<T, R, 2>(gy, O, n, o, valid, slabs + k * n, gw + o * K + k, K, K - k);
        else tile_weight<T, R, 1>(gy, O, n, o, valid, slabs + k * n, gw + o * K + k, K, K - k);
      }
    }
}
template <typename T>
static inline void weight(const T* gy, i64 O, i64 n, const T* x, i64 stride, i64 K, T* gw, T* slabs) {
  if (O % 6 && O < 64) weight_by<T, 4>(gy, O, n, x, stride, K, gw, slabs);
  else weight_by<T, 6>(gy, O, n, x, stride, K, gw, slabs);
}

// gb (O) = sum of gy (O, n) over its rows.
template <typename T> static inline void bias_gradient(const T* gy, i64 O, i64 n, T* gb) {
  constexpr int V = lanes<T>;
  for (i64 o = 0; o < O; ++o) {
    vec<T> sum = {};
    for (i64 first = 0; first < n; first += V) {
      const i64 p = first / (2 * V);
      sum += load(gy + p * 2 * V * O + o * panel_width<T>(n, p) + first % (2 * V));
    }
    T total = 0;
    for (int v = 0; v < V; ++v) total += sum[v];
    gb[o] = total;
  }
}

// gx[row, k] (+)= sum over o of gy[o, row] w[o, k] for up to R rows and C vectors of inputs; w packed to C vectors per row.
template <typename T, int R, int C>
static inline void tile_input(const T* gy, i64 width, i64 O, i64 valid, const T* w, T* gx, i64 stride, bool add) {
  constexpr int V = lanes<T>;
  vec<T> sum[R][C];
  i64 lane[R];
  for (int r = 0; r < R; ++r) {
    lane[r] = least(r, valid - 1);
    for (int c = 0; c < C; ++c) sum[r][c] = add ? load(gx + lane[r] * stride + c * V) : vec<T>{};
  }
#pragma GCC unroll 4
  for (i64 o = 0; o < O; ++o) {
    vec<T> here[C];
    for (int c = 0; c < C; ++c) here[c] = load(w + (o * C + c) * V);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] += here[c] * gy[o * width + lane[r]];
  }
  for (int r = 0; r < valid; ++r)
    for (int c = 0; c < C; ++c) store(gx + r * stride + c * V, sum[r][c]);
}

constexpr i64 INPUT_ROWS = 256, INPUT_COLUMNS = 120;  // of the weights, packed at a time: they stay in the second cache

template <typename T> static inline i64 packed_size() { return INPUT_ROWS * round_up(INPUT_COLUMNS, lanes<T>) + 8 * lanes<T>; }

// Columns of one block of weights into panels of three vectors, the last of them narrower.
template <typename T> static inline void pack(const T* w, i64 K, i64 rows, i64 columns, T* packed) {
  constexpr int V = lanes<T>, C = 3;
  for (i64 o = 0; o < rows; ++o) {
    const T* row = w + o * K;
    i64 first = 0;
    for (; first + C * V <= columns; first += C * V)
      for (int c = 0; c < C; ++c) store(packed + first * rows + (o * C + c) * V, load(row + first + c * V));
    const i64 wide = round_up(columns - first, V);
    for (i64 k = 0; k < wide; ++k) packed[first * rows + o * wide + k] = first + k < columns ? row[first + k] : T(0);
  }
}

// gx (n, K) = gy (O, n) w (O, K); gy in panels, rows of gx `stride` apart and whole vectors long.
template <typename T> static void input(const T* gy, i64 O, i64 n, const T* w, i64 K, T* gx, i64 stride, T* packed) {
  constexpr int V = lanes<T>, C = 3, R = 4;
  for (i64 k = 0; k < K; k += INPUT_COLUMNS)
    for (i64 o = 0; o < O; o += INPUT_ROWS) {
      const i64 rows = least(INPUT_ROWS, O - o), columns = least(INPUT_COLUMNS, K - k);
      pack(w + o * K + k, K, rows, columns, packed);
      const bool more = o + rows < O;
      const i64 tiles = (columns + C * V - 1) / (C * V) * ((n + R - 1) / R);
      const i64 row_lines = columns * (i64)sizeof(T) / 64, lines = more ? rows * row_lines : 0;
      const i64 ask = lines < 64 ? 0 : (lines + tiles - 1) / tiles;
      i64 asked = 0;
      for (i64 c = 0; c < columns; c += C * V) {
        const i64 wide = least(C, (columns - c + V - 1) / V);
        const T* from = packed + c * rows;
        for (i64 s = 0; s < n; s += R) {
          const i64 p = s / (2 * V), width = panel_width<T>(n, p), valid = least(least(R, n - s), width - s % (2 * V));
          const T* g = gy + p * 2 * V * O + o * width + s % (2 * V);
          T* to = gx + s * stride + k + c;
          // The next block is asked for while this one is used.
          for (i64 a = 0; a < ask && asked < lines; ++a, ++asked)
            __builtin_prefetch((const char*)(w + (o + INPUT_ROWS + asked / row_lines) * K + k) + asked % row_lines * 64, 0, 2);
          if (wide == 3) tile_input<T, R, 3>(g, width, rows, valid, from, to, stride, o > 0);
          else if (wide == 2) tile_input<T, R, 2>(g, width, rows, valid, from, to, stride, o > 0);
          else tile_input<T, R, 1>(g, width, rows, valid, from, to, stride, o > 0);
          if (valid < least(R, n - s)) s -= R - valid;  // a panel narrower than a tile
        }
      }
    }
}

}  // namespace tiles
}  // namespace RAYTRACED_ISA
}  // namespace raytraced
