#include "io/stage_store_reader.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "io/files.hpp"
#include "io/hdf5_handles.hpp"
#include "io/stage_store_blocks.hpp"

namespace shardq {
namespace fs = std::filesystem;

struct OpenStageFile {
  Hdf5Handle handle;
};

struct StageFileReader::Dataset {
  std::string name;
  Hdf5Handle handle, type;
  std::vector<hsize_t> dims;
  int64_t row_bytes = 0, block_rows = 0;
  std::vector<uint64_t> checksums;

  Range block(int64_t index) const {
    return {index * block_rows, std::min(static_cast<int64_t>(dims[0]), (index + 1) * block_rows)};
  }
};

namespace {
template <class T>
std::vector<T> read_attribute(hid_t dataset, const char* name, hid_t type, const fs::path& path) {
  const Hdf5Handle attribute(check_hdf5(H5Aopen(dataset, name, H5P_DEFAULT), "find block checksums in", path),
                             H5Aclose);
  const Hdf5Handle space(H5Aget_space(attribute), H5Sclose);
  std::vector<T> values(
      static_cast<size_t>(check_hdf5(H5Sget_simple_extent_npoints(space), "read an attribute of", path)));
  check_hdf5(H5Aread(attribute, type, values.data()), "read an attribute of", path);
  return values;
}

std::vector<hsize_t> dims_of_dataset(hid_t dataset) {
  const Hdf5Handle space(H5Dget_space(dataset), H5Sclose);
  const int rank = H5Sget_simple_extent_ndims(space);
  std::vector<hsize_t> dims(static_cast<size_t>(std::max(rank, 0)));
  if (rank > 0) H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  return dims;
}
}  // namespace

StageFileReader::StageFileReader(fs::path path, int64_t expected_bytes)
    : path_(std::move(path)), file_(std::make_unique<OpenStageFile>()) {
  std::error_code error;
  const auto bytes = fs::file_size(path_, error);
  SHARDQ_CHECK(!error, ExitCode::disk, "cannot open stage file {}: {}", path_.string(), error.message());
  SHARDQ_CHECK(static_cast<int64_t>(bytes) == expected_bytes, ExitCode::disk,
               "stage file {} is damaged: expected {} bytes, found {}", path_.string(), expected_bytes, bytes);
  const Hdf5Lock lock = lock_hdf5();
  const Hdf5Handle access = hdf5_file_access();
  file_->handle =
      Hdf5Handle(check_hdf5(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, access), "open stage file", path_), H5Fclose);
}

StageFileReader::~StageFileReader() = default;

StageFileReader::Dataset& StageFileReader::open(const std::string& name, const ArrayDescription& array,
                                                const ArrayPart& part) {
  if (dataset_ && dataset_->name == name) return *dataset_;
  const Hdf5Lock lock = lock_hdf5();
  auto dataset = std::make_unique<Dataset>();
  dataset->name = name;
  dataset->dims = dims_of(part.end - part.begin, array.row_shape);
  dataset->row_bytes = row_bytes_of(array.dtype, array.row_shape);
  dataset->type = hdf5_type(array.dtype);
  dataset->handle = Hdf5Handle(
      check_hdf5(H5Dopen2(file_->handle, name.c_str(), H5P_DEFAULT), fmt::format("open array {} of", name), path_),
      H5Dclose);
  const Hdf5Handle stored_type(H5Dget_type(dataset->handle), H5Tclose);
  SHARDQ_CHECK(H5Tequal(stored_type, dataset->type) > 0 && dims_of_dataset(dataset->handle) == dataset->dims,
               ExitCode::disk,
               "stage file {} is damaged: array {} has another type or shape than the stage description says",
               path_.string(), name);
  const std::vector<int64_t> block_rows =
      read_attribute<int64_t>(dataset->handle, "rows_per_block", H5T_NATIVE_INT64, path_);
  if (dataset->row_bytes > 0)
    dataset->checksums = read_attribute<uint64_t>(dataset->handle, "block_checksums", H5T_NATIVE_UINT64, path_);
  SHARDQ_CHECK(block_rows.size() == 1 && digest_of(block_rows[0], dataset->checksums) == part.digest, ExitCode::disk,
               "stage file {} is damaged: the block checksums of array {} are not those of the stage description",
               path_.string(), name);
  dataset->block_rows = block_rows[0];
  dataset_ = std::move(dataset);
  return *dataset_;
}

void StageFileReader::read_block(const Dataset& dataset, int64_t block, std::byte* target) {
  const Range rows = dataset.block(block);
  {
    const Hdf5Lock lock = lock_hdf5();
    std::vector<hsize_t> block_dims = dataset.dims;
    block_dims[0] = static_cast<hsize_t>(rows.size());
    const Hdf5Handle memory = simple_space(block_dims), space = simple_space(dataset.dims);
    select_rows(space, rows, dataset.dims, path_);
    check_hdf5(H5Dread(dataset.handle, dataset.type, memory, space, H5P_DEFAULT, target),
               fmt::format("read array {} of", dataset.name), path_);
  }
  const uint64_t found = checksum(target, rows.size() * dataset.row_bytes),
                 expected = dataset.checksums[static_cast<size_t>(block)];
  SHARDQ_CHECK(found == expected, ExitCode::disk,
               "stage file {} is damaged: array {}, rows {} to {}: expected checksum {:016x}, found {:016x}",
               path_.string(), dataset.name, rows.begin, rows.end, expected, found);
}

void StageFileReader::read(const std::string& name, const ArrayDescription& array, const ArrayPart& part, Range rows,
                           std::byte* target) {
  const Dataset& dataset = open(name, array, part);
  if (dataset.row_bytes == 0) return;
  std::vector<std::byte> whole;  // a block of which only a part is wanted
  for (int64_t block = rows.begin / dataset.block_rows; rows.begin < rows.end; ++block) {
    const Range at = dataset.block(block);
    const int64_t end = std::min(at.end, rows.end), bytes = (end - rows.begin) * dataset.row_bytes;
    if (at.begin == rows.begin && at.end == end) {
      read_block(dataset, block, target);
    } else {
      whole.resize(static_cast<size_t>(at.size() * dataset.row_bytes));
      read_block(dataset, block, whole.data());
      std::memcpy(target, whole.data() + (rows.begin - at.begin) * dataset.row_bytes, static_cast<size_t>(bytes));
    }
    target += bytes;
    rows.begin = end;
  }
}

}  // namespace shardq
