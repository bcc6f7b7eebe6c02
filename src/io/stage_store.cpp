#include "io/stage_store.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <random>
#include <set>
#include <thread>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/durable_file.hpp"
#include "io/files.hpp"
#include "io/stage_store_manifest.hpp"
#include "io/stage_store_reader.hpp"
#include "io/stage_store_writer.hpp"
#include "io/work_lock.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;

constexpr const char* kManifestName = "manifest.json";
constexpr const char* kStagesName = "stages";

/// A name that no other opening of this directory uses.
std::string make_session() {
  std::random_device random;
  return fmt::format("{:08x}", random());
}

std::string read_disk_text(const fs::path& path) {
  try {
    return read_text(path);
  } catch (const Error& error) {
    throw Error(ExitCode::disk, error.what());
  }
}

/// Creates a folder and those above it; what was created survives power loss.
void create_folder_durably(const fs::path& folder) {
  std::vector<fs::path> missing;
  for (fs::path at = folder; !at.empty() && !fs::exists(at); at = at.parent_path()) missing.push_back(at);
  std::error_code error;
  fs::create_directories(folder, error);
  SHARDQ_CHECK(!error && fs::is_directory(folder), ExitCode::disk, "cannot create folder {}: {}", folder.string(),
               error ? error.message() : "something else has that name");
  for (const fs::path& at : missing) sync_folder(at.parent_path());
}

bool is_stage_name(const std::string& name) {
  return !name.empty() && name[0] != '.' && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

/// Every file of a stage.
std::vector<StageFile> files_of(const StageEntry& stage) {
  std::vector<StageFile> files = stage.files;
  files.push_back(stage.description);
  return files;
}

/// The write of one stage's part by this rank, in its own thread.
struct Flight {
  std::string stage, text;
  std::atomic<bool> cancelled{false}, written{false};
  WrittenPart part;
  std::exception_ptr error;
  std::thread thread;

  ~Flight() {
    cancelled = true;
    if (thread.joinable()) thread.join();
  }
};
}  // namespace

struct StageStore::State {
  fs::path directory, folder;  // folder: of the stage files
  Ranks ranks;
  Manifest manifest;
  std::string session;
  std::unique_ptr<WorkLock> lock;  // on rank 0
  std::unique_ptr<Flight> flight;
  std::atomic<int64_t> bytes_written{0};
  mutable std::map<std::string, StageDescription> descriptions;  // of stages that were asked for
  mutable std::unique_ptr<StageFileReader> reader;               // of the file read last

  bool is_root() const { return ranks.rank == 0; }

