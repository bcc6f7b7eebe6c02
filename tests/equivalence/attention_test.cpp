// Attention: CUDA against the CPU backend and against the definition in double precision.
#include <numeric>

#include "equivalence/strided.hpp"

namespace shardq::equivalence {
namespace {

struct Problem {
  std::vector<int64_t> lengths;
  int64_t heads = 1, kv_heads = 1, head_dim = 64, window = 0;
  DType dtype = DType::bf16;
  float scale = 0;      ///< 0: 1 / sqrt(head_dim)
  int64_t before = 0;   ///< rows in front of the first sequence
  int64_t padding = 0;  ///< elements between the rows of q, k, v beyond what they need; odd: not 16-byte aligned
};

std::string to_string(const Problem& p) {
  return fmt::format("heads {}/{} of {}, window {}, {}, padding {}, before {}, lengths {}", p.heads, p.kv_heads,
                     p.head_dim, p.window, torch_name(p.dtype), p.padding, p.before, fmt::join(p.lengths, " "));
}

/// q, k and v as columns of one buffer, as a stacked linear leaves them.
struct Arrays {
  int64_t rows = 0, stride = 0, heads_cols = 0, kv_cols = 0;
  std::vector<int64_t> starts;
  std::vector<float> qkv;
  float q(int64_t t, int64_t c) const { return qkv[t * stride + c]; }
  float k(int64_t t, int64_t c) const { return qkv[t * stride + heads_cols + c]; }
  float v(int64_t t, int64_t c) const { return qkv[t * stride + heads_cols + kv_cols + c]; }
};

/// On Hopper there are two tensor-core kernels; SHARDQ_ATTENTION chooses. Elsewhere both are the portable one.
constexpr const char* kKernels[] = {"fastest", "portable"};
class KernelChoice {
 public:
  explicit KernelChoice(const char* kernel) { setenv("SHARDQ_ATTENTION", kernel, 1); }
  ~KernelChoice() { unsetenv("SHARDQ_ATTENTION"); }
};

class Attention : public Equivalence {
 protected:
  static float scale_of(const Problem& p) {
    return p.scale != 0 ? p.scale : 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  }
  Arrays arrays(const Problem& p, float spread = 1.0f) {
    Arrays a;
    a.starts = {p.before};
    for (const int64_t length : p.lengths) a.starts.push_back(a.starts.back() + length);
    a.rows = a.starts.back() + 3;  // some rows belong to no sequence
    a.heads_cols = p.heads * p.head_dim;
    a.kv_cols = p.kv_heads * p.head_dim;
    a.stride = a.heads_cols + 2 * a.kv_cols + p.padding;
    a.qkv = normal(a.rows * a.stride, p.dtype, spread);
    return a;
  }
  std::vector<float> run(Backend& backend, const Problem& p, const Arrays& a) {
    const Tensor qkv = to_tensor(backend, p.dtype, {a.rows, a.stride}, a.qkv);
    const Tensor out = poisoned(backend, p.dtype, {a.rows, a.heads_cols});
    const MatrixView all = qkv.matrix();
    backend.attention(all.col_range(0, a.heads_cols), all.col_range(a.heads_cols, a.heads_cols + a.kv_cols),
                      all.col_range(a.heads_cols + a.kv_cols, a.heads_cols + 2 * a.kv_cols), p.head_dim, a.starts,
                      scale_of(p), p.window, out.matrix());
    return values_of(backend, out);
  }
  /// Error bound of one output: the probabilities are rounded once (and exponentials are good to 1e-5 for scores up to
  /// some tens), the result once.  magnitude = sum over keys of p |v|.
  static double bound(DType dtype, double magnitude, double value) {
    return (roundoff(dtype) + 1e-5) * magnitude + 1.01 * roundoff(dtype) * std::fabs(value) + 1e-6;
  }
  struct Reference {
    std::vector<double> value, magnitude;  // [rows, heads * head_dim]; NaN where nothing is to be written
  };
  static Reference reference(const Problem& p, const Arrays& a) {
    Reference r{std::vector<double>(a.rows * a.heads_cols, NAN), std::vector<double>(a.rows * a.heads_cols, 0)};
    for (size_t s = 0; s + 1 < a.starts.size(); ++s)
      for (int64_t t = a.starts[s]; t < a.starts[s + 1]; ++t)
        for (int64_t h = 0; h < p.heads; ++h) {
          const int64_t kv = h / (p.heads / p.kv_heads) * p.head_dim, own = h * p.head_dim;
          const int64_t first = p.window == 0 ? a.starts[s] : std::max(a.starts[s], t - p.window + 1);
          std::vector<double> score(t + 1 - first);
          for (int64_t j = first; j <= t; ++j) {
            double dot = 0;
            for (int64_t d = 0; d < p.head_dim; ++d) dot += static_cast<double>(a.q(t, own + d)) * a.k(j, kv + d);
            score[j - first] = dot * static_cast<double>(scale_of(p));
          }
          const double largest = *std::ranges::max_element(score);
          double total = 0;
          for (double& value : score) total += value = std::exp(value - largest);
          for (int64_t d = 0; d < p.head_dim; ++d) {
            double sum = 0, magnitude = 0;
            for (int64_t j = first; j <= t; ++j) {
              sum += score[j - first] * a.v(j, kv + d);
              magnitude += score[j - first] * std::fabs(a.v(j, kv + d));
            }
            r.value[t * a.heads_cols + own + d] = sum / total;
            r.magnitude[t * a.heads_cols + own + d] = magnitude / total;
          }
        }
    return r;
  }
  /// Every kernel against the definition.
  void expect_near_reference(const Problem& p, const Arrays& a) {
    const Reference want = reference(p, a);
    for (const char* kernel : kKernels) {
      const KernelChoice choice(kernel);
      EXPECT_TRUE(close(run(gpu(), p, a), want.value,
                        [&](int64_t i) { return bound(p.dtype, want.magnitude[i], want.value[i]); }))
          << kernel << ": " << to_string(p);
    }
  }
  void check(const Problem& p, float spread = 1.0f) {
    const Arrays a = arrays(p, spread);
    expect_near_reference(p, a);
    const Reference want = reference(p, a);
    EXPECT_TRUE(close(run(cpu(), p, a), want.value,
                      [&](int64_t i) { return bound(p.dtype, want.magnitude[i], want.value[i]); }))
        << "CPU: " << to_string(p);
  }
  const std::vector<int64_t> ragged{1, 7, 63, 64, 65, 127, 129, 300};
};

TEST_F(Attention, RaggedSequencesOfEveryHeadSize) {
  for (const int64_t head_dim : {32, 64, 80, 96, 128, 256})
    check({.lengths = ragged, .heads = 2, .kv_heads = 1, .head_dim = head_dim});
}

TEST_F(Attention, HeadSizesWithoutTensorCores) {
  for (const int64_t head_dim : {1, 20, 129, 264, 512})
    check({.lengths = {1, 33, 70}, .heads = 2, .kv_heads = 1, .head_dim = head_dim});
}

TEST_F(Attention, GroupedHeads) {
  for (const int64_t kv_heads : {8, 2, 1}) {
    check({.lengths = {65, 200}, .heads = 8, .kv_heads = kv_heads, .head_dim = 64});
    check({.lengths = {65, 40}, .heads = 8, .kv_heads = kv_heads, .head_dim = 128});
  }
}

TEST_F(Attention, SlidingWindows) {
  for (const int64_t head_dim : {64, 128, 256})
    for (const int64_t window : {1, 2, 37, 64, 65, 128, 191, 300, 5000})
      check({.lengths = {1, 129, 300, 64}, .head_dim = head_dim, .window = window});
}

TEST_F(Attention, OtherElementTypesAndAlignments) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const int64_t padding : {0, 8, 3})
      for (const int64_t window : {0, 50})
        check({.lengths = {5, 64, 131},
               .heads = 4,
               .kv_heads = 2,
               .head_dim = 64,
               .window = window,
               .dtype = dtype,
               .padding = padding});
}

