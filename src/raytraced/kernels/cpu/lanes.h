// Short vectors of W lanes in the compiler's vector extension: the same source for every instruction set.
// Nothing of the C++ library is used here or in any file compiled with extra instructions: an inline function of the
// library, compiled for AVX2, could be the copy that the linker keeps for all files.
#pragma once

namespace raytraced {
namespace RAYTRACED_ISA {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

template <int BYTES> struct IntOf;
template <> struct IntOf<4> { typedef int type; };
template <> struct IntOf<8> { typedef i64 type; };

template <typename T_, int W_> struct Lanes {
  typedef T_ T;
  typedef typename IntOf<sizeof(T_)>::type I;
  static constexpr int W = W_;
  typedef T V __attribute__((vector_size(sizeof(T_) * W_)));
  typedef I VI __attribute__((vector_size(sizeof(T_) * W_)));

  static inline V splat(T x) { return x - V{}; }
  // Rows are read by lane, too: both compilers let a vector alias its elements. may_alias would let it alias all else.
  static inline V load(const T* p) { return *(const V*)p; }
  static inline void store(T* p, V x) { *(V*)p = x; }
  // The same for a row that lies anywhere.
  typedef T Anywhere __attribute__((vector_size(sizeof(T_) * W_), aligned(sizeof(T_))));
  static inline V load_any(const T* p) { return *(const Anywhere*)p; }
  static inline void store_any(T* p, V x) { *(Anywhere*)p = x; }
  static inline V zero() { return V{}; }
  static inline V max(V a, V b) { return a > b ? a : b; }

  // 0, 1, 2 ...
  static inline V iota() {
    if constexpr (W == 8) return V{0, 1, 2, 3, 4, 5, 6, 7};
    else return V{0, 1, 2, 3};
  }
  // Sets one number of a row. A scalar store would stall the vector load that follows it.
  static inline void set(T* row, int i, T x) {
    T* part = row + i / W * W;
    store(part, iota() == splat((T)(i % W)) ? splat(x) : load(part));
  }
  // How many lanes of a comparison hold.
  static inline int count(VI mask) {
    return -(int)lane_sum(mask);
  }
  static inline I lane_sum(VI a) {
    if constexpr (W == 8) {
      a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
      a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
      return a[0] + a[1];
    } else {
      a += __builtin_shufflevector(a, a, 2, 3, 0, 1);
      return a[0] + a[1];
    }
  }
  static inline V running_sum(V a) {
    const V none{};
    if constexpr (W == 8) {
      a += __builtin_shufflevector(none, a, 0, 8, 9, 10, 0, 12, 13, 14);
      a += __builtin_shufflevector(none, a, 0, 0, 8, 9, 0, 0, 12, 13);
      return a + __builtin_shufflevector(none, a, 0, 0, 0, 0, 11, 11, 11, 11);
    } else {
      a += __builtin_shufflevector(none, a, 0, 4, 5, 6);
      return a + __builtin_shufflevector(none, a, 0, 0, 4, 5);
    }
  }

  // Sum and maximum over the lanes, in every lane.
  static inline V sum(V a) {
    if constexpr (W == 8) a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    if constexpr (W == 8) {
      a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
      return a + __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6);
    } else {
      a += __builtin_shufflevector(a, a, 2, 3, 0, 1);
      return a + __builtin_shufflevector(a, a, 1, 0, 3, 2);
    }
  }
  static inline V largest(V a) {
    if constexpr (W == 8) {
      a = max(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
      a = max(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
      return max(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6));
    } else {
      a = max(a, __builtin_shufflevector(a, a, 2, 3, 0, 1));
      return max(a, __builtin_shufflevector(a, a, 1, 0, 3, 2));
    }
  }

  static inline V low(V a, V b) {  // pairs of a and b, from the low half of each 128 bits (of the whole, where W is 4)
    if constexpr (W == 8) return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    else return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  }
  static inline V high(V a, V b) {
    if constexpr (W == 8) return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    else return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
  static inline V low2(V a, V b) {  // the same with pairs of lanes
    if constexpr (W == 8) return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    else return __builtin_shufflevector(a, b, 0, 1, 4, 5);
  }
  static inline V high2(V a, V b) {
    if constexpr (W == 8) return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    else return __builtin_shufflevector(a, b, 2, 3, 6, 7);
  }

  // Lane i of the result: the sum over the lanes of rows[i].
  static inline V sums(const V* rows) {
    V four[W / 4];
    for (int h = 0; h < W / 4; ++h) {
      const V* r = rows + 4 * h;
      const V a = low(r[0], r[1]) + high(r[0], r[1]), b = low(r[2], r[3]) + high(r[2], r[3]);
      four[h] = low2(a, b) + high2(a, b);
    }
    if constexpr (W == 8)
      return __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
             __builtin_shufflevector(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
    else return four[0];
  }

  // Row i becomes lane i of every row.
  static inline void transpose(V* r) {
    if constexpr (W == 2) {
      const V first = __builtin_shufflevector(r[0], r[1], 0, 2);
      r[1] = __builtin_shufflevector(r[0], r[1], 1, 3), r[0] = first;
    } else {
      transpose_by_fours(r);
    }
  }
  static inline void transpose_by_fours(V* r) {
    V t[W];
    for (int h = 0; h < W; h += 4) {
      const V a = low(r[h], r[h + 1]), b = high(r[h], r[h + 1]);
      const V c = low(r[h + 2], r[h + 3]), d = high(r[h + 2], r[h + 3]);
      t[h] = low2(a, c), t[h + 1] = high2(a, c), t[h + 2] = low2(b, d), t[h + 3] = high2(b, d);
    }
    if constexpr (W == 8) {
      for (int i = 0; i < 4; ++i) {
        r[i] = __builtin_shufflevector(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
    } else {
      for (int i = 0; i < 4; ++i) r[i] = t[i];
    }
  }

  // 2^x = 2^n 2^r, |r| <= 1/2, by Taylor's series cut below half a unit in the last place;
  // only for results that are normal numbers: |x| < 125 (float), 1020 (double).
  static inline V exp2(V x) {
    constexpr bool single = sizeof(T) == 4;
    constexpr T shift = single ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^(mantissa bits): rounds to an integer
    constexpr int bits = single ? 23 : 52, degree = single ? 7 : 13;
    const V shifted = x + shift, r = x - (shifted - shift), r2 = r * r;
    V even = splat(term(degree - 1)), odd = splat(term(degree));
    for (int k = degree - 3; k >= 0; k -= 2) even = even * r2 + term(k);
    for (int k = degree - 2; k >= 1; k -= 2) odd = odd * r2 + term(k);
    return (V)((VI)(even + odd * r) + ((VI)shifted << bits));
  }
  static constexpr T term(int k) {  // (ln 2)^k / k!
    double x = 1;
    for (int i = 1; i <= k; ++i) x *= 0.69314718055994531 / i;
    return T(x);
  }
  // The same for any x <= 0, down to the smallest number there is and then to 0, as the plain path's softmax goes:
  // whether a rate is 0 decides whether its node is a candidate. A positive x counts as 0: padded lanes may hold any
  // number, and an exponent that overflows would make a NaN of them.
  static inline V exp2_of_negative(V x) {
    const V half = x * T(0.5), lowest = splat(T(sizeof(T) == 4 ? -120 : -1000));
    const V root = exp2(max(half > 0 ? zero() : half, lowest));
    return root * root;
  }
  static constexpr T log2_e = T(1.4426950408889634), ln_2 = T(0.69314718055994531);

  // log(x) of any positive number: a subnormal one is scaled first, because its exponent is not in its exponent bits.
  static inline V log_of_positive(V x) {
    constexpr T smallest_normal = sizeof(T) == 4 ? T(0x1p-126) : T(0x1p-1022);
    const VI is_subnormal = x < splat(smallest_normal);
    return log(is_subnormal ? x * T(0x1p60) : x) - (is_subnormal ? splat(60 * ln_2) : zero());
  }

  // log(x) of a positive normal number: x = m 2^e, sqrt(1/2) <= m < sqrt 2, log m = 2 atanh((m - 1) / (m + 1)).
  static inline V log(V x) {
    constexpr bool single = sizeof(T) == 4;
    constexpr int bits = single ? 23 : 52;
    constexpr I one = I(single ? 127 : 1023) << bits;
    constexpr I root_half = single ? I(0x3f3504f3) : I(0x3fe6a09e667f3bcdLL);
    const VI raw = (VI)x;
    const VI e = (raw - root_half) >> bits;
    const V m = (V)(raw - (e << bits));
    static_assert(one > root_half, "the mantissa starts at sqrt(1/2)");
    const V t = (m - 1) / (m + 1), t2 = t * t;
    constexpr int last = single ? 9 : 21;
    V series = splat(T(1) / last);
    for (int k = last - 2; k >= 1; k -= 2) series = series * t2 + T(1) / k;
    return __builtin_convertvector(e, V) * ln_2 + 2 * t * series;
  }
};

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