  /// Collective: runs `body` on every rank and returns every rank's result; when one fails, all throw the error of the
  /// lowest failing rank.
  template <class Body>
  std::vector<std::string> exchange(Body body) const {
    std::string mine;
    try {
      mine = "+" + body();
    } catch (const Error& error) {
      mine = fmt::format("-{} {}", static_cast<int>(error.code()), error.what());
    } catch (const fs::filesystem_error& error) {
      mine = fmt::format("-{} {}", static_cast<int>(ExitCode::disk), error.what());
    } catch (const std::exception& error) {
      mine = fmt::format("-{} {}", static_cast<int>(ExitCode::internal), error.what());
    }
    std::vector<std::string> all = ranks.gather(mine);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      std::string& text = all[rank];
      if (text.starts_with('+')) {
        text.erase(0, 1);
        continue;
      }
      const size_t blank = text.find(' ');
      const std::string message = text.substr(blank + 1);
      throw Error(static_cast<ExitCode>(std::atoi(text.c_str() + 1)),
                  all.size() > 1 ? fmt::format("rank {}: {}", rank, message) : message);
    }
    return all;
  }

  /// Collective: rank 0 makes what `make_next` gives the manifest, durably; then all ranks have it in memory.
  template <class MakeNext>
  void commit(MakeNext make_next) {
    const std::vector<std::string> all = exchange([&] {
      if (!is_root()) return std::string();
      const std::string text = to_text(make_next());
      write_text_durably(directory / kManifestName, text);
      fault_point("stage_manifest_written");
      return text;
    });
    manifest = manifest_from_text(all[0], directory / kManifestName);
  }

  const StageEntry& entry(const std::string& stage) const {
    for (const StageEntry& candidate : manifest.stages)
      if (candidate.name == stage) return candidate;
    fail(ExitCode::internal, "{} holds no stage {}", directory.string(), stage);
  }

  const StageDescription& description(const std::string& stage) const {
    auto known = descriptions.find(stage);
    if (known == descriptions.end()) {
      const StageEntry& at = entry(stage);
      const fs::path path = folder / at.description.name;
      const std::string text = read_disk_text(path);
      SHARDQ_CHECK(checksum(text.data(), static_cast<int64_t>(text.size())) == at.description_checksum, ExitCode::disk,
                   "{} is damaged: it is not the one that the manifest names ({} bytes expected, {} found)",
                   path.string(), at.description.bytes, text.size());
      known = descriptions.emplace(stage, stage_description_from_text(text, path)).first;
    }
    return known->second;
  }

  StageFileReader& reader_of(const StageFile& file) const {
    const fs::path path = folder / file.name;
    if (!reader || reader->path() != path) {
      reader.reset();
      reader = std::make_unique<StageFileReader>(path, file.bytes);
    }
    return *reader;
  }

  void open_on_root(const std::map<std::string, std::string>& fingerprint, bool resume,
                    const std::function<void()>& discard);
  void check_files() const;
  void remove_orphans() const;
  void remove_files(const StageEntry& stage) const;
  StageEntry write_description(const std::string& stage, const StageDescription& description) const;
};

void StageStore::State::open_on_root(const std::map<std::string, std::string>& fingerprint, bool resume,
                                     const std::function<void()>& discard) {
  create_folder_durably(directory);
  lock = std::make_unique<WorkLock>(directory);
  const fs::path manifest_path = directory / kManifestName;
  const bool known = fs::exists(manifest_path);
  // Without a manifest nothing in that folder is ours, and it is about to be swept.
  SHARDQ_CHECK(known || !fs::exists(folder) || fs::is_empty(folder), ExitCode::usage,
               "work directory {} has a folder {} that shardq did not write: choose another directory",
               directory.string(), kStagesName);
  if (known && resume) {
    manifest = manifest_from_text(read_disk_text(manifest_path), manifest_path);
    const std::string changes = fingerprint_changes(manifest.fingerprint, fingerprint);
    SHARDQ_CHECK(changes.empty(), ExitCode::usage, "cannot resume from {}: changed since it was begun: {}",
                 directory.string(), changes);
    check_files();
  }
  manifest.fingerprint = fingerprint;
  if (!known || !resume) {
    if (discard) discard();
    manifest.run = make_session();
    write_text_durably(manifest_path, to_text(manifest));
  }
  create_folder_durably(folder);
  remove_orphans();
}

/// Every file that the manifest names is there, in its size: a loss shows at the start, not in the middle of a resumed
/// run.
void StageStore::State::check_files() const {
  for (const StageEntry& stage : manifest.stages)
    for (const StageFile& file : files_of(stage)) {
      std::error_code error;
      const auto bytes = fs::file_size(folder / file.name, error);
      SHARDQ_CHECK(!error && static_cast<int64_t>(bytes) == file.bytes, ExitCode::disk,
                   "stage {}: {}: expected {} bytes, found {}", stage.name, (folder / file.name).string(), file.bytes,
                   error ? error.message() : std::to_string(bytes));
    }
}

void StageStore::State::remove_orphans() const {
  std::set<std::string> named;
  for (const StageEntry& stage : manifest.stages)
    for (const StageFile& file : files_of(stage)) named.insert(file.name);
  std::error_code ignored;  // an orphan that stays does no harm
  for (const fs::directory_entry& file : fs::directory_iterator(folder))
    if (file.is_regular_file() && !named.contains(file.path().filename().string())) fs::remove(file.path(), ignored);
  fs::remove(DurableFile::temporary_name(directory / kManifestName), ignored);
}

