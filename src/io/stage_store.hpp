#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/view.hpp"

namespace shardq {

/// One dataset, or this rank's rows of it: rows [first_row, first_row + shape[0]) of a global array of total_rows rows.
struct StageArray {
  std::string name;          ///< "hidden", "codes/model.layers.0.self_attn.q_proj", ...
  DType dtype = DType::f32;  ///< i8, i32, i64, u8, f32, f64, bf16, f16
  Shape shape;               ///< shape[0] rows at hand
  int64_t first_row = 0, total_rows = 0;
  std::vector<std::byte> data;
};

/// What one stage holds, without the data.
struct StageInfo {
  std::string name;  ///< "layer0003.down"
  std::string text;  ///< free JSON text: verdicts, metrics
  int writers = 0;
};

/// Durable stage outputs of the sequential pipeline. One serial HDF5 file per rank and stage, one virtual dataset file
/// per stage that presents them as one (h5py reads it), and a manifest written last that alone says which stages count.
/// Any number of ranks may read what any other number wrote.
///
/// Durability order: per-rank files (temp, write, flush, close, fsync, rename, fsync of folder) -> all ranks done ->
/// virtual file -> manifest (same steps). Layout, contiguous; every array carries a checksum that is verified when read
/// back. bf16 is HDF5's custom 16-bit float type (memory type == file type). Ranks agree through `gather` alone, so
/// that io knows no communicator: whatever fails on one rank is thrown on all of them, and no rank waits for another's
/// file to appear. Files of one opening carry its session in their names, so that ranks of a dead job that are still
/// writing harm nobody.
class StageStore {
 public:
  struct Ranks {
    int rank = 0, size = 1;
    /// Collective: every rank's string, in rank order (all_gather_strings of the communicator).
    std::function<std::vector<std::string>(const std::string&)> gather = [](const std::string& mine) {
      return std::vector{mine};
    };
  };
  /// Collective. resume = false discards whatever stages the directory held.
  /// fingerprint: name -> value ("model", "tokens", "recipe", "version", ...); compared with the manifest's on open.
  /// discard: called on rank 0 before a run is begun anew there, once the directory is locked and before the manifest
  /// says so: removes what the former run left elsewhere.
  /// Errors: Error(usage) when the work directory is locked by a live job (host, pid, job id named; a dead owner's lock
  /// is taken over), Error(usage) naming each changed fingerprint entry, when resuming.
  StageStore(std::filesystem::path directory, Ranks ranks, std::map<std::string, std::string> fingerprint, bool resume,
             const std::function<void()>& discard = {});
  ~StageStore();

  /// Names this run, from its beginning through all restarts.
  std::string run() const;
  /// Stages in the manifest, oldest first. Names are unique.
  std::vector<StageInfo> stages() const;
  bool has(const std::string& stage) const;
  /// Starts writing this rank's part in a background thread (arrays are moved in). At most one stage is in flight:
  /// completes the former first. Collective. text: only rank 0's counts.
  void put(const std::string& stage, std::vector<StageArray> arrays, std::string text);
  /// The same, with the arrays made by `make` in the background thread (packing costs time as well).
  void put(const std::string& stage, std::function<std::vector<StageArray>()> make, std::string text);
  /// True while this rank's part of the stage in flight is still being written.
  bool writing() const;
  /// True from put() until the stage is committed; the same on every rank.
  bool in_flight() const;
  /// Collective: waits for the stage in flight, if any, and commits it in the manifest. Throws on all ranks, naming the
  /// failing one: Error(disk) for I/O, Error(internal) when the ranks' rows of an array do not fit together.
  void complete();
  /// Collective: removes a stage (manifest first, then its files). Used after a newer one is durable.
  void remove(const std::vector<std::string>& stages);
  /// Rows [begin, end) of an array, whoever wrote them; checksums verified. Error(disk) naming file and array on
  /// mismatch.
  StageArray read(const std::string& stage, const std::string& array, int64_t begin, int64_t end) const;
  /// Names of arrays of a stage and their total rows.
  std::map<std::string, int64_t> arrays(const std::string& stage) const;
  std::string text(const std::string& stage) const;
  /// Collective: marks the run finished in the manifest (with a free text: the output path). Requires: no stage in
  /// flight.
  void finish(const std::string& text);
  std::optional<std::string> finished() const;
  /// Bytes written so far by this rank.
  int64_t bytes_written() const;

  /// Reads a manifest's fingerprint without locking (for `inspect` and `plan`); nothing where there is no manifest.
  static std::optional<std::map<std::string, std::string>> peek_fingerprint(const std::filesystem::path& directory);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardq
