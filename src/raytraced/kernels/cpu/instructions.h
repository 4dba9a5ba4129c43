// The instruction set that every kernel of the library runs with, chosen when it is first asked for.
#pragma once

namespace raytraced {

enum class Instructions { baseline, avx2 };
Instructions instructions();

}  // namespace raytraced

// The copy for that set of a kernel, of which each copy has a function `name`_<instructions>.
#if defined(__x86_64__)
#define RAYTRACED_KERNEL(name, args) (instructions() == Instructions::avx2 ? name##_avx2 args : name##_baseline args)
#else
#define RAYTRACED_KERNEL(name, args) name##_baseline args
#endif
