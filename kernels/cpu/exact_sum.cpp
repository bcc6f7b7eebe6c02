#include "kernels/exact_sum.hpp"

#include "kernels/cpu/cpu_backend.hpp"

namespace shardq {

void CpuBackend::add_exact(const float* values, int64_t count, int64_t* coarse, int64_t* fine) {
#pragma omp parallel for schedule(static) if (count > 1 << 14)
  for (int64_t i = 0; i < count; ++i) {
    const ExactTerm term = exact_split(values[i]);
    // A poisoned element stays where it is, so that no number of bad terms can wrap it back to a finite sum.
    if (coarse[i] < kExactPoison) coarse[i] += term.coarse;
    fine[i] += term.fine;
  }
}

void CpuBackend::read_exact(const int64_t* coarse, const int64_t* fine, int64_t count, float* values) {
#pragma omp parallel for schedule(static) if (count > 1 << 14)
  for (int64_t i = 0; i < count; ++i) values[i] = exact_read(coarse[i], fine[i]);
}

}  // namespace shardq
