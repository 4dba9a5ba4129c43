// The experts for a whole batch. Small experts: chunks of rows are shared out over threads, each goes down all layers alone.
// Large experts: there is one chunk, and the experts of a layer are shared out. Chunks depend on the sizes alone and sums
// have a fixed order, so no result depends on the threads.
#include "experts.h"

#include <atomic>
#include <cstring>

#include "instructions.h"
#include "pairs.h"
#include "threads.h"

namespace raytraced {
namespace {

enum Purpose { WORK = 1, PARTIAL = 2 };

struct Grid {
  const ExpertsArgs& args;
  ExpertsKernel kernel;
  void* partial = nullptr;
  long long layer = 0;
  std::atomic<bool> failed{false};

  explicit Grid(const ExpertsArgs& args) : args(args), kernel(RAYTRACED_KERNEL(experts_kernel, (args))) {}

  void* memory(long long chunk, long long first, long long last) {
    long long most = 0;
    for (long long node = first; node < last; ++node) {
      const long long rows = args.chunk_offsets(chunk)[node + 1] - args.chunk_offsets(chunk)[node];
      most = rows > most ? rows : most;
    }
    void* block = scratch(WORK, kernel.scratch_bytes(args, most));
    if (!block) failed.store(true);
    return block;
  }

  // Many chunks, a chunk a task.
  static void forward_chunk(void* context, long long chunk) {
    Grid& grid = *(Grid*)context;
    const ExpertsArgs& args = grid.args;
    void* block = grid.memory(chunk, 0, args.nodes());
    for (long long layer = 0; layer < args.layers && block; ++layer) {
      for (long long e = 0; e < args.experts; ++e) grid.kernel.run(args, block, chunk, layer * args.experts + e);
      grid.kernel.join(args, chunk, layer, chunk * args.chunk, args.chunk_end(chunk));
    }
  }
  static void backward_chunk(void* context, long long chunk) {
    Grid& grid = *(Grid*)context;
    const ExpertsArgs& args = grid.args;
    void* block = grid.memory(chunk, 0, args.nodes());
    for (long long layer = args.layers - 1; layer >= 0 && block; --layer) {
      for (long long e = 0; e < args.experts; ++e)
        grid.kernel.run_back(args, block, grid.partial, chunk, layer * args.experts + e);
      grid.kernel.join_back(args, chunk, layer, chunk * args.chunk, args.chunk_end(chunk));
    }
  }
  static void reduce_node(void* context, long long node) {
    Grid& grid = *(Grid*)context;
    grid.kernel.reduce(grid.args, grid.partial, node);
  }

  // One chunk, an expert a task; then a range of rows a task.
  static constexpr long long RANGE = 64;
  static void run_expert(void* context, long long expert) {
    Grid& grid = *(Grid*)context;
    const long long node = grid.layer * grid.args.experts + expert;
    if (void* block = grid.memory(0, node, node + 1)) grid.kernel.run(grid.args, block, 0, node);
  }
  static void run_expert_back(void* context, long long expert) {
    Grid& grid = *(Grid*)context;
    const long long node = grid.layer * grid.args.experts + expert;
    if (void* block = grid.memory(0, node, node + 1)) grid.kernel.run_back(grid.args, block, nullptr, 0, node);
  }
  long long range_end(long long range) const { return (range + 1) * RANGE < args.batch ? (range + 1) * RANGE : args.batch; }
  static void join_range(void* context, long long range) {
    Grid& grid = *(Grid*)context;
    grid.kernel.join(grid.args, 0, grid.layer, range * RANGE, grid.range_end(range));
  }
  static void join_range_back(void* context, long long range) {
    Grid& grid = *(Grid*)context;
    grid.kernel.join_back(grid.args, 0, grid.layer, range * RANGE, grid.range_end(range));
  }
  long long num_ranges() const { return (args.batch + RANGE - 1) / RANGE; }
};

// Experts that are not stacked: each has parameters of its own, 2 J pointers, and is run as a grid of one.
struct Apart {
  const ExpertsArgs& args;
  const long long* numbers;
  void* const* parameters;
  std::atomic<bool> failed{false};

