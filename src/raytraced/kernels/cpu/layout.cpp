// How large each struct is that Python fills in: a library that was built from other sources must not be used, it would read
// the fields at other places.
#include <cstring>

#include "convolution.h"
#include "raytrace.h"

// The bytes of a struct, 0 where there is none of this name.
extern "C" long long raytraced_size_of(const char* name) {
  using namespace raytraced;
  const struct {
    const char* name;
    long long bytes;
  } sizes[] = {{"SequenceArgs", sizeof(SequenceArgs)}, {"ExpertsArgs", sizeof(ExpertsArgs)},
               {"RaytraceLayer", sizeof(RaytraceLayer)}, {"RaytraceCall", sizeof(RaytraceCall)},
               {"EarlyExitCall", sizeof(EarlyExitCall)}, {"ConvolutionArgs", sizeof(ConvolutionArgs)}};
  for (const auto& one : sizes)
    if (!std::strcmp(one.name, name)) return one.bytes;
  return 0;
}
