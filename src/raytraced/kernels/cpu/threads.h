// Tasks shared out over a pool of threads, and memory that each thread keeps from call to call.
#pragma once

#include <cstddef>

namespace raytraced {

// Runs task(context, 0 ... num_tasks - 1), each once, on at most num_threads threads, the caller's among them.
void parallel(long long num_tasks, long long num_threads, void (*task)(void*, long long), void* context);

// At least `bytes` of this thread's own memory for one purpose (0 ... 3), aligned to 64; null where there is none.
void* scratch(int purpose, std::size_t bytes);

}  // namespace raytraced