void StageStore::State::remove_files(const StageEntry& stage) const {
  std::error_code ignored;  // what stays is an orphan of the next opening
  for (const StageFile& file : files_of(stage)) fs::remove(folder / file.name, ignored);
}

StageEntry StageStore::State::write_description(const std::string& stage, const StageDescription& description) const {
  StageEntry entry;
  entry.name = stage;
  entry.writers = ranks.size;
  entry.files = description.files;
  entry.files.push_back(write_virtual_file(folder / (stage + ".h5"), description));
  const std::string text = to_text(description);
  entry.description = {stage + ".json", static_cast<int64_t>(text.size())};
  entry.description_checksum = checksum(text.data(), static_cast<int64_t>(text.size()));
  write_text_durably(folder / entry.description.name, text);  // syncs the folder for the virtual file too
  fault_point("stage_described");
  return entry;
}

StageStore::StageStore(fs::path directory, Ranks ranks, std::map<std::string, std::string> fingerprint, bool resume,
                       const std::function<void()>& discard)
    : state_(std::make_unique<State>()) {
  state_->directory = fs::absolute(directory).lexically_normal();
  state_->folder = state_->directory / kStagesName;
  state_->ranks = std::move(ranks);
  // Rank 0 sends the session's name and the manifest: no rank depends on what its node has cached of a shared file
  // system.
  constexpr size_t kSessionLength = 8;
  const std::vector<std::string> all = state_->exchange([&] {
    if (!state_->is_root()) return std::string();
    state_->open_on_root(fingerprint, resume, discard);
    return make_session() + to_text(state_->manifest);
  });
  state_->session = all[0].substr(0, kSessionLength);
  state_->manifest = manifest_from_text(all[0].substr(kSessionLength), state_->directory / kManifestName);
}

StageStore::~StageStore() = default;

std::string StageStore::run() const {
  return state_->manifest.run;
}

std::vector<StageInfo> StageStore::stages() const {
  std::vector<StageInfo> list;
  for (const StageEntry& stage : state_->manifest.stages)
    list.push_back({stage.name, state_->description(stage.name).text, stage.writers});
  return list;
}

bool StageStore::has(const std::string& stage) const {
  return std::any_of(state_->manifest.stages.begin(), state_->manifest.stages.end(),
                     [&](const StageEntry& at) { return at.name == stage; });
}

void StageStore::put(const std::string& stage, std::vector<StageArray> arrays, std::string text) {
  // shared: std::function must be copyable, and arrays must not be copied.
  auto held = std::make_shared<std::vector<StageArray>>(std::move(arrays));
  put(
      stage, [held] { return std::move(*held); }, std::move(text));
}

bool StageStore::in_flight() const {
  return state_->flight != nullptr;
}

bool StageStore::writing() const {
  return state_->flight && !state_->flight->written;
}

void StageStore::put(const std::string& stage, std::function<std::vector<StageArray>()> make, std::string text) {
  complete();
  SHARDQ_CHECK(is_stage_name(stage), ExitCode::internal, "\"{}\" is no stage name: letters, digits, '.', '_', '-'",
               stage);
  SHARDQ_CHECK(!has(stage), ExitCode::internal, "stage {} is there already", stage);
  auto flight = std::make_unique<Flight>();
  flight->stage = stage;
  flight->text = std::move(text);
  const fs::path path = state_->folder / fmt::format("{}.{}.rank{:04}.h5", stage, state_->session, state_->ranks.rank);
  flight->thread = std::thread([this, path, at = flight.get(), make = std::move(make)]() mutable {
    try {
      at->part = write_stage_file(path, make(), state_->bytes_written, at->cancelled);
    } catch (...) {
      at->error = std::current_exception();
    }
    make = nullptr;  // what it holds is not needed while the stage waits to be committed
    at->written = true;
  });
  state_->flight = std::move(flight);
}

