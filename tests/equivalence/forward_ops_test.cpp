// Norms, rotary embedding, elementwise operations and the loss: CUDA against the CPU backend.
#include <numeric>

#include "equivalence/strided.hpp"

namespace shardq::equivalence {
namespace {

class ForwardOps : public Equivalence {
 protected:
  /// Random contents for a whole buffer, the columns outside the view included.
  Pair random_buffer(DType dtype, const Layout& layout, float scale = 1.0f) {
    const std::vector<float> values = normal(layout.elements(), dtype, scale);
    return {to_tensor(cpu(), dtype, {layout.rows, layout.stride}, values),
            to_tensor(gpu(), dtype, {layout.rows, layout.stride}, values)};
  }
  Pair poisoned_buffer(DType dtype, const Layout& layout) {
    return {poisoned(cpu(), dtype, {layout.rows, layout.stride}), poisoned(gpu(), dtype, {layout.rows, layout.stride})};
  }
  /// Whole buffers are compared, so that a write outside the view shows.
  void expect_close(const Pair& buffers, double relative, double absolute, const std::string& what) {
    const std::vector<float> want = values_of(cpu(), buffers.cpu);
    EXPECT_TRUE(close(values_of(gpu(), buffers.gpu), want, [&](int64_t i) {
      return relative * std::fabs(want[i]) + absolute;
    })) << what;
  }
  void expect_same(const Pair& buffers, const std::string& what) {
    EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), buffers.gpu), raw_of<uint8_t>(cpu(), buffers.cpu))) << what;
  }
};

constexpr DType kActivations[] = {DType::bf16, DType::f32, DType::f16};

TEST_F(ForwardOps, RmsNorm) {
  for (const DType dtype : kActivations)
    for (const DType weight_dtype : {DType::bf16, DType::f32, DType::f16})
      for (const Layout& layout : row_layouts()) {
        const Pair x = random_buffer(dtype, layout, 3.0f), y = poisoned_buffer(dtype, layout);
        const std::vector<float> values = normal(layout.cols, weight_dtype);
        const Pair weight = {to_tensor(cpu(), weight_dtype, {layout.cols}, values),
                             to_tensor(gpu(), weight_dtype, {layout.cols}, values)};
        cpu().rms_norm(view_of(x.cpu, layout), weight.cpu.data(), weight_dtype, 1e-6f, view_of(y.cpu, layout));
        gpu().rms_norm(view_of(x.gpu, layout), weight.gpu.data(), weight_dtype, 1e-6f, view_of(y.gpu, layout));
        // Either side rounds once; the sum of squares is summed in fp32 by up to 256 threads and a tree.
        const double sum = (static_cast<double>(layout.cols) / 256 + 64) * kEps32;
        expect_close(y, 2.01 * roundoff(dtype) + sum, 0, to_string(layout) + " " + std::string(torch_name(dtype)));
      }
}

TEST_F(ForwardOps, RmsNormInPlaceAndTinyRows) {
  for (const float scale : {1e-12f, 1.0f, 1e6f}) {
    const Layout layout = dense(29, 2048);
    const Pair x = random_buffer(DType::f32, layout, scale);
    const std::vector<float> ones(layout.cols, 1.0f);
    const Pair weight = {to_tensor(cpu(), DType::f32, {layout.cols}, ones),
                         to_tensor(gpu(), DType::f32, {layout.cols}, ones)};
    cpu().rms_norm(x.cpu.matrix(), weight.cpu.data(), DType::f32, 1e-5f, x.cpu.matrix());
    gpu().rms_norm(x.gpu.matrix(), weight.gpu.data(), DType::f32, 1e-5f, x.gpu.matrix());
    expect_close(x, 100 * kEps32, 0, "scale " + std::to_string(scale));
  }
}

