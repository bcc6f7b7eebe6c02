#include "kernels/cuda/planned_gemm.hpp"

#include <bit>

#include "kernels/cuda/cuda_check.hpp"

namespace shardq {
namespace {

/// Layouts live on the stack: creating and destroying them is most of a call's host time otherwise.
struct Layouts {
  cublasLtMatrixLayoutOpaque_t a, b, c;
  explicit Layouts(const GemmCall& g) {
    const auto init = [](cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t rows, int64_t cols,
                         int64_t ld) {
      SHARDQ_CUBLAS(
          cublasLtMatrixLayoutInit(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld));
    };
    init(a, g.type, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.lda);
    init(b, g.type, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.ldb);
    init(c, g.out, g.m, g.n, g.ldc);
  }
};

/// The largest 2^i or 3 * 2^i up to it. Extents below 64 are classes of their own: their kernels differ most.
int64_t class_of(int64_t extent) {
  if (extent < 64) return extent;
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(extent)));
  return extent >= power / 2 * 3 ? power / 2 * 3 : power;
}

/// The smallest shape of the call's class.
GemmCall representative(GemmCall g) {
  g.m = class_of(g.m);
  g.n = class_of(g.n);
  g.k = class_of(g.k);
  return g;
}

/// Common power-of-two alignment of the three addresses, at most 16 bytes: a kernel chosen for aligned data must not
/// get other.
int alignment(const GemmCall& g) {
  const auto bits =
      reinterpret_cast<uintptr_t>(g.a) | reinterpret_cast<uintptr_t>(g.b) | reinterpret_cast<uintptr_t>(g.c) | 16u;
  return 1 << std::countr_zero(bits);
}

}  // namespace

PlannedGemm::~PlannedGemm() {
  for (auto& [key, plan] : plans_)
    if (plan.operation) cublasLtMatmulDescDestroy(plan.operation);
}

const PlannedGemm::Plan& PlannedGemm::plan(cublasLtHandle_t lt, int64_t workspace_bytes, const GemmCall& call,
                                           bool exact) {
  const GemmCall g = exact ? call : representative(call);
  const int64_t sign = exact ? -1 : 1;
  const int align = alignment(g);
  const Key key{g.transpose_a, g.transpose_b, sign * g.m, sign * g.n,  sign * g.k, g.type,         g.out,
                g.lda,         g.ldb,         g.ldc,      g.beta != 0, align,      workspace_bytes};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  Plan plan;
  SHARDQ_CUBLAS(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t a = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, b = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  SHARDQ_CUBLAS(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
  SHARDQ_CUBLAS(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
  cublasLtMatmulPreference_t preference = nullptr;
  SHARDQ_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
    SHARDQ_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(workspace_bytes));
  for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(name, static_cast<uint32_t>(align));
  // Split sums are reduced in fp32, never in the output's dtype.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  Layouts layouts(g);
  cublasLtMatmulHeuristicResult_t choice{};
  int found_count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt, plan.operation, &layouts.a, &layouts.b, &layouts.c,
                                                               &layouts.c, preference, 1, &choice, &found_count);
  cublasLtMatmulPreferenceDestroy(preference);
  SHARDQ_CUBLAS(status);
  SHARDQ_CHECK(found_count > 0, ExitCode::internal, "cuBLASLt has no kernel for a product of {} x {} x {}", g.m, g.n,
               g.k);
  plan.algorithm = choice.algo;
  return plans_.emplace(key, plan).first->second;
}

void PlannedGemm::run(cublasLtHandle_t lt, cudaStream_t stream, void* workspace, int64_t workspace_bytes,
                      const GemmCall& g) {
  if (g.m == 0 || g.n == 0) return;
  Layouts layouts(g);
  const float alpha = 1.0f;
  const auto multiply = [&](const Plan& chosen) {
    return cublasLtMatmul(lt, chosen.operation, &alpha, g.a, &layouts.a, g.b, &layouts.b, &g.beta, g.c, &layouts.c, g.c,
                          &layouts.c, &chosen.algorithm, workspace, static_cast<size_t>(workspace_bytes), stream);
  };
  const cublasStatus_t status = multiply(plan(lt, workspace_bytes, g, false));
  if (status == CUBLAS_STATUS_SUCCESS) return;
  // The kernel chosen for a neighbour refuses this shape: it gets a choice of its own.
  SHARDQ_CHECK(status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE, ExitCode::internal,
               "cublasLtMatmul of {} x {} x {}: {}", g.m, g.n, g.k, cublasGetStatusString(status));
  SHARDQ_CUBLAS(multiply(plan(lt, workspace_bytes, g, true)));
}

}  // namespace shardq
