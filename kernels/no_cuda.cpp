// The throwing twin of the CUDA backend, for builds without CUDA.
#ifndef SHARDQ_WITH_CUDA
#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {
std::unique_ptr<Backend> make_cuda_backend(int) {
  fail(ExitCode::usage, "device cuda was asked for, but this shardq was built without CUDA (SHARDQ_WITH_CUDA=OFF)");
}
int cuda_device_count() { return 0; }
}  // namespace shardq
#endif