TEST_F(ForwardOps, RopeIsBitEqual) {
  constexpr int64_t kPositions = 513;
  struct Heads {
    Layout layout;
    int64_t head_dim;
  };
  const Heads shapes[] = {{dense(0, 64), 64},        {dense(1, 2), 2},           {dense(3, 30), 6},
                          {dense(301, 32 * 8), 32},  {dense(77, 128 * 32), 128}, {dense(77, 128 * 5), 128},
                          {dense(50, 80 * 3), 80},   {dense(50, 96), 96},        {{31, 256, 640, 128}, 64},
                          {{31, 256, 640, 129}, 64}, {{31, 256, 643, 0}, 128},   {dense(9, 256 * 4), 256}};
  for (const DType dtype : kActivations)
    for (const Heads& shape : shapes) {
      const int64_t half = shape.head_dim / 2;
      std::vector<float> cosine(kPositions * half), sine(kPositions * half);
      for (int64_t p = 0; p < kPositions; ++p)
        for (int64_t i = 0; i < half; ++i) {
          const double angle =
              static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
          cosine[p * half + i] = static_cast<float>(std::cos(angle));
          sine[p * half + i] = static_cast<float>(std::sin(angle));
        }
      std::vector<int32_t> positions(shape.layout.rows);
      for (int32_t& p : positions) p = static_cast<int32_t>(random() % kPositions);
      const Pair x = random_buffer(dtype, shape.layout);
      for (Backend* backend : {&cpu(), &gpu()}) {
        const Tensor c = to_tensor(*backend, DType::f32, {kPositions, half}, cosine);
        const Tensor s = to_tensor(*backend, DType::f32, {kPositions, half}, sine);
        const Tensor at = to_tensor_raw(*backend, DType::i32, {shape.layout.rows}, positions);
        backend->rope(view_of(backend == &cpu() ? x.cpu : x.gpu, shape.layout), shape.head_dim, c.as<float>(),
                      s.as<float>(), at.as<int32_t>());
        backend->synchronize();
      }
      expect_same(x, to_string(shape.layout) + " " + std::string(torch_name(dtype)));
    }
}

TEST_F(ForwardOps, SiluMul) {
  for (const DType dtype : kActivations)
    for (const Layout& layout : row_layouts()) {
      // Gate and up are two halves of one buffer, as one stacked linear leaves them.
      const Layout both = {layout.rows, layout.stride * 2, layout.stride * 2, 0};
      const Layout gate = {layout.rows, layout.cols, both.stride, layout.offset};
      const Layout up = {layout.rows, layout.cols, both.stride, layout.stride + layout.offset};
      const Pair input = random_buffer(dtype, both, 4.0f), out = poisoned_buffer(dtype, layout);
      cpu().silu_mul(view_of(input.cpu, gate), view_of(input.cpu, up), view_of(out.cpu, layout));
      gpu().silu_mul(view_of(input.gpu, gate), view_of(input.gpu, up), view_of(out.gpu, layout));
      // silu(gate) may round to the neighbour (one unit), and so may the product.
      expect_close(out, 4.1 * roundoff(dtype) + 16 * kEps32, 1e-30,
                   to_string(layout) + " " + std::string(torch_name(dtype)));
    }
}

TEST_F(ForwardOps, SiluMulOfExtremeGates) {
  const std::vector<float> gates = {0.0f, -0.0f, 1e-30f, -1e-30f, 20.0f, -20.0f, 87.0f, -87.0f, 200.0f, -200.0f, 3e38f};
  const std::vector<float> ups(gates.size(), 0.5f);
  const Shape shape = {1, static_cast<int64_t>(gates.size())};
  for (const DType dtype : {DType::bf16, DType::f32}) {
    Pair out = {poisoned(cpu(), dtype, shape), poisoned(gpu(), dtype, shape)};
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor gate = to_tensor(*backend, dtype, shape, gates), up = to_tensor(*backend, dtype, shape, ups);
      backend->silu_mul(gate.matrix(), up.matrix(), (backend == &cpu() ? out.cpu : out.gpu).matrix());
      backend->synchronize();
    }
    expect_close(out, 4.1 * roundoff(dtype), 1e-30, std::string(torch_name(dtype)));
  }
}