  static void run_one(void* context, long long index) {
    Apart& apart = *(Apart*)context;
    ExpertsArgs args = apart.args;
    args.experts = 1;
    args.offsets += apart.numbers[index];
    args.parameters = apart.parameters + index * 2 * args.linears;
    Grid grid(args);
    if (void* block = grid.memory(0, 0, 1)) grid.kernel.run(args, block, 0, 0);
    if (grid.failed) apart.failed.store(true);
  }
};

}  // namespace
}  // namespace raytraced

// Counts and sorts the pairs of a 0/1 matrix (B, M) by chunk, node and row; returns how many there are.
extern "C" long long raytraced_experts_plan(long long batch, long long nodes, long long is_double, const void* active,
                                            long long chunk, long long num_chunks, int* rows, long long* offsets) {
  const auto each_active = [=](long long row, auto found) {
    for (long long node = 0, i = row * nodes; node < nodes; ++node, ++i)
      if (is_double ? ((const double*)active)[i] != 0 : ((const float*)active)[i] != 0) found(node);
  };
  return raytraced::sort_pairs(batch, nodes, chunk, num_chunks, rows, offsets, each_active);
}

// Both return 0, or 1 where memory has run out.
extern "C" int raytraced_experts_forward(const raytraced::ExpertsArgs* args) {
  using namespace raytraced;
  Grid grid(*args);
  if (args->num_chunks > 1 || args->threads <= 1) {
    parallel(args->num_chunks, args->threads, Grid::forward_chunk, &grid);
    return grid.failed;
  }
  for (grid.layer = 0; grid.layer < args->layers && !grid.failed; ++grid.layer) {
    parallel(args->experts, args->threads, Grid::run_expert, &grid);
    parallel(grid.num_ranges(), args->threads, Grid::join_range, &grid);
  }
  return grid.failed;
}

extern "C" int raytraced_experts_backward(const raytraced::ExpertsArgs* args) {
  using namespace raytraced;
  Grid grid(*args);
  const long long number = args->is_double ? 8 : 4;
  if (args->batch) {  // the tensors of an empty batch have no memory
    std::memcpy(args->grad_hidden, args->grad_out, args->batch * args->dim() * number);
    std::memset(args->grad_mix, 0, args->batch * args->nodes() * number);
  }
  if (args->num_chunks > 1) {
    long long size = 0;
    for (long long j = 0; j < args->linears; ++j) size += (args->widths[j] + 1) * args->widths[j + 1];
    grid.partial = scratch(PARTIAL, args->num_chunks * args->nodes() * size * number);
    if (!grid.partial) return 1;
  }
  if (args->num_chunks > 1 || args->threads <= 1) {
    parallel(args->num_chunks, args->threads, Grid::backward_chunk, &grid);
    if (args->num_chunks > 1) parallel(args->nodes(), args->threads, Grid::reduce_node, &grid);
    return grid.failed;
  }
  for (grid.layer = args->layers - 1; grid.layer >= 0 && !grid.failed; --grid.layer) {
    parallel(args->experts, args->threads, Grid::run_expert_back, &grid);
    parallel(grid.num_ranges(), args->threads, Grid::join_range_back, &grid);
  }
  return grid.failed;
}

// Some experts of one layer, of which only these need be in memory: `numbers` (count) says which, `parameters` (count, 2 J)
// where each of them is. Their results are added up by the call below once all experts have run.
extern "C" int raytraced_experts_run(const raytraced::ExpertsArgs* args, const long long* numbers, void* const* parameters,
                                     long long count) {
  raytraced::Apart apart{*args, numbers, parameters};
  raytraced::parallel(count, args->threads, raytraced::Apart::run_one, &apart);
  return apart.failed;
}

extern "C" int raytraced_experts_join(const raytraced::ExpertsArgs* args) {
  using namespace raytraced;
  Grid grid(*args);
  parallel(grid.num_ranges(), args->threads, Grid::join_range, &grid);
  return 0;
}
