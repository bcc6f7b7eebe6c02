#include "pipeline/host_tap.hpp"

#include <algorithm>
#include <cstring>

namespace shardq {
namespace {

HostTap allocate_tap(Backend& backend, Range rows, int64_t cols, int64_t groups, bool symmetric) {
  const auto buffer = [&](int64_t bytes) { return HostBuffer(backend, std::max<int64_t>(1, bytes)); };
  return {.codes = buffer(rows.size() * cols),
          .scales = buffer(rows.size() * groups * 4),
          .zeros = buffer(symmetric ? 1 : rows.size() * groups),
          .first_row = rows.begin,
          .row_count = rows.size(),
          .cols = cols,
          .groups = groups,
          .symmetric = symmetric};
}

}  // namespace

HostTap empty_tap(Backend& backend, const ModelSpec::TapShape& shape, const QuantScheme& scheme) {
  const int64_t rows = shape.count * shape.rows, groups = shape.cols / group_size_for(scheme, shape.cols);
  HostTap tap = allocate_tap(backend, {0, rows}, shape.cols, groups, scheme.grid.symmetric);
  std::memset(tap.codes.as<void>(), 0, rows * shape.cols);
  std::memset(tap.scales.as<void>(), 0, rows * groups * 4);
  if (!tap.symmetric) std::memset(tap.zeros.as<void>(), 0, rows * groups);
  return tap;
}

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
  auto host = std::make_shared<HostTap>(allocate_tap(backend, {begin, end}, cols, groups, symmetric));
  backend.download(host->codes.as<void>(), result.codes.as<int8_t>() + begin * cols, rows * cols);
  backend.download(host->scales.as<void>(), result.scales.as<float>() + begin * groups, rows * groups * 4);
  if (!symmetric) backend.download(host->zeros.as<void>(), result.zeros.as<int8_t>() + begin * groups, rows * groups);
  return host;
}

}  // namespace shardq
