#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::load_row;
using cpu::store_row;

void CpuBackend::rope(MatrixView x, int64_t head_dim, const float* cosine, const float* sine,
                      const int32_t* positions) {
  SHARDQ_CHECK(head_dim > 0 && head_dim % 2 == 0 && x.cols % head_dim == 0, ExitCode::internal,
               "rope: {} columns are no whole heads of even size {}", x.cols, head_dim);
  check_forward_dtype(x.dtype, "rope");
  const int64_t half = head_dim / 2, heads = x.cols / head_dim;
#pragma omp parallel
  {
    std::vector<float> row(x.cols);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < x.rows; ++i) {
      load_row(x, i, row.data());
      const float* c = cosine + positions[i] * half;
      const float* s = sine + positions[i] * half;
      for (int64_t h = 0; h < heads; ++h) {
        float* low = row.data() + h * head_dim;
        float* high = low + half;
        for (int64_t j = 0; j < half; ++j) {
          const float a = low[j], b = high[j];
          low[j] = a * c[j] - b * s[j];
          high[j] = b * c[j] + a * s[j];
        }
      }
      store_row(row.data(), x, i);
    }
  }
}

}  // namespace shardq
