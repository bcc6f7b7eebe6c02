#include "io/stage_store_writer.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/durable_file.hpp"
#include "io/files.hpp"
#include "io/hdf5_handles.hpp"
#include "io/stage_store_blocks.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;

constexpr int64_t kLargestRow = int64_t{1} << 30;

Hdf5Handle make_intermediate_groups() {
  Hdf5Handle links(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(links, 1);
  return links;
}

void write_attribute(hid_t dataset, const char* name, hid_t type, const void* values, int64_t count,
                     const fs::path& path) {
  const hsize_t dims[1] = {static_cast<hsize_t>(count)};
  const Hdf5Handle space(count == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, dims, nullptr), H5Sclose);
  const Hdf5Handle attribute(
      check_hdf5(H5Acreate2(dataset, name, type, space, H5P_DEFAULT, H5P_DEFAULT), "add an attribute to", path),
      H5Aclose);
  check_hdf5(H5Awrite(attribute, type, values), "write an attribute of", path);
}

/// A descriptor for fsync, opened before anything is written, so that a failed write-back is reported to it.
class SyncedFile {
 public:
  explicit SyncedFile(const fs::path& path) : path_(path), fd_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    if (fd_ < 0) fail(ExitCode::disk, "cannot open {}: {}", path.string(), std::strerror(errno));
  }
  ~SyncedFile() { ::close(fd_); }
  SyncedFile(const SyncedFile&) = delete;
  SyncedFile& operator=(const SyncedFile&) = delete;
  void sync() const {
    int result;
    do result = ::fsync(fd_);
    while (result != 0 && errno == EINTR);
    // Never tried again: the kernel may have dropped the pages that it could not write, and a second fsync would
    // succeed over the loss.
    if (result != 0) fail(ExitCode::disk, "cannot fsync {}: {}", path_.string(), std::strerror(errno));
  }

 private:
  fs::path path_;
  int fd_;
};

/// A new HDF5 file under its temp name; save() gives it the final one, the destructor removes what was not saved.
class NewFile {
 public:
  explicit NewFile(const fs::path& path) : path_(path), temporary_(DurableFile::temporary_name(path)) {
    try {
      const Hdf5Lock lock = lock_hdf5();
      const Hdf5Handle access = hdf5_file_access();
      const hid_t file = H5Fcreate(temporary_.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
      file_ = Hdf5Handle(check_hdf5(file, "create", path), H5Fclose);
      synced_ = std::make_unique<SyncedFile>(temporary_);
    } catch (...) {  // the destructor does not run for a constructor that throws
      ::unlink(temporary_.c_str());
      throw;
    }
  }
  ~NewFile() {
    file_.close();
    if (!saved_) ::unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  hid_t id() const { return file_; }
  /// Closes, fsyncs and renames; the folder is the caller's to sync.
  StageFile save() {
    {
      const Hdf5Lock lock = lock_hdf5();  // the reason of a failure is the library's, not the thread's
      if (!file_.close()) fail_hdf5("finish writing", path_);
    }
    synced_->sync();
    const int64_t bytes = static_cast<int64_t>(fs::file_size(temporary_));
    fault_point("stage_file_synced");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0)
      fail(ExitCode::disk, "cannot rename {} to {}: {}", temporary_.string(), path_.string(), std::strerror(errno));
    saved_ = true;
    return {path_.filename().string(), bytes};
  }

 private:
  fs::path path_, temporary_;
  Hdf5Handle file_;
  std::unique_ptr<SyncedFile> synced_;
  bool saved_ = false;
};

/// Writes arrays one block at a time.
class ArrayWriter {
 public:
  ArrayWriter(const fs::path& path, hid_t file, std::atomic<int64_t>& bytes_written, const std::atomic<bool>& cancelled)
      : path_(path), file_(file), bytes_written_(bytes_written), cancelled_(cancelled) {}

  WrittenArray write(const StageArray& array) {
    const Shape row_shape(array.shape.begin() + 1, array.shape.end());
    const int64_t rows = array.shape[0], row_bytes = row_bytes_of(array.dtype, row_shape),
                  block_rows = rows_per_block(rows, row_bytes);
    const std::vector<hsize_t> dims = dims_of(rows, row_shape);
    const Hdf5Handle type = hdf5_type(array.dtype);
    const Hdf5Handle dataset = create(array.name, type, dims);
    std::vector<uint64_t> checksums;
    for (int64_t begin = 0; begin < rows && row_bytes > 0; begin += block_rows) {
      SHARDQ_CHECK(!cancelled_, ExitCode::stopped, "writing {} was given up", path_.string());
      const int64_t end = std::min(rows, begin + block_rows), bytes = (end - begin) * row_bytes;
      const std::byte* block = array.data.data() + begin * row_bytes;
      checksums.push_back(checksum(block, bytes));
      write_block(dataset, type, dims, begin, end, block);
      bytes_written_ += bytes;
      fault_point("stage_block_written");
    }
    const Hdf5Lock lock = lock_hdf5();
    write_attribute(dataset, "first_row", H5T_NATIVE_INT64, &array.first_row, 1, path_);
    write_attribute(dataset, "total_rows", H5T_NATIVE_INT64, &array.total_rows, 1, path_);
    write_attribute(dataset, "rows_per_block", H5T_NATIVE_INT64, &block_rows, 1, path_);
    if (!checksums.empty())
      write_attribute(dataset, "block_checksums", H5T_NATIVE_UINT64, checksums.data(),
                      static_cast<int64_t>(checksums.size()), path_);
    return {array.name, array.dtype, array.shape, array.first_row, array.total_rows, digest_of(block_rows, checksums)};
  }

