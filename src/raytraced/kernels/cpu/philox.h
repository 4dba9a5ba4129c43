// The random words of draws.py: Philox4x32-10, counted by (row, step), keyed by the seed.
#pragma once

#include "lanes.h"

namespace raytraced {
namespace RAYTRACED_ISA {

static inline void philox(u64 seed, u64 row, u32 c2, u32 c3, u32* words) {
  u32 c0 = (u32)row, c1 = (u32)(row >> 32), key0 = (u32)seed, key1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = (u64)c0 * 0xD2511F53u, product1 = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(product1 >> 32) ^ c1 ^ key0;
    c1 = (u32)product1;
    c2 = (u32)(product0 >> 32) ^ c3 ^ key1;
    c3 = (u32)product0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

static inline double uniform(u32 word) { return ((double)(word >> 9) + 0.5) * 0x1p-23; }

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
