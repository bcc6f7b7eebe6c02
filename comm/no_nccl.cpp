// The throwing twin of nccl.cpp, for builds without CUDA.
#ifndef SHARDQ_WITH_CUDA
#include "comm/communicator.hpp"

namespace shardq {

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, int, void*) {
  fail(ExitCode::internal,
       "an NCCL communicator was asked for, but this shardq was built without CUDA (SHARDQ_WITH_CUDA=OFF)");
}

}  // namespace shardq
#endif
