#pragma once
#include <cstdint>
#include <filesystem>
#include <vector>

#include "core/view.hpp"
#include "io/hdf5_handles.hpp"

namespace shardq {

// How the rows of an array are cut, selected and verified in the HDF5 files of a stage; private to src/io.
//
// A data file holds one contiguous dataset an array, with attributes `first_row`, `total_rows` and, so that parts can
// be verified as they are read, `rows_per_block` and `block_checksums`: one checksum for each block of rows. The digest
// in the stage description is a checksum of those, so that neither a damaged block, nor a damaged list, nor a stale
// file of the same name and size passes.

/// Rows of one block: the unit of verification and of one transfer.
int64_t rows_per_block(int64_t rows, int64_t row_bytes);
/// A digest of the block checksums, and of how rows are cut into blocks.
uint64_t digest_of(int64_t block_rows, const std::vector<uint64_t>& checksums);
/// Bytes of one row.
int64_t row_bytes_of(DType dtype, const Shape& row_shape);

/// The shape of `rows` rows as HDF5 dimensions.
std::vector<hsize_t> dims_of(int64_t rows, const Shape& row_shape);
Hdf5Handle simple_space(const std::vector<hsize_t>& dims);
/// Selects rows [begin, end) of the dataspace of a whole array.
void select_rows(hid_t space, Range rows, const std::vector<hsize_t>& dims, const std::filesystem::path& path);

}  // namespace shardq
