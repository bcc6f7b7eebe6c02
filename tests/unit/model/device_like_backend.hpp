#pragma once
#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {

/// The CPU backend behind addresses that the host cannot dereference (they are no canonical addresses), as a device's
/// are: code that touches a tensor other than through the backend crashes. Only what a forward needs is there.
class DeviceLikeBackend final : public Backend {
 public:
  std::string name() const override { return "device-like"; }
  bool is_host() const override { return false; }
  int64_t in_use() const { return cpu_->memory().in_use; }

  void* allocate(int64_t bytes, const char* what) override { return disguise(cpu_->allocate(bytes, what)); }
  void release(void* data) noexcept override { cpu_->release(real(data)); }
  void* allocate_host(int64_t bytes) override { return cpu_->allocate_host(bytes); }
  void release_host(void* data) noexcept override { cpu_->release_host(data); }
  void upload(void* to, const void* from, int64_t bytes) override { cpu_->upload(real(to), from, bytes); }
  void download(void* to, const void* from, int64_t bytes) override { cpu_->download(to, real(from), bytes); }
  void prefetch(void* to, const void* from, int64_t bytes) override { cpu_->prefetch(real(to), from, bytes); }
  void wait_prefetch() override { cpu_->wait_prefetch(); }
  void copy(void* to, const void* from, int64_t bytes) override { cpu_->copy(real(to), real(from), bytes); }
  void zero(void* to, int64_t bytes) override { cpu_->zero(real(to), bytes); }
  void synchronize() override { cpu_->synchronize(); }
  MemoryInfo memory() const override { return cpu_->memory(); }

  void linear(MatrixView x, MatrixView w, const void* bias, MatrixView y, bool accumulate) override {
    cpu_->linear(real(x), real(w), real(bias), real(y), accumulate);
  }
  void linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) override {
    w.data = real(w.data);
    cpu_->linear_stack(real(x), w, offsets, real(y));
  }
  void rms_norm(MatrixView x, const void* weight, DType weight_dtype, float eps, MatrixView y) override {
    cpu_->rms_norm(real(x), real(weight), weight_dtype, eps, real(y));
  }
  void rope(MatrixView x, int64_t head_dim, const float* cosine, const float* sine, const int32_t* positions) override {
    cpu_->rope(real(x), head_dim, real(cosine), real(sine), real(positions));
  }
  void attention(MatrixView q, MatrixView k, MatrixView v, int64_t head_dim, std::span<const int64_t> starts,
                 float scale, int64_t window, MatrixView out) override {
    cpu_->attention(real(q), real(k), real(v), head_dim, starts, scale, window, real(out));
  }
  void silu_mul(MatrixView gate, MatrixView up, MatrixView out) override {
    cpu_->silu_mul(real(gate), real(up), real(out));
  }
  void add(MatrixView x, MatrixView y) override { cpu_->add(real(x), real(y)); }
  void route(MatrixView logits, const RouterSpec& router, int32_t* ids, float* weights) override {
    cpu_->route(real(logits), router, real(ids), real(weights));
  }
  void sort_by_expert(const int32_t* ids, int64_t slots, int64_t experts, int32_t* order, int32_t* place,
                      std::span<int64_t> offsets) override {
    cpu_->sort_by_expert(real(ids), slots, experts, real(order), real(place), offsets);
  }
  void gather_rows(MatrixView source, const int32_t* order, int64_t divisor, MatrixView target) override {
    cpu_->gather_rows(real(source), real(order), divisor, real(target));
  }
  void dispatch_rows(MatrixView source, const int32_t* order, const int32_t* place, int64_t copies,
                     MatrixView target) override {
    cpu_->dispatch_rows(real(source), real(order), real(place), copies, real(target));
  }
  void combine_rows(MatrixView source, const int32_t* place, const float* weights, int64_t top_k,
                    MatrixView target) override {
    cpu_->combine_rows(real(source), real(place), real(weights), top_k, real(target));
  }
  void cross_entropy(MatrixView logits, const int32_t* targets_host, double* losses, int32_t* best) override {
    cpu_->cross_entropy(real(logits), targets_host, losses, best);
  }

  // The forward calls none of these.
  void accumulate_gram(MatrixView, StackView, std::span<const int64_t>) override { absent(); }
  void scale_and_blend(StackView, std::span<const float>, std::span<const float>, MatrixView) override { absent(); }
  void sum_stack(StackView, MatrixView) override { absent(); }
  void diagonals(StackView, float*) override { absent(); }
  void pack_lower(StackView, float*) override { absent(); }
  void unpack_lower(const float*, StackView) override { absent(); }
  void add_exact(const float*, int64_t, int64_t*, int64_t*) override { absent(); }
  void read_exact(const int64_t*, const int64_t*, int64_t, float*) override { absent(); }
  void factorize(StackView, const int32_t*, std::span<const int64_t>, std::span<const float>, StackView, float*,
                 std::span<int>) override {
    absent();
  }
  void find_scales(StackView, const float*, int, float, const Grid&, int64_t, float*, int8_t*) override { absent(); }
  void permute_columns(StackView, const int32_t*, bool, StackView) override { absent(); }
  void load_columns(StackView, int64_t, StackView) override { absent(); }
  void block_update(StackView, StackView, StackView) override { absent(); }
  void gptq_block(const GptqBlock&) override { absent(); }
  void round_to_nearest(StackView, const int32_t*, const float*, const int8_t*, int64_t, const Grid&, int8_t*,
                        StackView) override {
    absent();
  }
  void quadratic_loss(StackView, StackView, const float*, StackView, float*) override { absent(); }
  void dequantize(const int8_t*, const float*, const int8_t*, int64_t, const Grid&, StackView) override { absent(); }

 private:
  static constexpr uintptr_t kDisguise = uintptr_t{1} << 60;
  static void* disguise(void* data) {
    return data ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) | kDisguise) : nullptr;
  }
  template <class T>
  static T* real(T* data) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(data) & ~kDisguise);
  }
  static MatrixView real(MatrixView m) {
    m.data = real(m.data);
    return m;
  }
  [[noreturn]] static void absent() { fail(ExitCode::internal, "device-like backend: not there"); }

  std::unique_ptr<Backend> cpu_ = make_cpu_backend();
};

}  // namespace shardq
