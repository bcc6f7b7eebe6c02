#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/exponential.hpp"
#include "kernels/cpu/reduction.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::exponential;
using cpu::largest_of;
using cpu::load_row;
using cpu::sum_of;

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
      const float largest = largest_of(row.data(), logits.cols);
      const auto at = std::find(row.begin(), row.end(), largest) - row.begin();
      const float target = row[targets_host[t]];
      // The exponentials are computed in float and summed in double: over 150,000 classes a float sum would lose 3
      // digits.
      for (int64_t j = 0; j < logits.cols; ++j) row[j] = exponential(row[j] - largest);
      const double sum = sum_of(logits.cols, [&](int64_t j) { return row[j]; });
      losses[t] = std::log(sum) + static_cast<double>(largest) - target;
      best[t] = static_cast<int32_t>(at == logits.cols ? 0 : at);  // none is found among NaN
    }
  }
}

}  // namespace shardq