TEST_F(ForwardOps, AddIsBitEqual) {
  for (const DType dtype : kActivations)
    for (const Layout& layout : row_layouts()) {
      const Pair x = random_buffer(dtype, layout), y = random_buffer(dtype, layout);
      cpu().add(view_of(x.cpu, layout), view_of(y.cpu, layout));
      gpu().add(view_of(x.gpu, layout), view_of(y.gpu, layout));
      expect_same(x, to_string(layout) + " " + std::string(torch_name(dtype)));
    }
}

TEST_F(ForwardOps, CrossEntropy) {
  const Layout layouts[] = {dense(0, 10),     dense(3, 1),        dense(5, 7),        dense(64, 1000), dense(17, 2048),
                            dense(4, 151936), {9, 1001, 1024, 8}, {9, 1001, 1025, 3}, dense(2, 32001)};
  for (const DType dtype : kActivations)
    for (const Layout& layout : layouts) {
      for (const float scale : {0.0f, 1.0f, 12.0f}) {
        const Pair logits = random_buffer(dtype, layout, scale);
        std::vector<int32_t> targets(layout.rows), best[2];
        for (int32_t& target : targets) target = static_cast<int32_t>(random() % layout.cols);
        std::vector<double> losses[2];
        for (int b = 0; b < 2; ++b) {
          losses[b].assign(layout.rows, NAN);
          best[b].assign(layout.rows, -1);
          Backend& backend = b == 0 ? cpu() : gpu();
          backend.cross_entropy(view_of(b == 0 ? logits.cpu : logits.gpu, layout), targets.data(), losses[b].data(),
                                best[b].data());
        }
        const std::string what = to_string(layout) + " scale " + std::to_string(scale);
        EXPECT_TRUE(same(best[1], best[0])) << what;
        // Exponentials are good to 3e-7 on either side, so the logarithm of their sum is to 6e-7.
        for (int64_t t = 0; t < layout.rows; ++t)
          EXPECT_NEAR(losses[1][t], losses[0][t], 1e-6 + 1e-12 * std::fabs(losses[0][t])) << what << " row " << t;
      }
    }
}

TEST_F(ForwardOps, CrossEntropyTakesTheFirstOfEqualLogits) {
  constexpr int64_t kClasses = 5000;
  for (const int64_t first :
       {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{255}, int64_t{256}, int64_t{2049}, kClasses - 1}) {
    std::vector<float> logits(kClasses, -1.0f);
    logits[first] = 2.5f;
    for (int64_t i = first; i < kClasses; i += 13) logits[i] = 2.5f;
    const Tensor device = to_tensor(gpu(), DType::bf16, {1, kClasses}, logits);
    const int32_t target = 0;
    double loss = NAN;
    int32_t best = -1;
    gpu().cross_entropy(device.matrix(), &target, &loss, &best);
    EXPECT_EQ(best, first);
  }
}

TEST_F(ForwardOps, WrongShapesAreRefused) {
  const Tensor a = poisoned(gpu(), DType::f32, {4, 8}), b = poisoned(gpu(), DType::f32, {4, 9});
  const Tensor integers = poisoned(gpu(), DType::i32, {4, 8});
  EXPECT_THROW(gpu().add(a.matrix(), b.matrix()), Error);
  EXPECT_THROW(gpu().add(integers.matrix(), integers.matrix()), Error);
  EXPECT_THROW(gpu().silu_mul(a.matrix(), a.matrix(), b.matrix()), Error);
  EXPECT_THROW(gpu().rms_norm(a.matrix(), b.data(), DType::f32, 1e-6f, b.matrix()), Error);
  EXPECT_THROW(gpu().rope(b.matrix(), 3, nullptr, nullptr, nullptr), Error);
  const int32_t outside[] = {0, 1, 8, 2};
  double losses[4];
  int32_t best[4];
  EXPECT_THROW(gpu().cross_entropy(a.matrix(), outside, losses, best), Error);
}

}  // namespace
}  // namespace shardq::equivalence
