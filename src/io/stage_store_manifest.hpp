#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/view.hpp"

namespace shardq {

// The text files of a stage store, private to src/io. `manifest.json` says which stages count; `stages/<stage>.json`
// describes one. Apart, because the manifest is written again at every commit, and descriptions of thousands of expert
// arrays would make that quadratic in the layers. Each is sealed: {"format", "version", "checksum", "content"}, so that
// damage that leaves valid JSON is seen too.

/// A file by its name in the stages folder.
struct StageFile {
  std::string name;
  int64_t bytes = 0;
  bool operator==(const StageFile&) const = default;
};

/// What one rank wrote of one array.
struct WrittenArray {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  int64_t first_row = 0, total_rows = 0;
  uint64_t digest = 0;  ///< of the block checksums, see stage_store_file.hpp
};

/// What one rank wrote of one stage: the message that ranks exchange before the commit.
struct WrittenPart {
  StageFile file;
  std::vector<WrittenArray> arrays;
};
std::string to_text(const WrittenPart& part);
WrittenPart written_part_from_text(const std::string& text);

/// Rows [begin, end) of an array, in one file.
struct ArrayPart {
  int file = 0;  ///< index into StageDescription::files
  int64_t begin = 0, end = 0;
  uint64_t digest = 0;
};

struct ArrayDescription {
  DType dtype = DType::f32;
  Shape row_shape;  ///< shape without the first dimension
  int64_t total_rows = 0;
  std::vector<ArrayPart> parts;  ///< ascending, without gaps; empty parts are left out
};

/// One stage: its data files (one a rank), its arrays and the caller's text.
struct StageDescription {
  std::string text;
  std::vector<StageFile> files;
  std::map<std::string, ArrayDescription> arrays;
};
/// Puts the ranks' parts together. Error(internal) naming array and ranks where dtypes, shapes or rows do not fit.
StageDescription describe_stage(const std::string& stage, const std::vector<WrittenPart>& parts, std::string text);

std::string to_text(const StageDescription& description);
StageDescription stage_description_from_text(const std::string& text, const std::filesystem::path& path);

/// A committed stage in the manifest.
struct StageEntry {
  std::string name;
  int writers = 0;
  StageFile description;  ///< `<stage>.json`
  uint64_t description_checksum = 0;
  std::vector<StageFile> files;  ///< data files, then the virtual file
};

struct Manifest {
  std::string run;  ///< drawn when the run was begun
  std::map<std::string, std::string> fingerprint;
  std::vector<StageEntry> stages;  ///< oldest first
  std::optional<std::string> finished;
};
std::string to_text(const Manifest& manifest);
/// Errors: Error(disk) naming `path` when damaged, Error(usage) when another version of shardq wrote it.
Manifest manifest_from_text(const std::string& text, const std::filesystem::path& path);

/// One line a changed, added or missing entry, joined by "; "; empty when both agree.
std::string fingerprint_changes(const std::map<std::string, std::string>& former,
                                const std::map<std::string, std::string>& now);

}  // namespace shardq