TEST_F(Attention, EmptySequencesAndRowsOutside) {
  check({.lengths = {0, 5, 0, 0, 130, 0}, .head_dim = 64, .before = 11});
  check({.lengths = {}, .head_dim = 64, .before = 4});
  check({.lengths = {0}, .head_dim = 128});
}

TEST_F(Attention, SharpAndFlatSoftmax) {
  check({.lengths = {300, 129}, .head_dim = 128, .scale = 4.0f});   // nearly one-hot: scores of some hundreds
  check({.lengths = {300, 129}, .head_dim = 128, .scale = 1e-6f});  // nearly the mean
  check({.lengths = {257}, .head_dim = 64}, 5.0f);
}

TEST_F(Attention, MaximumThatKeepsGrowing) {
  // Keys grow along the sequence, so that every step of the online softmax rescales what it has.
  const Problem p{.lengths = {400}, .heads = 2, .kv_heads = 2, .head_dim = 128};
  Arrays a = arrays(p);
  for (int64_t t = 0; t < a.rows; ++t)
    for (int64_t c = 0; c < a.heads_cols; ++c) {
      a.qkv[t * a.stride + c] = 1.0f;
      a.qkv[t * a.stride + a.heads_cols + c] = round_to_bf16(0.02f * static_cast<float>(t));
    }
  expect_near_reference(p, a);
}

