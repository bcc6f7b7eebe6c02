#include "io/stage_store_manifest.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "io/files.hpp"

namespace shardq {
namespace {
using nlohmann::json;

constexpr const char* kManifestFormat = "shardq work directory";
constexpr const char* kStageFormat = "shardq stage";
constexpr int kFormatVersion = 2;  // 2: codes may be in output shards

// Checksums as text: JSON numbers above 2^53 are not safe in other readers.
std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}
uint64_t from_hex(const json& value) {
  return std::stoull(value.get<std::string>(), nullptr, 16);
}

std::string dump(const json& value) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    fail(ExitCode::internal, "stage text is not valid UTF-8: {}", error.what());
  }
}
std::string checksum_text(const std::string& text) {
  return hex(checksum(text.data(), static_cast<int64_t>(text.size())));
}

std::string seal(const char* format, const json& content) {
  const std::string text = dump(content);
  return fmt::format("{{\"format\":\"{}\",\"version\":{},\"checksum\":\"{}\",\n\"content\":{}}}\n", format,
                     kFormatVersion, checksum_text(text), text);
}

json unseal(const char* format, const std::string& text, const std::filesystem::path& path) {
  const json sealed = json::parse(text, nullptr, false);
  SHARDQ_CHECK(sealed.is_object() && sealed.value("format", json()) == format && sealed.contains("version") &&
                   sealed["version"].is_number_integer(),
               ExitCode::disk,
               "{} is damaged: expected a complete JSON file of format \"{}\", found {} bytes that are not",
               path.string(), format, text.size());
  // Before the checksum: a later version may compute that in another way.
  const auto version = sealed["version"].get<int64_t>();
  SHARDQ_CHECK(version == kFormatVersion, ExitCode::usage,
               "{} was written by {} shardq: format version {}, this one reads {}; start anew with --resume never",
               path.string(), version > kFormatVersion ? "a later" : "an earlier", version, kFormatVersion);
  SHARDQ_CHECK(sealed.contains("content") && sealed.value("checksum", json()) == checksum_text(dump(sealed["content"])),
               ExitCode::disk, "{} is damaged: its checksum does not match its content", path.string());
  return sealed["content"];
}

/// Runs a reader of sealed content; what does not fit the expected structure is damage too.
template <class Read>
auto read_content(const char* format, const std::string& text, const std::filesystem::path& path, Read read) {
  const json content = unseal(format, text, path);
  try {
    return read(content);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ExitCode::disk, "{} is damaged: {}", path.string(), error.what());
  }
}

json file_json(const StageFile& file) {
  return json::array({file.name, file.bytes});
}
StageFile file_from(const json& value) {
  return {value.at(0).get<std::string>(), value.at(1).get<int64_t>()};
}

json files_json(const std::vector<StageFile>& files) {
  json list = json::array();
  for (const StageFile& file : files) list.push_back(file_json(file));
  return list;
}
std::vector<StageFile> files_from(const json& list) {
  std::vector<StageFile> files;
  for (const json& value : list) files.push_back(file_from(value));
  return files;
}

DType dtype_from(const json& value) {
  const auto dtype = dtype_from_safetensors(value.get<std::string>());
  SHARDQ_CHECK(dtype, ExitCode::disk, "unknown element type {} in a stage description", value.dump());
  return *dtype;
}
std::string dtype_text(DType dtype) {
  return std::string(safetensors_name(dtype));
}
}  // namespace

std::string to_text(const WrittenPart& part) {
  json arrays = json::array();
  for (const WrittenArray& a : part.arrays)
    arrays.push_back({a.name, dtype_text(a.dtype), a.shape, a.first_row, a.total_rows, hex(a.digest)});
  return json{{"file", file_json(part.file)}, {"arrays", std::move(arrays)}}.dump();
}

WrittenPart written_part_from_text(const std::string& text) {
  const json value = json::parse(text);
  WrittenPart part;
  part.file = file_from(value.at("file"));
  for (const json& a : value.at("arrays"))
    part.arrays.push_back({a.at(0).get<std::string>(), dtype_from(a.at(1)), a.at(2).get<Shape>(),
                           a.at(3).get<int64_t>(), a.at(4).get<int64_t>(), from_hex(a.at(5))});
  return part;
}

