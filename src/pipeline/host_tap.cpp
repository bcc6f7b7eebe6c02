#include "pipeline/host_tap.hpp"

#include <algorithm>

namespace shardq {

std::shared_ptr<const HostTap> download_tap(Backend& backend, const TapResult& result, bool whole) {
  const Shape& shape = result.codes.shape();
  const int64_t cols = shape[2], groups = result.scales.shape()[2];
  int64_t begin = 0, end = shape[0] * shape[1];
  if (!whole && !result.pieces.empty()) {
    begin = result.pieces.front().rows.begin;
    end = std::max(begin, result.pieces.back().rows.end);
  }
  const int64_t rows = end - begin;
  const bool symmetric = !result.zeros;
  auto host = std::make_shared<HostTap>(
      HostTap{.codes = HostBuffer(backend, std::max<int64_t>(1, rows * cols)),
              .scales = HostBuffer(backend, std::max<int64_t>(1, rows * groups * 4)),
              .zeros = HostBuffer(backend, symmetric ? 1 : std::max<int64_t>(1, rows * groups)),
              .first_row = begin,
              .row_count = rows,
              .cols = cols,
              .groups = groups,
              .symmetric = symmetric});
  backend.download(host->codes.as<void>(), result.codes.as<int8_t>() + begin * cols, rows * cols);
  backend.download(host->scales.as<void>(), result.scales.as<float>() + begin * groups, rows * groups * 4);
  if (!symmetric) backend.download(host->zeros.as<void>(), result.zeros.as<int8_t>() + begin * groups, rows * groups);
  return host;
}

}  // namespace shardq
