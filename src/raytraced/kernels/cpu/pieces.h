// Shares one block of memory out among several arrays.
#pragma once

namespace raytraced {
namespace {  // one copy for each file: a copy compiled for AVX2 must not be linked into files for every processor

// Pieces start at multiples of 64 bytes after the block's start. Of a null block only the sizes are added up: the address is a
// number, because arithmetic on a null pointer is undefined.
struct Pieces {
  const unsigned long long start;
  const long long number_bytes;  // of the numbers that `numbers` counts
  unsigned long long next;

  explicit Pieces(const void* block, long long number_bytes = 0)
      : start((unsigned long long)block), number_bytes(number_bytes), next(start) {}

  void* bytes(long long count) {
    const unsigned long long piece = next;
    next += (unsigned long long)(count + 63) / 64 * 64;
    return (void*)piece;
  }
  void* numbers(long long count) { return bytes(count * number_bytes); }
  template <typename T> T* take(long long count) { return (T*)bytes(count * (long long)sizeof(T)); }

  long long used() const { return (long long)(next - start); }
};

}  // namespace
}  // namespace raytraced
