#include "kernels/cuda/touch_pages.hpp"

namespace shardq {

void touch_pages(char* data, int64_t bytes) {
  constexpr int64_t kPage = 4096;
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < bytes; at += kPage) data[at] = 0;
}

}  // namespace shardq
