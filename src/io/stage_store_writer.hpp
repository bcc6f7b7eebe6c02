#pragma once
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "io/stage_store.hpp"
#include "io/stage_store_manifest.hpp"

namespace shardq {

// Writing the HDF5 files of a stage; private to src/io.

/// Writes a file durably: temp name, write, close, fsync, rename, fsync of the folder. Frees each array's data as soon
/// as it is written. `bytes_written` grows as blocks are handed to the system; `cancelled` is looked at before each.
/// Errors: Error(disk) with path, bytes and reason (the temp file is removed); Error(internal) for arrays that are not
/// as they say.
WrittenPart write_stage_file(const std::filesystem::path& path, std::vector<StageArray> arrays,
                             std::atomic<int64_t>& bytes_written, const std::atomic<bool>& cancelled);

/// Writes the file that presents all data files of a stage as whole arrays, without data of its own; sources by
/// relative names, so that the folder may move. Flushed to disk and named; the caller syncs the folder. Returns its
/// size.
StageFile write_virtual_file(const std::filesystem::path& path, const StageDescription& description);

}  // namespace shardq