void StageStore::complete() {
  if (!state_->flight) return;
  const std::unique_ptr<Flight> flight = std::move(state_->flight);
  const std::vector<std::string> all = state_->exchange([&] {
    flight->thread.join();
    if (flight->error) std::rethrow_exception(flight->error);
    return to_text(flight->part);
  });
  state_->commit([&] {
    std::vector<WrittenPart> parts;
    for (const std::string& text : all) parts.push_back(written_part_from_text(text));
    Manifest next = state_->manifest;
    next.stages.push_back(state_->write_description(flight->stage, describe_stage(flight->stage, parts, flight->text)));
    return next;
  });
  fault_point("stage_committed");
}

void StageStore::remove(const std::vector<std::string>& stages) {
  std::vector<StageEntry> gone;
  for (const std::string& stage : stages) gone.push_back(state_->entry(stage));
  state_->reader.reset();
  state_->commit([&] {
    Manifest next = state_->manifest;
    std::erase_if(next.stages, [&](const StageEntry& at) {
      return std::find(stages.begin(), stages.end(), at.name) != stages.end();
    });
    return next;
  });
  fault_point("stage_removed");
  for (const StageEntry& stage : gone) {
    state_->descriptions.erase(stage.name);
    if (state_->is_root()) state_->remove_files(stage);
  }
}

StageArray StageStore::read(const std::string& stage, const std::string& array, int64_t begin, int64_t end) const {
  const StageDescription& description = state_->description(stage);
  const auto at = description.arrays.find(array);
  SHARDQ_CHECK(at != description.arrays.end(), ExitCode::internal, "stage {} holds no array {}", stage, array);
  const ArrayDescription& known = at->second;
  SHARDQ_CHECK(0 <= begin && begin <= end && end <= known.total_rows, ExitCode::internal,
               "stage {}, array {}: rows {} to {} of {}", stage, array, begin, end, known.total_rows);
  StageArray result{array, known.dtype, {end - begin}, begin, known.total_rows, {}};
  result.shape.insert(result.shape.end(), known.row_shape.begin(), known.row_shape.end());
  const int64_t row_bytes = element_count(known.row_shape) * size_of(known.dtype);
  result.data.resize(static_cast<size_t>((end - begin) * row_bytes));
  for (const ArrayPart& part : known.parts) {
    const Range rows = {std::max(begin, part.begin), std::min(end, part.end)};
    if (rows.size() <= 0) continue;
    state_->reader_of(description.files[part.file])
        .read(array, known, part, {rows.begin - part.begin, rows.end - part.begin},
              result.data.data() + (rows.begin - begin) * row_bytes);
  }
  return result;
}

std::map<std::string, int64_t> StageStore::arrays(const std::string& stage) const {
  std::map<std::string, int64_t> rows;
  for (const auto& [name, array] : state_->description(stage).arrays) rows[name] = array.total_rows;
  return rows;
}

std::string StageStore::text(const std::string& stage) const {
  return state_->description(stage).text;
}

void StageStore::finish(const std::string& text) {
  SHARDQ_CHECK(!state_->flight, ExitCode::internal, "the run cannot be finished while a stage is in flight");
  state_->commit([&] {
    Manifest next = state_->manifest;
    next.finished = text;
    return next;
  });
}

std::optional<std::string> StageStore::finished() const {
  return state_->manifest.finished;
}

int64_t StageStore::bytes_written() const {
  return state_->bytes_written;
}

std::optional<std::map<std::string, std::string>> StageStore::peek_fingerprint(const fs::path& directory) {
  const fs::path path = directory / kManifestName;
  if (!fs::exists(path)) return std::nullopt;
  return manifest_from_text(read_disk_text(path), path).fingerprint;
}

}  // namespace shardq