StageDescription describe_stage(const std::string& stage, const std::vector<WrittenPart>& parts, std::string text) {
  StageDescription description;
  description.text = std::move(text);
  std::map<std::string, int> first_writer;
  for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank) {
    description.files.push_back(parts[rank].file);
    for (const WrittenArray& a : parts[rank].arrays) {
      const Shape row_shape(a.shape.begin() + 1, a.shape.end());
      auto [at, added] = description.arrays.try_emplace(a.name, ArrayDescription{a.dtype, row_shape, a.total_rows, {}});
      if (added) first_writer[a.name] = rank;
      const ArrayDescription& known = at->second;
      SHARDQ_CHECK(known.dtype == a.dtype && known.row_shape == row_shape && known.total_rows == a.total_rows,
                   ExitCode::internal,
                   "stage {}, array {}: rank {} put {} rows of {} {} but rank {} put {} rows of {} {}", stage, a.name,
                   first_writer[a.name], known.total_rows, dtype_text(known.dtype), to_string(known.row_shape), rank,
                   a.total_rows, dtype_text(a.dtype), to_string(row_shape));
      if (a.shape[0] > 0) at->second.parts.push_back({rank, a.first_row, a.first_row + a.shape[0], a.digest});
    }
  }
  for (auto& [name, array] : description.arrays) {
    std::sort(array.parts.begin(), array.parts.end(),
              [](const ArrayPart& a, const ArrayPart& b) { return a.begin < b.begin; });
    int64_t reached = 0;
    for (const ArrayPart& part : array.parts) {
      SHARDQ_CHECK(part.begin == reached, ExitCode::internal,
                   "stage {}, array {}: rows {} to {} were put by {}; rank {} put {} to {}", stage, name,
                   std::min(reached, part.begin), std::max(reached, part.begin),
                   part.begin > reached ? "no rank" : "two ranks", part.file, part.begin, part.end);
      reached = part.end;
    }
    SHARDQ_CHECK(reached == array.total_rows, ExitCode::internal, "stage {}, array {}: expected {} rows, ranks put {}",
                 stage, name, array.total_rows, reached);
  }
  return description;
}

std::string to_text(const StageDescription& description) {
  json arrays = json::object();
  for (const auto& [name, array] : description.arrays) {
    json parts = json::array();
    for (const ArrayPart& part : array.parts) parts.push_back({part.file, part.begin, part.end, hex(part.digest)});
    arrays[name] = {{"dtype", dtype_text(array.dtype)},
                    {"row_shape", array.row_shape},
                    {"rows", array.total_rows},
                    {"parts", std::move(parts)}};
  }
  return seal(kStageFormat,
              {{"text", description.text}, {"files", files_json(description.files)}, {"arrays", std::move(arrays)}});
}

StageDescription stage_description_from_text(const std::string& text, const std::filesystem::path& path) {
  return read_content(kStageFormat, text, path, [](const json& content) {
    StageDescription description;
    description.text = content.at("text").get<std::string>();
    description.files = files_from(content.at("files"));
    for (const auto& [name, value] : content.at("arrays").items()) {
      ArrayDescription& array = description.arrays[name];
      array.dtype = dtype_from(value.at("dtype"));
      array.row_shape = value.at("row_shape").get<Shape>();
      array.total_rows = value.at("rows").get<int64_t>();
      for (const json& p : value.at("parts"))
        array.parts.push_back({p.at(0).get<int>(), p.at(1).get<int64_t>(), p.at(2).get<int64_t>(), from_hex(p.at(3))});
    }
    return description;
  });
}

std::string to_text(const Manifest& manifest) {
  json stages = json::array();
  for (const StageEntry& stage : manifest.stages)
    stages.push_back({{"name", stage.name},
                      {"writers", stage.writers},
                      {"description", file_json(stage.description)},
                      {"checksum", hex(stage.description_checksum)},
                      {"files", files_json(stage.files)}});
  json content = {{"run", manifest.run}, {"fingerprint", manifest.fingerprint}, {"stages", std::move(stages)}};
  content["finished"] = manifest.finished ? json(*manifest.finished) : json();
  return seal(kManifestFormat, content);
}

Manifest manifest_from_text(const std::string& text, const std::filesystem::path& path) {
  return read_content(kManifestFormat, text, path, [](const json& content) {
    Manifest manifest;
    manifest.run = content.at("run").get<std::string>();
    manifest.fingerprint = content.at("fingerprint").get<std::map<std::string, std::string>>();
    if (!content.at("finished").is_null()) manifest.finished = content.at("finished").get<std::string>();
    for (const json& value : content.at("stages"))
      manifest.stages.push_back({value.at("name").get<std::string>(), value.at("writers").get<int>(),
                                 file_from(value.at("description")), from_hex(value.at("checksum")),
                                 files_from(value.at("files"))});
    return manifest;
  });
}

std::string fingerprint_changes(const std::map<std::string, std::string>& former,
                                const std::map<std::string, std::string>& now) {
  std::map<std::string, std::pair<std::string, std::string>> pairs;
  for (const auto& [name, value] : former) pairs[name] = {value, "(none)"};
  for (const auto& [name, value] : now) {
    auto [at, added] = pairs.try_emplace(name, "(none)", value);
    if (!added) at->second.second = value;
  }
  std::string changes;
  for (const auto& [name, change] : pairs)
    if (change.first != change.second)
      changes += fmt::format("{}{}: {} -> {}", changes.empty() ? "" : "; ", name, change.first, change.second);
  return changes;
}

}  // namespace shardq
