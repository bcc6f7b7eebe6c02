// Order-free sums: integers in place of floats (exact_sum.hpp). Bound by memory: 36 bytes an element to add, 20 to read
// back.
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/cuda_state.hpp"
#include "kernels/exact_sum.hpp"

namespace shardq {
namespace {

constexpr int kThreads = 256;

__global__ void add_kernel(const float* __restrict__ values, int64_t count, int64_t* __restrict__ coarse,
                           int64_t* __restrict__ fine) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const ExactTerm term = exact_split(values[i]);
    if (coarse[i] < kExactPoison) coarse[i] += term.coarse;
    fine[i] += term.fine;
  }
}

__global__ void read_kernel(const int64_t* __restrict__ coarse, const int64_t* __restrict__ fine, int64_t count,
                            float* __restrict__ values) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    values[i] = exact_read(coarse[i], fine[i]);
}

int grid_of(int64_t count) {
  return static_cast<int>(std::min<int64_t>((count + kThreads - 1) / kThreads, 132 * 16));
}

}  // namespace

void CudaBackend::add_exact(const float* values, int64_t count, int64_t* coarse, int64_t* fine) {
  if (count == 0) return;
  add_kernel<<<grid_of(count), kThreads, 0, state_->compute>>>(values, count, coarse, fine);
  SHARDQ_LAUNCHED("exact sums");
}

void CudaBackend::read_exact(const int64_t* coarse, const int64_t* fine, int64_t count, float* values) {
  if (count == 0) return;
  read_kernel<<<grid_of(count), kThreads, 0, state_->compute>>>(coarse, fine, count, values);
  SHARDQ_LAUNCHED("exact sums");
}

}  // namespace shardq