 private:
  Hdf5Handle create(const std::string& name, hid_t type, const std::vector<hsize_t>& dims) {
    const Hdf5Lock lock = lock_hdf5();
    const Hdf5Handle space = simple_space(dims), links = make_intermediate_groups(),
                     creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);  // every byte is written once
    return Hdf5Handle(check_hdf5(H5Dcreate2(file_, name.c_str(), type, space, links, creation, H5P_DEFAULT),
                                 fmt::format("add array {} to", name), path_),
                      H5Dclose);
  }
  void write_block(hid_t dataset, hid_t type, const std::vector<hsize_t>& dims, int64_t begin, int64_t end,
                   const std::byte* data) {
    const Hdf5Lock lock = lock_hdf5();
    std::vector<hsize_t> block_dims = dims;
    block_dims[0] = static_cast<hsize_t>(end - begin);
    const Hdf5Handle memory = simple_space(block_dims), space = simple_space(dims);
    select_rows(space, {begin, end}, dims, path_);
    check_hdf5(H5Dwrite(dataset, type, memory, space, H5P_DEFAULT, data), "write", path_);
  }

  const fs::path& path_;
  hid_t file_;
  std::atomic<int64_t>& bytes_written_;
  const std::atomic<bool>& cancelled_;
};

void check_array(const StageArray& array) {
  SHARDQ_CHECK(!array.name.empty() && array.name[0] != '/' && !array.shape.empty(), ExitCode::internal,
               "stage array \"{}\" of shape {}: expected a relative name and at least one dimension", array.name,
               to_string(array.shape));
  const int64_t bytes = element_count(array.shape) * size_of(array.dtype);
  SHARDQ_CHECK(static_cast<int64_t>(array.data.size()) == bytes, ExitCode::internal,
               "stage array {} of shape {}: expected {} bytes, found {}", array.name, to_string(array.shape), bytes,
               array.data.size());
  SHARDQ_CHECK(0 <= array.first_row && array.first_row + array.shape[0] <= array.total_rows, ExitCode::internal,
               "stage array {}: rows {} to {} of {}", array.name, array.first_row, array.first_row + array.shape[0],
               array.total_rows);
  SHARDQ_CHECK(array.shape[0] == 0 || bytes / array.shape[0] <= kLargestRow, ExitCode::internal,
               "stage array {}: rows of {} bytes, at most {} are allowed", array.name, bytes / array.shape[0],
               kLargestRow);
}

WrittenPart write_arrays(const fs::path& path, std::vector<StageArray>& arrays, std::atomic<int64_t>& bytes_written,
                         const std::atomic<bool>& cancelled) {
  NewFile file(path);
  WrittenPart part;
  ArrayWriter writer(path, file.id(), bytes_written, cancelled);
  for (StageArray& array : arrays) {
    part.arrays.push_back(writer.write(array));
    array.data = {};
  }
  part.file = file.save();
  sync_folder(path.parent_path());
  fault_point("stage_file_written");
  return part;
}
}  // namespace

WrittenPart write_stage_file(const fs::path& path, std::vector<StageArray> arrays, std::atomic<int64_t>& bytes_written,
                             const std::atomic<bool>& cancelled) {
  int64_t bytes = 0;
  std::set<std::string> names;
  for (const StageArray& array : arrays) {
    check_array(array);
    SHARDQ_CHECK(names.insert(array.name).second, ExitCode::internal, "stage array {} was put twice", array.name);
    bytes += static_cast<int64_t>(array.data.size());
  }
  const int64_t available = free_bytes(path.parent_path());
  SHARDQ_CHECK(bytes <= available, ExitCode::disk, "cannot write {}: {} bytes needed, {} free", path.string(), bytes,
               available);
  try {
    return write_arrays(path, arrays, bytes_written, cancelled);
  } catch (const Error& error) {
    if (error.code() != ExitCode::disk) throw;
    fail(ExitCode::disk, "{} ({} bytes of data)", error.what(), bytes);
  }
}

StageFile write_virtual_file(const fs::path& path, const StageDescription& description) {
  const Hdf5Lock lock = lock_hdf5();
  NewFile file(path);
  const Hdf5Handle links = make_intermediate_groups();
  for (const auto& [name, array] : description.arrays) {
    const Hdf5Handle type = hdf5_type(array.dtype), creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    const std::vector<hsize_t> dims = dims_of(array.total_rows, array.row_shape);
    const Hdf5Handle whole = simple_space(dims);
    for (const ArrayPart& part : array.parts) {
      if (element_count(array.row_shape) == 0) break;  // nothing to map
      std::vector<hsize_t> part_dims = dims;
      part_dims[0] = static_cast<hsize_t>(part.end - part.begin);
      const Hdf5Handle target = simple_space(dims), source = simple_space(part_dims);
      select_rows(target, {part.begin, part.end}, dims, path);
      check_hdf5(
          H5Pset_virtual(creation, target, description.files[part.file].name.c_str(), ("/" + name).c_str(), source),
          "map an array in", path);
    }
    const Hdf5Handle dataset(check_hdf5(H5Dcreate2(file.id(), name.c_str(), type, whole, links, creation, H5P_DEFAULT),
                                        fmt::format("add array {} to", name), path),
                             H5Dclose);
  }
  return file.save();
}

}  // namespace shardq
