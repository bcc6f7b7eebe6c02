#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/exponential.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

void CpuBackend::cross_entropy(MatrixView logits, const int32_t* targets_host, double* losses, int32_t* best) {
  check_forward_dtype(logits.dtype, "cross_entropy");
  for (int64_t t = 0; t < logits.rows; ++t)
    SHARDQ_CHECK(0 <= targets_host[t] && targets_host[t] < logits.cols, ExitCode::internal,
                 "cross_entropy: target {} of {} classes at row {}", targets_host[t], logits.cols, t);
#pragma omp parallel
  {
    std::vector<float> row(logits.cols);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < logits.rows; ++t) {
      load_row(logits, t, row.data());
      float largest = -std::numeric_limits<float>::infinity();
      int32_t at = 0;
      for (int64_t j = 0; j < logits.cols; ++j)
        if (row[j] > largest) {
          largest = row[j];
          at = static_cast<int32_t>(j);
        }
      const float target = row[targets_host[t]];
      // The exponentials are computed in float and summed in double: over 150,000 classes a float sum would lose 3
      // digits.
      for (int64_t j = 0; j < logits.cols; ++j) row[j] = exponential(row[j] - largest);
      double sum = 0;
      for (int64_t j = 0; j < logits.cols; ++j) sum += row[j];
      losses[t] = std::log(sum) + static_cast<double>(largest) - target;
      best[t] = at;
    }
  }
}

}  // namespace shardq
