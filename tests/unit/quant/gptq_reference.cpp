#include "gptq_reference.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace shardq::testing {
namespace {

using Matrix = std::vector<double>;

/// Lower Cholesky factor.
Matrix cholesky(Matrix a, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = j; i < n; ++i) {
      double sum = a[i * n + j];
      for (int64_t k = 0; k < j; ++k) sum -= a[i * n + k] * a[j * n + k];
      if (i == j && !(sum > 0)) throw std::runtime_error("reference Cholesky: not positive definite");
      a[i * n + j] = i == j ? std::sqrt(sum) : sum / a[j * n + j];
    }
    for (int64_t k = j + 1; k < n; ++k) a[j * n + k] = 0;
  }
  return a;
}

/// Inverse by Gauss-Jordan (positive definite: no pivoting needed).
Matrix inverse(Matrix a, int64_t n) {
  Matrix b(static_cast<size_t>(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i) b[i * n + i] = 1;
  for (int64_t p = 0; p < n; ++p) {
    const double d = a[p * n + p];
    for (int64_t j = 0; j < n; ++j) a[p * n + j] /= d, b[p * n + j] /= d;
    for (int64_t i = 0; i < n; ++i) {
      const double f = a[i * n + p];
      if (i == p || f == 0) continue;
      for (int64_t j = 0; j < n; ++j) a[i * n + j] -= f * a[p * n + j], b[i * n + j] -= f * b[p * n + j];
    }
  }
  return b;
}

struct Rounded {
  int code;
  double value;
};
Rounded nearest(const ReferenceProblem& p, int64_t row, int64_t j, double target) {
  const float scale = p.scales[row * p.cols + j];
  const int zero = p.zeros[row * p.cols + j];
  const double t = std::clamp(target / scale + zero, double(p.grid.qmin()), double(p.grid.qmax()));
  const int code = static_cast<int>(std::rint(t));
  return {code, dequantize_code(code, scale, zero, p.grid.scale_dtype)};
}

}  // namespace

ReferenceProblem reference_problem(const Problem& problem, const Solved& solved, int64_t e, bool shared_hessian) {
  const int64_t n = problem.cols, rows = problem.rows;
  const float* h = solved.hessian.data() + (shared_hessian ? 0 : e * n * n);
  ReferenceProblem p{rows, n, {}, {}, {}, {}, {}, solved.scheme.grid};
  p.column.resize(static_cast<size_t>(n));
  std::iota(p.column.begin(), p.column.end(), 0);
  if (solved.scheme.actorder == ActOrder::static_)
    std::stable_sort(p.column.begin(), p.column.end(),
                     [&](int64_t a, int64_t b) { return h[a * n + a] > h[b * n + b]; });
  p.hessian.resize(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const int64_t a = std::max(p.column[i], p.column[j]), b = std::min(p.column[i], p.column[j]);
      p.hessian[i * n + j] = h[a * n + b];
    }
  for (int64_t i = 0; i < n; ++i) {
    double& diagonal = p.hessian[i * n + i];
    diagonal = diagonal == 0 ? 1.0 : diagonal + solved.outcomes[e].damping;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < n; ++j) {
      p.weights.push_back(problem.weights[(e * rows + r) * n + p.column[j]]);
      p.scales.push_back(solved.scale(e, r, p.column[j]));
      p.zeros.push_back(solved.zero(e, r, p.column[j]));
    }
  return p;
}

ReferenceFactor reversed_cholesky(const std::vector<double>& h, int64_t n) {
  const Matrix reversed(h.rbegin(), h.rend());
  const Matrix l = cholesky(reversed, n);
  ReferenceFactor f{Matrix(static_cast<size_t>(n * n), 0.0), Matrix(static_cast<size_t>(n))};
  const auto r = [&](int64_t k, int64_t j) { return l[(n - 1 - k) * n + n - 1 - j]; };
  for (int64_t j = 0; j < n; ++j) {
    f.pivots[j] = r(j, j);
    for (int64_t k = 0; k < j; ++k) f.t[k * n + j] = r(k, j) / r(j, j);
  }
  return f;
}