TEST_F(Attention, ANotANumberStaysInItsSequence) {
  for (const int64_t head_dim : {64, 128, 20}) {
    const Problem p{.lengths = {70, 90, 33}, .head_dim = head_dim};
    Arrays a = arrays(p);
    for (int64_t t = a.starts[1]; t < a.starts[2]; ++t) std::fill_n(a.qkv.begin() + t * a.stride, a.stride, NAN);
    expect_near_reference(p, a);
  }
}

TEST_F(Attention, OutputMayReplaceTheQueries) {
  const Problem p{.lengths = {200, 77}, .heads = 4, .kv_heads = 2, .head_dim = 128};
  const Arrays a = arrays(p);
  for (const char* kernel : kKernels) {
    const KernelChoice choice(kernel);
    const std::vector<float> want = run(gpu(), p, a);
    const Tensor qkv = to_tensor(gpu(), p.dtype, {a.rows, a.stride}, a.qkv);
    const MatrixView all = qkv.matrix(), q = all.col_range(0, a.heads_cols);
    gpu().attention(q, all.col_range(a.heads_cols, a.heads_cols + a.kv_cols),
                    all.col_range(a.heads_cols + a.kv_cols, a.heads_cols + 2 * a.kv_cols), p.head_dim, a.starts,
                    scale_of(p), 0, q);
    const std::vector<float> got = values_of(gpu(), qkv);
    for (int64_t t = a.starts.front(); t < a.starts.back(); ++t)
      for (int64_t c = 0; c < a.heads_cols; ++c)
        ASSERT_EQ(got[t * a.stride + c], want[t * a.heads_cols + c]) << kernel << " " << t << " " << c;
  }
}

TEST_F(Attention, ProductionLengthAgainstTheCpu) {
  const Problem p{.lengths = {2048, 1500}, .heads = 4, .kv_heads = 1, .head_dim = 128};
  const Arrays a = arrays(p);
  const std::vector<float> want = run(cpu(), p, a);
  // The magnitude of the bound is what attention gives for |v|.
  Arrays positive = a;
  for (int64_t t = 0; t < a.rows; ++t)
    for (int64_t c = a.heads_cols + a.kv_cols; c < a.stride; ++c)
      positive.qkv[t * a.stride + c] = std::fabs(a.qkv[t * a.stride + c]);
  const std::vector<float> magnitude = run(cpu(), p, positive);
  for (const char* kernel : kKernels) {
    const KernelChoice choice(kernel);
    EXPECT_TRUE(close(run(gpu(), p, a), want, [&](int64_t i) {
      return bound(p.dtype, 1.01 * magnitude[i], want[i]) + 1.01 * roundoff(p.dtype) * std::fabs(want[i]);
    })) << kernel;
  }
}

TEST_F(Attention, WrongShapesAreRefused) {
  if (gpu().is_host()) GTEST_SKIP() << "the CPU backend takes mixed element types";
  const Tensor q = poisoned(gpu(), DType::bf16, {4, 256}), k = poisoned(gpu(), DType::bf16, {4, 128});
  const Tensor other = poisoned(gpu(), DType::f32, {4, 128});
  const int64_t good[] = {0, 4}, backwards[] = {0, 3, 2}, beyond[] = {0, 5};
  const auto call = [&](const Tensor& v, int64_t head_dim, std::span<const int64_t> starts, float scale) {
    gpu().attention(q.matrix(), k.matrix(), v.matrix(), head_dim, starts, scale, 0, q.matrix());
  };
  EXPECT_THROW(call(k, 96, good, 1.0f), Error);
  EXPECT_THROW(call(k, 64, backwards, 1.0f), Error);
  EXPECT_THROW(call(k, 64, beyond, 1.0f), Error);
  EXPECT_THROW(call(other, 64, good, 1.0f), Error);
  EXPECT_THROW(call(k, 64, good, 0.0f), Error);
}

// The error bound must be able to fail.
TEST_F(Attention, TheBoundSeesAMissingKey) {
  const Problem p{.lengths = {300}, .head_dim = 64}, shorter{.lengths = {300}, .head_dim = 64, .window = 299};
  const Arrays a = arrays(p);
  const Reference want = reference(p, a);
  const Reference wrong = reference(shorter, a);
  int64_t seen = 0, changed = 0;
  for (int64_t c = 0; c < p.head_dim; ++c) {
    const int64_t i = 299 * a.heads_cols + c;
    changed += want.value[i] != wrong.value[i];
    seen += std::fabs(want.value[i] - wrong.value[i]) > bound(p.dtype, want.magnitude[i], want.value[i]);
  }
  EXPECT_EQ(changed, p.head_dim);
  EXPECT_GT(seen, 0);
}

}  // namespace
}  // namespace shardq::equivalence
