#include "quant_problem.hpp"

#include <algorithm>
#include <stdexcept>

namespace shardq::testing {

std::vector<float> correlated_tokens(int64_t tokens, int64_t cols, double correlation, unsigned seed) {
  std::mt19937 strengths(static_cast<unsigned>(cols)), noise(seed);
  std::normal_distribution<double> normal;
  std::vector<double> strength(static_cast<size_t>(cols));
  for (double& s : strength) s = std::exp(0.7 * normal(strengths));
  const double innovation = std::sqrt(1 - correlation * correlation);
  std::vector<float> x(static_cast<size_t>(tokens * cols));
  for (int64_t t = 0; t < tokens; ++t) {
    double state = normal(noise);
    for (int64_t c = 0; c < cols; ++c) {
      if (c > 0) state = correlation * state + innovation * normal(noise);
      x[t * cols + c] = round_to_bf16(static_cast<float>(strength[c] * state));
    }
  }
  return x;
}

Problem make_problem(const ProblemShape& shape) {
  Problem p{shape.count, shape.rows, shape.cols, {}, {}, {}};
  std::mt19937 random(shape.seed * 7919u + 17u);
  std::normal_distribution<double> normal(0.0, 0.02);
  p.weights.resize(static_cast<size_t>(shape.count * shape.rows * shape.cols));
  for (float& w : p.weights) w = round_to_bf16(static_cast<float>(normal(random)));
  for (int64_t e = 0; e < shape.count; ++e) {
    p.x.push_back(correlated_tokens(shape.tokens, shape.cols, shape.correlation,
                                    shape.seed + 1000u * (1 + static_cast<unsigned>(e))));
    p.tokens.push_back(shape.tokens);
  }
  return p;
}

std::vector<float> Problem::sums() const {
  std::vector<float> result(static_cast<size_t>(count * cols * cols));
  std::vector<double> sum(static_cast<size_t>(cols * cols));
  for (int64_t e = 0; e < count; ++e) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t t = 0; t < tokens[e]; ++t) {
      const float* row = x[e].data() + t * cols;
      for (int64_t i = 0; i < cols; ++i)
        for (int64_t j = 0; j <= i; ++j) sum[i * cols + j] += static_cast<double>(row[i]) * row[j];
    }
    for (int64_t i = 0; i < cols * cols; ++i) result[e * cols * cols + i] = static_cast<float>(sum[i]);
  }
  return result;
}

QuantScheme scheme_of(int bits, int64_t group_size, bool symmetric, ActOrder order, Observer observer) {
  QuantScheme scheme;
  scheme.name = "test";
  scheme.grid.bits = bits;
  scheme.grid.symmetric = symmetric;
  scheme.group_size = group_size;
  scheme.actorder = order;
  scheme.observer = observer;
  return scheme;
}

namespace {

Tensor upload_weights(Backend& backend, const Problem& p, DType dtype) {
  Tensor tensor(backend, dtype, {p.count, p.rows, p.cols}, "weights");
  for (size_t i = 0; i < p.weights.size(); ++i) {
    if (dtype == DType::bf16) tensor.as<BFloat16>()[i] = to_bf16(p.weights[i]);
    if (dtype == DType::f16) tensor.as<Float16>()[i] = to_f16(p.weights[i]);
    if (dtype == DType::f32) tensor.as<float>()[i] = p.weights[i];
  }
  return tensor;
}

template <class T>
std::vector<T> to_host(const Tensor& tensor) {
  if (!tensor) return {};
  return std::vector<T>(tensor.as<T>(), tensor.as<T>() + tensor.size());
}

}  // namespace

Solved run_solve(const Problem& p, const SolveRequest& request) {
  return run_solve(p, request, p.sums());
}

Solved run_solve(const Problem& p, const SolveRequest& request, std::vector<float> sums) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const Tensor weights = upload_weights(*backend, p, request.weight_dtype);
  const int64_t hessians = request.shared ? 1 : p.count, n = p.cols;
  Solved result;
  result.scheme = request.scheme;
  result.hessian = std::move(sums);
  result.hessian.resize(static_cast<size_t>(hessians * n * n));
  MatrixNames names;
  for (int64_t e = 0; e < p.count; ++e) names.push_back("matrix." + std::to_string(e));
  std::vector<float> pool = request.pool;
  MatrixView pool_view;
  if (!pool.empty()) pool_view = {pool.data(), DType::f32, n, n, n};
  PhaseSeconds seconds;
  HessianStack hessian{{result.hessian.data(), DType::f32, hessians, n, n, n, n * n},
                       {p.tokens.begin(), p.tokens.begin() + hessians}};
  const Quantized q = solve(*backend, weights.stack(), hessian, pool_view, request.pool_tokens, request.scheme,
                            request.options, names, seconds);
  result.count = p.count;
  result.rows = p.rows;
  result.cols = n;
  result.group_size = group_size_for(request.scheme, n);
  result.groups = n / result.group_size;
  if (q.codes.shape() != Shape{p.count, p.rows, n} || q.scales.shape() != Shape{p.count, p.rows, result.groups})
    throw std::logic_error("solve() returned tensors of another shape than the header promises");
  result.codes = to_host<int8_t>(q.codes);
  result.scales = to_host<float>(q.scales);
  result.zeros = to_host<int8_t>(q.zeros);
  result.outcomes = q.outcomes;
  result.losses = q.losses;
  result.rtn_losses = q.rtn_losses;
  return result;
}

double differing_share(const std::vector<int8_t>& a, const std::vector<int8_t>& b) {
  if (a.size() != b.size()) throw std::logic_error("codes of different sizes");
  int64_t differing = 0;
  for (size_t i = 0; i < a.size(); ++i) differing += a[i] != b[i];
  return a.empty() ? 0 : static_cast<double>(differing) / static_cast<double>(a.size());
}

}  // namespace shardq::testing
