#include "io/stage_store_blocks.hpp"

#include <algorithm>

#include "io/files.hpp"

namespace shardq {
namespace {
// Large enough for the disk, small enough to be checksummed while in cache. The number of blocks is bounded because the
// checksums are an attribute, which HDF5 limits to 64 KiB.
constexpr int64_t kBlockBytes = int64_t{2} << 20;
constexpr int64_t kMostBlocks = 4096;
}  // namespace

int64_t rows_per_block(int64_t rows, int64_t row_bytes) {
  return std::max({int64_t{1}, kBlockBytes / std::max<int64_t>(row_bytes, 1), (rows + kMostBlocks - 1) / kMostBlocks});
}

uint64_t digest_of(int64_t block_rows, const std::vector<uint64_t>& checksums) {
  std::vector<uint64_t> words = {static_cast<uint64_t>(block_rows)};
  words.insert(words.end(), checksums.begin(), checksums.end());
  return checksum(words.data(), static_cast<int64_t>(words.size() * sizeof(uint64_t)));
}

int64_t row_bytes_of(DType dtype, const Shape& row_shape) {
  return element_count(row_shape) * size_of(dtype);
}

std::vector<hsize_t> dims_of(int64_t rows, const Shape& row_shape) {
  std::vector<hsize_t> dims = {static_cast<hsize_t>(rows)};
  dims.insert(dims.end(), row_shape.begin(), row_shape.end());
  return dims;
}

Hdf5Handle simple_space(const std::vector<hsize_t>& dims) {
  return Hdf5Handle(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
}

void select_rows(hid_t space, Range rows, const std::vector<hsize_t>& dims, const std::filesystem::path& path) {
  std::vector<hsize_t> start(dims.size(), 0), count = dims;
  start[0] = static_cast<hsize_t>(rows.begin);
  count[0] = static_cast<hsize_t>(rows.size());
  check_hdf5(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr), "select rows of",
             path);
}

}  // namespace shardq
