#pragma once
#include <memory>

#include "kernels/backend.hpp"

namespace shardq {

/// One GPU: cuBLAS and cuSOLVER for matrix products and factorisations, our kernels for the rest. One .cu file a family
/// of operations.
class CudaBackend final : public Backend {
 public:
  CudaBackend(int device);
  ~CudaBackend() override;

  std::string name() const override;
  bool is_host() const override;
  void* stream() const override;
  void* allocate(int64_t bytes, const char* what) override;
  void release(void* data) noexcept override;
  void* allocate_host(int64_t bytes) override;
  void release_host(void* data) noexcept override;
  void upload(void* target, const void* source, int64_t bytes) override;
  void download(void* target, const void* source, int64_t bytes) override;
  void prefetch(void* target, const void* source, int64_t bytes) override;
  void wait_prefetch() override;
  void copy(void* target, const void* source, int64_t bytes) override;
  void zero(void* target, int64_t bytes) override;
  void synchronize() override;
  MemoryInfo memory() const override;
  void set_reproducible(bool wanted) override;
  void linear(MatrixView x, MatrixView w, const void* bias, MatrixView y, bool accumulate) override;
  void linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) override;
  void accumulate_gram(MatrixView x, StackView h, std::span<const int64_t> offsets) override;
  void scale_and_blend(StackView h, std::span<const float> own, std::span<const float> shared,
                       MatrixView pool) override;
  void sum_stack(StackView h, MatrixView pool) override;
  void diagonals(StackView h, float* host) override;
  void pack_lower(StackView h, float* packed) override;
  void unpack_lower(const float* packed, StackView h) override;
  void add_exact(const float* values, int64_t count, int64_t* coarse, int64_t* fine) override;
  void read_exact(const int64_t* coarse, const int64_t* fine, int64_t count, float* values) override;
  void factorize(StackView h, const int32_t* order, std::span<const int64_t> which, std::span<const float> damping,
                 StackView factor, float* pivots, std::span<int> status) override;
  void find_scales(StackView w, const float* importance, int shrink_steps, float norm, const Grid& grid,
                   int64_t group_size, float* scales, int8_t* zeros) override;
  void permute_columns(StackView source, const int32_t* order, bool back, StackView target) override;
  void load_columns(StackView weight, int64_t begin, StackView target) override;
  void block_update(StackView residual, StackView factor, StackView target) override;
  void gptq_block(const GptqBlock& block) override;
  void round_to_nearest(StackView w, const int32_t* order, const float* scales, const int8_t* zeros, int64_t group_size,
                        const Grid& grid, int8_t* codes, StackView residual) override;
  void quadratic_loss(StackView residual, StackView factor, const float* pivots, StackView work,
                      float* losses) override;
  void dequantize(const int8_t* codes, const float* scales, const int8_t* zeros, int64_t group_size, const Grid& grid,
                  StackView w) override;
  void rms_norm(MatrixView x, const void* weight, DType weight_dtype, float eps, MatrixView y) override;
  void rope(MatrixView x, int64_t head_dim, const float* cosine, const float* sine, const int32_t* positions) override;
  void attention(MatrixView q, MatrixView k, MatrixView v, int64_t head_dim, std::span<const int64_t> starts,
                 float scale, int64_t window, MatrixView out) override;
  void silu_mul(MatrixView gate, MatrixView up, MatrixView out) override;
  void add(MatrixView x, MatrixView y) override;
  void route(MatrixView logits, const RouterSpec& router, int32_t* ids, float* weights) override;
  void sort_by_expert(const int32_t* ids, int64_t slots, int64_t experts, int32_t* order, int32_t* place,
                      std::span<int64_t> offsets) override;
  void gather_rows(MatrixView source, const int32_t* order, int64_t divisor, MatrixView target) override;
  void dispatch_rows(MatrixView source, const int32_t* order, const int32_t* place, int64_t copies,
                     MatrixView target) override;
  void combine_rows(MatrixView source, const int32_t* place, const float* weights, int64_t top_k,
                    MatrixView target) override;
  void cross_entropy(MatrixView logits, const int32_t* targets_host, double* losses, int32_t* best) override;

  struct State;  // streams, handles, workspaces, pinned staging: cuda_state.hpp

 private:
  std::unique_ptr<State> state_;
};

}  // namespace shardq
