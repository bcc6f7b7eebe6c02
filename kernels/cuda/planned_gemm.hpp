#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace shardq {

/// One column-major product c = op(a) op(b) + beta c, accumulated in fp32.
struct GemmCall {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  cudaDataType_t type = CUDA_R_16BF, out = CUDA_R_32F;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  int64_t lda = 0, ldb = 0, ldc = 0;
  float beta = 0;
};

/// Matrix products whose shape changes from call to call: experts with ragged token counts.
///
/// cuBLAS chooses a kernel anew for every shape it has not seen, which took about 77 us of host time a call on an H200
/// (2026-11-30): with thousands of ragged products a layer the device waited for the host. Here shapes are classed (two
/// classes an octave of each extent), and one choice, the library's for the smallest shape of the class, serves them
/// all: a call costs a few microseconds, and which kernel runs does not depend on the calls before. Not thread-safe.
class PlannedGemm {
 public:
  /// Enqueues the product. `workspace` belongs to `stream`.
  void run(cublasLtHandle_t lt, cudaStream_t stream, void* workspace, int64_t workspace_bytes, const GemmCall& call);
  ~PlannedGemm();

 private:
  struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatmulAlgo_t algorithm;
  };
  using Key =
      std::tuple<bool, bool, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, int64_t, bool, int, int64_t>;
  const Plan& plan(cublasLtHandle_t lt, int64_t workspace_bytes, const GemmCall& call, bool exact);
  std::map<Key, Plan> plans_;
};

}  // namespace shardq
