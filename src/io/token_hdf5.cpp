#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "io/hdf5_handles.hpp"
#include "io/token_readers.hpp"

namespace shardq {
namespace {

bool has_dataset(hid_t file, const char* name) {
  if (H5Lexists(file, name, H5P_DEFAULT) <= 0) return false;
  const Hdf5Handle object(H5Oopen(file, name, H5P_DEFAULT), H5Oclose);
  return object >= 0 && H5Iget_type(object) == H5I_DATASET;
}

/// `input_ids`, or the only dataset of the root group.
std::string find_ids(hid_t file, const std::string& where) {
  if (has_dataset(file, "input_ids")) return "input_ids";
  H5G_info_t info{};
  SHARDQ_CHECK(H5Gget_info(file, &info) >= 0, ExitCode::input, "{}: cannot list its datasets", where);
  std::string found;
  int datasets = 0;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    std::array<char, 512> name{};
    if (H5Lget_name_by_idx(file, ".", H5_INDEX_NAME, H5_ITER_INC, i, name.data(), name.size(), H5P_DEFAULT) < 0)
      continue;
    if (!has_dataset(file, name.data())) continue;
    found = name.data();
    ++datasets;
  }
  SHARDQ_CHECK(datasets == 1, ExitCode::input, "{}: expected a dataset input_ids, or a single dataset; found {}", where,
               datasets);
  return found;
}

struct Rectangle {
  int64_t samples = 0, length = 0;
  bool operator==(const Rectangle&) const = default;
};

/// Reads the first max_samples rows (0: all) of an integer dataset as int64.
std::vector<int64_t> read_rows(hid_t file, const std::string& name, int64_t max_samples, Rectangle& whole,
                               Rectangle& had, const std::string& where) {
  const Hdf5Handle dataset(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose);
  SHARDQ_CHECK(dataset >= 0, ExitCode::input, "{}: cannot open dataset {}", where, name);
  const Hdf5Handle type(H5Dget_type(dataset), H5Tclose);
  const H5T_class_t kind = H5Tget_class(type);
  // Booleans are an enumeration of int8 in h5py.
  SHARDQ_CHECK(kind == H5T_INTEGER || kind == H5T_ENUM, ExitCode::input, "{}: dataset {} must hold integers", where,
               name);
  const Hdf5Handle space(H5Dget_space(dataset), H5Sclose);
  const int rank = H5Sget_simple_extent_ndims(space);
  SHARDQ_CHECK(rank == 1 || rank == 2, ExitCode::input,
               "{}: dataset {} must have shape [samples, length], found rank {}", where, name, rank);
  hsize_t dims[2] = {1, 1};
  H5Sget_simple_extent_dims(space, dims, nullptr);
  whole = rank == 1 ? Rectangle{1, static_cast<int64_t>(dims[0])}
                    : Rectangle{static_cast<int64_t>(dims[0]), static_cast<int64_t>(dims[1])};
  had = whole;
  if (max_samples > 0) had.samples = std::min(had.samples, max_samples);
  // A dataset may claim any size without storing a byte; the limit is far above any calibration set.
  constexpr int64_t kMostIds = int64_t{1} << 32;
  SHARDQ_CHECK(had.samples == 0 || had.length <= kMostIds / had.samples, ExitCode::input,
               "{}: dataset {} of [{}, {}] ids is beyond {} ids; set max_samples", where, name, had.samples, had.length,
               kMostIds);
  std::vector<int64_t> values(static_cast<size_t>(had.samples * had.length));
  if (values.empty()) return values;
  if (rank == 2) {
    const hsize_t start[2] = {0, 0}, count[2] = {static_cast<hsize_t>(had.samples), dims[1]};
    SHARDQ_CHECK(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, count, nullptr) >= 0, ExitCode::input,
                 "{}: cannot select rows of {}", where, name);
  }
  const hsize_t flat = values.size();
  const Hdf5Handle memory(H5Screate_simple(1, &flat, nullptr), H5Sclose);
  const Hdf5Handle target(kind == H5T_ENUM ? H5Tcopy(type) : H5Tcopy(H5T_NATIVE_INT64), H5Tclose);
  if (kind == H5T_ENUM) {
    SHARDQ_CHECK(H5Tget_size(type) == 1, ExitCode::input, "{}: dataset {} must hold integers", where, name);
    std::vector<int8_t> narrow(values.size());
    SHARDQ_CHECK(H5Dread(dataset, target, memory, space, H5P_DEFAULT, narrow.data()) >= 0, ExitCode::input,
                 "{}: dataset {} cannot be read (damaged?)", where, name);
    std::copy(narrow.begin(), narrow.end(), values.begin());
    return values;
  }
  SHARDQ_CHECK(H5Dread(dataset, target, memory, space, H5P_DEFAULT, values.data()) >= 0, ExitCode::input,
               "{}: dataset {} cannot be read (damaged?)", where, name);
  return values;
}

}  // namespace

RawSamples read_hdf5_tokens(const std::filesystem::path& path, int64_t max_samples) {
  const std::string where = "token file " + path.string();
  const Hdf5Lock lock = lock_hdf5();
  const Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  SHARDQ_CHECK(file >= 0, ExitCode::input, "{}: not an HDF5 file, or truncated", where);
  const std::string name = find_ids(file, where);
  Rectangle whole, had;
  const std::vector<int64_t> ids = read_rows(file, name, max_samples, whole, had, where);
  SHARDQ_CHECK(had.samples == 0 || had.length > 0, ExitCode::input, "{}: sample 0 is empty (shape [{}, 0])", where,
               had.samples);
  std::vector<int64_t> mask;
  if (name != "attention_mask" && has_dataset(file, "attention_mask")) {
    Rectangle mask_whole, mask_had;
    mask = read_rows(file, "attention_mask", max_samples, mask_whole, mask_had, where);
    SHARDQ_CHECK(mask_whole == whole, ExitCode::input, "{}: attention_mask has shape [{}, {}], expected [{}, {}]",
                 where, mask_whole.samples, mask_whole.length, whole.samples, whole.length);
  }
  return split_samples(ids, mask, had.samples, had.length);
}

}  // namespace shardq
