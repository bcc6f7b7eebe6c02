#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "core/view.hpp"
#include "io/stage_store_manifest.hpp"

namespace shardq {

/// Reads verified rows of one data file of a stage; private to src/io.
class StageFileReader {
 public:
  /// Error(disk) when the file is missing, has another size than expected or cannot be opened.
  StageFileReader(std::filesystem::path path, int64_t expected_bytes);
  ~StageFileReader();

  /// Rows [begin, end), counted from the array's first in this file, to `target`. Error(disk) naming file, array and
  /// block of rows when what is read is not what was written.
  void read(const std::string& name, const ArrayDescription& array, const ArrayPart& part, Range rows,
            std::byte* target);
  const std::filesystem::path& path() const { return path_; }

 private:
  struct Dataset;
  Dataset& open(const std::string& name, const ArrayDescription& array, const ArrayPart& part);
  void read_block(const Dataset& dataset, int64_t block, std::byte* target);

  std::filesystem::path path_;
  std::unique_ptr<struct OpenStageFile> file_;
  std::unique_ptr<Dataset> dataset_;  ///< the one read last: hidden states are read in many small ranges
};

}  // namespace shardq
