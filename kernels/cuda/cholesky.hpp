#pragma once
#include "kernels/cuda/cuda_state.hpp"

namespace shardq {

/// Matrices of one factorisation: entry i stands for matrix which[i] of a stack of n by n ones.
struct CholeskyBatch {
  float* data;
  int64_t stride, matrix_stride;
  const int64_t* which;  ///< in device memory
  int64_t count, n;
};

/// True where blocked_cholesky() can take a batch: enough matrices to fill the card, rows of 16-byte words.
bool blocked_cholesky_accepts(const CudaBackend::State& state, const CholeskyBatch& batch);

/// H = V^T V with V lower triangular, in place of the lower triangles: V[j][k] = R(k, j). The upper triangles are
/// neither read nor written. Where a pivot is not positive and finite, info[i] becomes its position + 1, and V is
/// garbage.
void blocked_cholesky(CudaBackend::State& state, const CholeskyBatch& batch, int* info);

}  // namespace shardq
