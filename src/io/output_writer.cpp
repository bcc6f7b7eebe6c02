#include "io/output_writer.hpp"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <vector>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/durable_file.hpp"
#include "io/files.hpp"

namespace shardq {
namespace {

namespace fs = std::filesystem;

/// "out/" and "out" name the same folder; the partial folder is made by appending to the name.
fs::path without_trailing_slash(const fs::path& path) {
  const fs::path normal = path.lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

void require_vacant(const fs::path& output) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(output, error);
  if (!fs::exists(status)) return;
  SHARDQ_CHECK(fs::is_directory(output, error), ExitCode::usage, "output {} exists and is no directory",
               output.string());
  SHARDQ_CHECK(fs::is_empty(output, error) && !error, ExitCode::usage,
               "output directory {} already holds something; choose another or empty it", output.string());
}

/// Creates a folder and its parents, each one durable in its parent.
void make_folders(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path at = folder; !at.empty() && !fs::exists(at, error); at = at.parent_path()) missing.push_back(at);
  fs::create_directories(folder, error);  // another rank may have made it meanwhile: no error then
  SHARDQ_CHECK(!error && fs::is_directory(folder), ExitCode::disk, "cannot create {}: {}", folder.string(),
               error ? error.message() : "a file of that name exists");
  for (const fs::path& made : missing) sync_folder(made.parent_path());
}

/// Names in a folder. A listing, unlike a question for one name, makes a network file system forget that a name was
/// absent a moment ago: other ranks wrote most shards from other hosts.
std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& item : fs::directory_iterator(folder)) names.insert(item.path().filename().string());
  return names;
}

struct Contents {
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t bytes = 0, parameters = 0;
};

/// Parameters of the model, not elements of the file: a packed matrix counts as the matrix it stands for, its scales as
/// nothing.
int64_t parameters_of(const SafetensorsFile& shard, const TensorEntry& entry) {
  static constexpr std::string_view kAids[] = {".weight_packed", ".weight_scale", ".weight_zero_point",
                                               ".weight_g_idx"};
  for (const std::string_view aid : kAids)
    if (entry.name.ends_with(aid)) return 0;
  if (!entry.name.ends_with(".weight_shape")) return element_count(entry.shape);
  int64_t count = 1;
  const auto raw = shard.bytes(entry);
  for (size_t at = 0; at + 8 <= raw.size(); at += 8) {
    int64_t dim;
    std::memcpy(&dim, raw.data() + at, 8);
    count *= dim;
  }
  return count;
}

void add_shard(const fs::path& path, Contents& contents) {
  const SafetensorsFile shard(path);
  for (const auto& [name, entry] : shard.entries()) {
    SHARDQ_CHECK(!contents.weight_map.contains(name), ExitCode::internal,
                 "tensor '{}' was written into two shards: {} and {}", name,
                 contents.weight_map[name].get<std::string>(), path.filename().string());
    contents.weight_map[name] = path.filename().string();
    contents.bytes += entry.bytes();
    contents.parameters += parameters_of(shard, entry);
  }
}

fs::path partial_of(const fs::path& output) {
  fs::path partial = output;
  partial += ".partial";
  return partial;
}

constexpr const char* kMarker = ".shardq-run";

/// The partial folder says whose it is. One without a mark is new, or holds what nobody vouches for.
void claim(const fs::path& partial, const std::string& run) {
  const fs::path marker = partial / kMarker;
  if (fs::exists(marker)) {
    SHARDQ_CHECK(read_text(marker) == run, ExitCode::usage,
                 "{} belongs to another run than the work directory: choose another output, or start anew with "
                 "--resume never",
                 partial.string());
    return;
  }
  for (const auto& item : fs::directory_iterator(partial))
    SHARDQ_CHECK(DurableFile::is_temporary(item.path()), ExitCode::usage,
                 "{} holds {}, but no mark of the run that the work directory is of: choose another output, or start "
                 "anew with --resume never",
                 partial.string(), item.path().filename().string());
  write_text_durably(marker, run);
}

}  // namespace

