// Who runs where: the pairs (row, node), sorted by chunk of rows, node and row.
#pragma once

#include <cstring>

namespace raytraced {

// each_active(row, found) calls found(node) for every node that is active for a row. Fills in the rows of all pairs and where
// those of each node begin in them, (num_chunks, nodes + 1); returns how many there are.
template <class Each>
long long sort_pairs(long long batch, long long nodes, long long chunk, long long num_chunks, int* rows, long long* offsets,
                     Each each_active) {
  long long total = 0;
  for (long long c = 0; c < num_chunks; ++c) {
    const long long begin = c * chunk, end = begin + chunk < batch ? begin + chunk : batch;
    long long* offset = offsets + c * (nodes + 1);
    std::memset(offset, 0, (nodes + 1) * sizeof(long long));
    for (long long row = begin; row < end; ++row) each_active(row, [=](long long node) { ++offset[node]; });
    for (long long node = 0; node < nodes; ++node) {
      const long long count = offset[node];
      offset[node] = total, total += count;
    }
    for (long long row = begin; row < end; ++row)
      each_active(row, [=](long long node) { rows[offset[node]++] = (int)row; });
    for (long long node = nodes; node > 0; --node) offset[node] = offset[node - 1];  // each had moved on to its end
    offset[0] = c ? offset[-1] : 0;
  }
  return total;
}

}  // namespace raytraced
