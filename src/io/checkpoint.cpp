#include "io/checkpoint.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "core/error.hpp"
#include "io/files.hpp"
#include "io/safetensors_header.hpp"

namespace shardq {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

/// tensor name -> shard file name. Refuses duplicate names and shard names that would leave the directory.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
  const std::string text = read_text(path);
  std::set<std::string> seen;
  std::string top;
  const auto on_event = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event != nlohmann::json::parse_event_t::key) return true;
    const auto& key = value.get_ref<const std::string&>();
    if (depth == 1) top = key;
    if (depth == 2 && top == "weight_map")
      SHARDQ_CHECK(seen.insert(key).second, ExitCode::input, "{}: duplicate key '{}' in weight_map", path.string(),
                   printable(key));
    return true;
  };
  nlohmann::json index;
  try {
    index = nlohmann::json::parse(text, on_event);
  } catch (const nlohmann::json::parse_error& error) {
    fail(ExitCode::input, "{}: not valid JSON (byte {})", path.string(), error.byte);
  }
  SHARDQ_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), ExitCode::input,
               "{}: expected an object with a weight_map", path.string());
  std::map<std::string, std::string> where;
  for (const auto& [name, file] : index["weight_map"].items()) {
    SHARDQ_CHECK(file.is_string(), ExitCode::input, "{}: weight_map of '{}' must be a file name", path.string(),
                 printable(name));
    const auto& shard = file.get_ref<const std::string&>();
    SHARDQ_CHECK(!shard.empty() && shard.find('/') == std::string::npos && shard.find('\0') == std::string::npos &&
                     shard != "." && shard != "..",
                 ExitCode::input, "{}: weight_map of '{}' must be a file name of the same directory, found '{}'",
                 path.string(), printable(name), printable(shard));
    where.emplace(name, shard);
  }
  SHARDQ_CHECK(!where.empty(), ExitCode::input, "{}: weight_map names no tensor", path.string());
  return where;
}

bool is_weight_file(const std::string& name) {
  static constexpr std::array<std::string_view, 12> kEndings{".safetensors", ".safetensors.index.json",
                                                             ".bin",         ".bin.index.json",
                                                             ".pt",          ".pth",
                                                             ".ckpt",        ".gguf",
                                                             ".ggml",        ".h5",
                                                             ".msgpack",     ".onnx"};
  return std::any_of(kEndings.begin(), kEndings.end(), [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

Checkpoint::Checkpoint(std::filesystem::path directory) : directory_(std::move(directory)) {
  std::error_code ignored;
  SHARDQ_CHECK(std::filesystem::is_directory(directory_, ignored), ExitCode::input,
               "model directory {} does not exist or is no directory", directory_.string());
  SHARDQ_CHECK(std::filesystem::is_regular_file(directory_ / "config.json", ignored), ExitCode::input,
               "{} holds no config.json", directory_.string());
  config_text_ = read_text(directory_ / "config.json");

  std::map<std::string, std::string> index;
  std::set<std::string> shard_names;
  if (std::filesystem::exists(directory_ / kSingleName, ignored)) {  // same precedence as transformers
    shard_names.insert(kSingleName);
  } else {
    SHARDQ_CHECK(std::filesystem::exists(directory_ / kIndexName, ignored), ExitCode::input,
                 "{} holds neither {} nor {}", directory_.string(), kSingleName, kIndexName);
    index = read_index(directory_ / kIndexName);
    for (const auto& [name, shard] : index) shard_names.insert(shard);
  }
  open_shards(shard_names);
  check_index(index);
}

void Checkpoint::open_shards(const std::set<std::string>& shard_names) {
  std::vector<std::string> missing;
  std::error_code ignored;
  for (const std::string& name : shard_names)
    if (!std::filesystem::exists(directory_ / name, ignored)) missing.push_back(name);
  SHARDQ_CHECK(missing.empty(), ExitCode::input, "{}: {} of {} weight shards are missing, the first is {}",
               directory_.string(), missing.size(), shard_names.size(), missing.front());
  for (const std::string& name : shard_names) {
    shards_.push_back(std::make_shared<SafetensorsFile>(directory_ / name));
    for (const auto& [tensor, entry] : shards_.back()->entries()) {
      const auto [former, fresh] = where_.emplace(tensor, std::pair(shards_.back().get(), &entry));
      SHARDQ_CHECK(fresh, ExitCode::input, "tensor '{}' is in two shards: {} and {}", printable(tensor),
                   former->second.first->path().string(), shards_.back()->path().string());
    }
  }
}

/// A tensor of a shard that the index does not mention is no error (transformers loads it too); the other way round is.
void Checkpoint::check_index(const std::map<std::string, std::string>& index) const {
  for (const auto& [name, shard] : index) {
    const auto found = where_.find(name);
    SHARDQ_CHECK(found != where_.end(), ExitCode::input, "{} names tensor '{}' in {}, which lacks it",
                 (directory_ / kIndexName).string(), printable(name), shard);
    const std::string holder = found->second.first->path().filename().string();
    SHARDQ_CHECK(holder == shard, ExitCode::input, "{} names tensor '{}' in {}, but it is in {}",
                 (directory_ / kIndexName).string(), printable(name), shard, holder);
  }
}

const std::pair<SafetensorsFile*, const TensorEntry*>& Checkpoint::place(const std::string& name) const {
  const auto found = where_.find(name);
  SHARDQ_CHECK(found != where_.end(), ExitCode::input, "{} has no tensor '{}'", directory_.string(), name);
  return found->second;
}

const TensorEntry& Checkpoint::entry(const std::string& name) const {
  return *place(name).second;
}

std::span<const std::byte> Checkpoint::bytes(const std::string& name) const {
  const auto& [file, entry] = place(name);
  return file->bytes(*entry);
}

void Checkpoint::read(const std::string& name, int64_t offset, std::span<std::byte> target) const {
  const auto& [file, entry] = place(name);
  file->read(*entry, offset, target);
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(where_.size());
  for (const auto& [name, at] : where_) names.push_back(name);
  return names;
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, at] : where_) bytes += at.second->bytes();
  return bytes;
}

std::vector<std::filesystem::path> Checkpoint::other_files() const {
  std::vector<std::filesystem::path> files;
  for (const auto& item : std::filesystem::directory_iterator(directory_))
    if (item.is_regular_file() && !is_weight_file(item.path().filename().string())) files.push_back(item.path());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace shardq