OutputWriter::OutputWriter(fs::path output, const std::string& run) : output_(without_trailing_slash(output)) {
  SHARDQ_CHECK(output_.has_filename() && output_.filename() != "." && output_.filename() != "..", ExitCode::usage,
               "output '{}' must be the name of a new directory", output.string());
  require_vacant(output_);
  partial_ = partial_of(output_);
  make_folders(partial_);
  if (!run.empty()) claim(partial_, run);
}

void OutputWriter::discard(const fs::path& output) {
  const fs::path partial = partial_of(without_trailing_slash(output));
  std::error_code error;
  fs::remove_all(partial, error);
  SHARDQ_CHECK(!error, ExitCode::disk, "cannot remove {}: {}", partial.string(), error.message());
  const fs::path folder = fs::absolute(partial).parent_path();
  if (fs::exists(folder, error)) sync_folder(folder);
}

void OutputWriter::remove_marker(const fs::path& output) {
  const fs::path place = without_trailing_slash(output);
  std::error_code ignored;
  if (fs::remove(place / kMarker, ignored)) sync_folder(place);  // or a loss of power would bring it back
}

std::string OutputWriter::shard_name(int64_t k, int64_t n) {
  SHARDQ_CHECK(1 <= k && k <= n, ExitCode::internal, "shard {} of {} does not exist", k, n);
  return n == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", k, n);
}

bool OutputWriter::has_shard(int64_t k, int64_t n) const {
  const fs::path path = partial_ / shard_name(k, n);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return false;
  try {
    const SafetensorsFile shard(path);
    return true;
  } catch (const Error&) {
    return false;  // damaged: it will be written anew
  }
}

int64_t OutputWriter::write_shard(int64_t k, int64_t n, std::vector<OutputTensor> tensors) {
  return write_safetensors(partial_ / shard_name(k, n), std::move(tensors));
}

bool OutputWriter::is_published(const fs::path& output) {
  const fs::path place = without_trailing_slash(output), partial = partial_of(place);
  std::error_code ignored;
  return fs::exists(place / "config.json", ignored) && !fs::exists(partial, ignored);
}

void OutputWriter::remove_leftovers(int64_t n) const {
  std::set<std::string> shards;
  for (int64_t k = 1; k <= n; ++k) shards.insert(shard_name(k, n));
  for (const auto& item : fs::directory_iterator(partial_)) {
    const std::string name = item.path().filename().string();
    const bool foreign_shard = name.ends_with(".safetensors") && !shards.contains(name);
    if (foreign_shard || DurableFile::is_temporary(item.path()) || (n == 1 && name == "model.safetensors.index.json"))
      fs::remove(item.path());
  }
}

void OutputWriter::publish(int64_t n, const std::string& config_text, const std::vector<fs::path>& files_to_copy,
                           const std::map<std::string, std::string>& texts) {
  Contents contents;
  const std::set<std::string> names = names_in(partial_);
  for (int64_t k = 1; k <= n; ++k) {
    const fs::path path = partial_ / shard_name(k, n);
    SHARDQ_CHECK(names.contains(shard_name(k, n)), ExitCode::disk, "cannot publish {}: shard {} is missing",
                 output_.string(), path.string());
    try {
      add_shard(path, contents);
    } catch (const Error& error) {
      if (error.code() != ExitCode::input) throw;
      fail(ExitCode::disk, "cannot publish {}: {}", output_.string(), error.what());
    }
  }
  require_vacant(output_);
  remove_leftovers(n);
  for (const fs::path& file : files_to_copy) {
    const std::string name = file.filename().string();
    if (name != "config.json" && !texts.contains(name)) copy_file_durably(file, partial_ / name);
  }
  for (const auto& [name, text] : texts) write_text_durably(partial_ / name, text);
  write_text_durably(partial_ / "config.json", config_text);
  if (n > 1) {
    const nlohmann::json index = {
        {"metadata", {{"total_parameters", contents.parameters}, {"total_size", contents.bytes}}},
        {"weight_map", std::move(contents.weight_map)}};
    write_text_durably(partial_ / "model.safetensors.index.json", index.dump(2, ' ', true) + "\n");
  }
  fault_point("publishing");
  // rename() replaces an empty directory by itself, in one step; a non-empty one it refuses.
  rename_durably(partial_, output_);
  remove_marker(output_);  // not before: a resumed run would not know its own folder
}

}  // namespace shardq
