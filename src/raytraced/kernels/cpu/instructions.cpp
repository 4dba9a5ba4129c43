#include "instructions.h"

#include <cstring>

namespace raytraced {

static bool runs(Instructions set) {
#if defined(__x86_64__)
  return set == Instructions::baseline || (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#else
  return set == Instructions::baseline;
#endif
}

static Instructions& chosen() {
  static Instructions set = runs(Instructions::avx2) ? Instructions::avx2 : Instructions::baseline;
  return set;
}

Instructions instructions() { return chosen(); }

}  // namespace raytraced

extern "C" const char* raytraced_instructions() {
  return raytraced::chosen() == raytraced::Instructions::avx2 ? "avx2" : "baseline";
}

// For tests: every copy of a kernel must agree. Returns 0 where this machine has the instructions.
extern "C" int raytraced_set_instructions(const char* name) {
  const auto set = std::strcmp(name, "avx2") == 0 ? raytraced::Instructions::avx2 : raytraced::Instructions::baseline;
  if (!raytraced::runs(set)) return 1;
  raytraced::chosen() = set;
  return 0;
}