ReferenceCodes inverse_free(const ReferenceProblem& p, int64_t block) {
  const int64_t n = p.cols;
  const ReferenceFactor f = reversed_cholesky(p.hessian, n);
  ReferenceCodes out{std::vector<int8_t>(static_cast<size_t>(p.rows * n)),
                     std::vector<double>(static_cast<size_t>(p.rows))};
  Matrix d(static_cast<size_t>(n)), shifted(static_cast<size_t>(n));
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t begin = 0; begin < n; begin += block) {
      const int64_t end = std::min(begin + block, n);
      for (int64_t j = begin; j < end; ++j) {
        double from_before = 0;
        for (int64_t k = 0; k < begin; ++k) from_before += d[k] * f.t[k * n + j];
        shifted[j] = p.weights[row * n + j] + from_before;
      }
      for (int64_t j = begin; j < end; ++j) {
        const Rounded q = nearest(p, row, j, shifted[j]);
        out.codes[row * n + p.column[j]] = static_cast<int8_t>(q.code);
        d[j] = p.weights[row * n + j] - q.value;
        const double error = (shifted[j] - q.value) * f.pivots[j];
        out.losses[row] += error * error;
        for (int64_t k = j + 1; k < end; ++k) shifted[k] += d[j] * f.t[j * n + k];
      }
    }
  return out;
}

ReferenceCodes three_step(const ReferenceProblem& p, int64_t block) {
  const int64_t n = p.cols;
  // Upper U with H^-1 = U^T U: the transpose of the lower Cholesky factor.
  const Matrix lower = cholesky(inverse(p.hessian, n), n);
  const auto u = [&](int64_t i, int64_t j) { return lower[j * n + i]; };
  ReferenceCodes out{std::vector<int8_t>(static_cast<size_t>(p.rows * n)),
                     std::vector<double>(static_cast<size_t>(p.rows))};
  for (int64_t row = 0; row < p.rows; ++row) {
    Matrix w(p.weights.begin() + row * n, p.weights.begin() + (row + 1) * n), error(static_cast<size_t>(n));
    for (int64_t begin = 0; begin < n; begin += block) {
      const int64_t end = std::min(begin + block, n);
      for (int64_t j = begin; j < end; ++j) {
        const Rounded q = nearest(p, row, j, w[j]);
        out.codes[row * n + p.column[j]] = static_cast<int8_t>(q.code);
        error[j] = (w[j] - q.value) / u(j, j);
        out.losses[row] += error[j] * error[j];
        for (int64_t k = j; k < end; ++k) w[k] -= error[j] * u(j, k);
      }
      for (int64_t k = end; k < n; ++k)
        for (int64_t j = begin; j < end; ++j) w[k] -= error[j] * u(j, k);
    }
  }
  return out;
}

ReferenceCodes explicit_obs(const ReferenceProblem& p) {
  const int64_t n = p.cols;
  Matrix hinv = inverse(p.hessian, n);
  Matrix w = p.weights;
  ReferenceCodes out{std::vector<int8_t>(static_cast<size_t>(p.rows * n)),
                     std::vector<double>(static_cast<size_t>(p.rows))};
  for (int64_t j = 0; j < n; ++j) {
    const double pivot = hinv[j * n + j];
    for (int64_t row = 0; row < p.rows; ++row) {
      double* line = w.data() + row * n;
      const Rounded q = nearest(p, row, j, line[j]);
      out.codes[row * n + p.column[j]] = static_cast<int8_t>(q.code);
      const double error = (line[j] - q.value) / pivot;
      out.losses[row] += error * (line[j] - q.value);
      for (int64_t k = j + 1; k < n; ++k) line[k] -= error * hinv[j * n + k];
    }
    for (int64_t i = j + 1; i < n; ++i)
      for (int64_t k = j + 1; k < n; ++k) hinv[i * n + k] -= hinv[i * n + j] * hinv[j * n + k] / pivot;
  }
  return out;
}

std::vector<double> shifted_weights(const ReferenceProblem& p, const Solved& solved, int64_t e) {
  const int64_t n = p.cols;
  const ReferenceFactor f = reversed_cholesky(p.hessian, n);
  Matrix shifted = p.weights;
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t j = 0; j < n; ++j) {
      const double d = p.weights[row * n + j] - solved.value(e, row, p.column[j]);
      for (int64_t k = j + 1; k < n; ++k) shifted[row * n + k] += d * f.t[j * n + k];
    }
  return shifted;
}

double worst_miss(const ReferenceProblem& p, const Solved& solved, int64_t e) {
  const Matrix shifted = shifted_weights(p, solved, e);
  double worst = 0;
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t j = 0; j < p.cols; ++j) {
      const int64_t i = row * p.cols + j;
      const double t = std::clamp(shifted[i] / p.scales[i] + p.zeros[i], double(p.grid.qmin()), double(p.grid.qmax()));
      worst = std::max(worst, std::abs(t - solved.code(e, row, p.column[j])) - 0.5);
    }
  return worst;
}

}  // namespace shardq::testing
