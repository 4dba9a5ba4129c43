// Work is shared out over the OpenMP team that PyTorch keeps: its threads continue to spin for a while after each of PyTorch's own
// calls, and threads of ours beside them would wait for a core. Without that team, and in a forked child (which has none of
// its parent's threads, and would wait for them forever), over a pool of our own.
#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace raytraced {
namespace {

struct Job {
  long long num_tasks;
  void (*task)(void*, long long);
  void* context;
  std::atomic<long long> next{0};

  void work() {
    for (long long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(context, i);
  }
};

struct Pool {
  std::mutex in_use;  // one job at a time; a caller that finds the pool taken works alone
  std::mutex lock;
  std::condition_variable wake, done;
  Job* job = nullptr;
  long long seats = 0, seated = 0, num_workers = 0;
  unsigned long long generation = 0;

  void serve() {
    unsigned long long seen = 0;
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
      wake.wait(guard, [&] { return job && generation != seen && seats > 0; });
      seen = generation;
      Job* mine = job;
      --seats, ++seated;
      guard.unlock();
      mine->work();
      guard.lock();
      if (--seated == 0) done.notify_one();
    }
  }

  void run(Job& offered, long long num_helpers) {
    {
      std::lock_guard<std::mutex> guard(lock);
      try {
        for (; num_workers < num_helpers; ++num_workers) std::thread(&Pool::serve, this).detach();
      } catch (const std::system_error&) {
        // No more threads to be had: those there are do the work.
      }
      job = &offered, seats = num_helpers, ++generation;
    }
    wake.notify_all();
    offered.work();
    std::unique_lock<std::mutex> guard(lock);
    job = nullptr;  // a helper that comes now is too late, and not waited for
    done.wait(guard, [&] { return seated == 0; });
  }
};

// Never destroyed: workers wait on it until the process ends.
Pool* pool = new Pool;

// libgomp's entry to a parallel region: fn(data) on each of num_threads threads.
using Team = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
Team team = nullptr;

// A child has none of its parent's threads, and a lock may be held by one of them: start afresh.
void after_fork() { pool = new Pool, team = nullptr; }

#if defined(__unix__) || defined(__APPLE__)
const int registered = pthread_atfork(nullptr, nullptr, after_fork);
#endif

struct Memory {
  void* block = nullptr;
  std::size_t bytes = 0;
  ~Memory() { std::free(block); }
};
thread_local Memory memories[4];

}  // namespace

void parallel(long long num_tasks, long long num_threads, void (*task)(void*, long long), void* context) {
  Job job{num_tasks, task, context};
  const long long num_helpers = (num_threads < num_tasks ? num_threads : num_tasks) - 1;
  if (num_helpers < 1) return job.work();
  if (team) return team([](void* job) { static_cast<Job*>(job)->work(); }, &job, unsigned(num_helpers + 1), 0);
  Pool* mine = pool;
  if (!mine->in_use.try_lock()) return job.work();
  mine->run(job, num_helpers);
  mine->in_use.unlock();
}

void* scratch(int purpose, std::size_t bytes) {
  Memory& memory = memories[purpose];
  if (bytes > memory.bytes) {
    std::free(memory.block);
    memory.bytes = (bytes + 4095) / 4096 * 4096;
    memory.block = std::aligned_alloc(64, memory.bytes);
    if (!memory.block) memory.bytes = 0;
  }
  return memory.block;
}

}  // namespace raytraced

// Called once, when the library is loaded, with the address of GOMP_parallel in the libgomp that PyTorch uses.
extern "C" void raytraced_share_team(void* gomp_parallel) {
  raytraced::team = reinterpret_cast<raytraced::Team>(gomp_parallel);
}
