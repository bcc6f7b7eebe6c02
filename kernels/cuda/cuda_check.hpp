#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <cusolverDn.h>

#include "core/error.hpp"

namespace shardq {

/// Throws Error(internal) that names the call, the place and what CUDA said. An error such as "no kernel image" or a
/// failed launch is sticky: the process must end.
[[noreturn]] void fail_cuda(cudaError_t status, const char* call, const char* file, int line);
[[noreturn]] void fail_cublas(cublasStatus_t status, const char* call, const char* file, int line);
[[noreturn]] void fail_cusolver(cusolverStatus_t status, const char* call, const char* file, int line);

}  // namespace shardq

#define SHARDQ_CUDA(call)                                                                \
  do {                                                                                   \
    const cudaError_t status_ = (call);                                                  \
    if (status_ != cudaSuccess) ::shardq::fail_cuda(status_, #call, __FILE__, __LINE__); \
  } while (0)
#define SHARDQ_CUBLAS(call)                                                                          \
  do {                                                                                               \
    const cublasStatus_t status_ = (call);                                                           \
    if (status_ != CUBLAS_STATUS_SUCCESS) ::shardq::fail_cublas(status_, #call, __FILE__, __LINE__); \
  } while (0)
#define SHARDQ_CUSOLVER(call)                                                                            \
  do {                                                                                                   \
    const cusolverStatus_t status_ = (call);                                                             \
    if (status_ != CUSOLVER_STATUS_SUCCESS) ::shardq::fail_cusolver(status_, #call, __FILE__, __LINE__); \
  } while (0)
/// After a kernel launch: reports a bad configuration or a missing kernel image under the operation's name.
#define SHARDQ_LAUNCHED(operation)                                                                        \
  do {                                                                                                    \
    const cudaError_t status_ = cudaGetLastError();                                                       \
    if (status_ != cudaSuccess) ::shardq::fail_cuda(status_, "launch of " operation, __FILE__, __LINE__); \
  } while (0)
