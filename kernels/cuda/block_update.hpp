#pragma once
#include "kernels/cuda/cuda_state.hpp"

namespace shardq {

/// True where tensor_update() can take the views: 16-byte rows, K a multiple of 4, and enough of everything.
bool tensor_update_accepts(const CudaBackend::State& state, StackView residual, StackView factor, StackView target);

/// Backend::block_update on tensor cores, in fp32 precision: each product to 2^-21, sums in fp32.
void tensor_update(CudaBackend::State& state, StackView residual, StackView factor, StackView target);

}  // namespace shardq
