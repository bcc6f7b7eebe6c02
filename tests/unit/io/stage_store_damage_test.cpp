// What a stage store does about damaged files, full disks and locks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <random>

#include "core/timer.hpp"
#include "io/stage_store.hpp"
#include "unit/io/stage_store_fixture.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;

class StageStoreDamage : public StageStoreFixture {
 protected:
  /// One stage of five blocks of rows (699, 699, 699, 699, 204) and a small array.
  void SetUp() override {
    StageStoreFixture::SetUp();
    StageStore store = open();
    std::vector<StageArray> arrays = one(sample_array("hidden", DType::f32, 0, 3000, 3000, {750}));
    arrays.push_back(sample_array("scales", DType::bf16, 0, 4, 4, {4}));
    store.put("s", std::move(arrays), "text");
    store.complete();
  }
  static StageArray hidden(int64_t begin, int64_t end) {
    return sample_array("hidden", DType::f32, begin, end - begin, 3000, {750});
  }
  static void flip_bit(const fs::path& path, int64_t at, int bit = 0) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ (1 << bit));
    file.seekp(at);
    file.put(byte);
  }
};

TEST_F(StageStoreDamage, AFlippedBitIsFoundInItsBlockOnly) {
  const std::string text = file_text(data_file("s"));
  const StageArray row = hidden(1000, 1001);
  const size_t at = text.find(std::string(reinterpret_cast<const char*>(row.data.data()), row.data.size()));
  ASSERT_NE(at, std::string::npos);
  flip_bit(data_file("s"), static_cast<int64_t>(at) + 17, 5);
  const StageStore store = open();  // sizes are right, so that the store opens
  expect_error([&] { store.read("s", "hidden", 0, 3000); }, ExitCode::disk,
               {data_file("s").string(), "array hidden", "rows 699 to 1398"});
  expect_error([&] { store.read("s", "hidden", 1397, 1398); }, ExitCode::disk, {"rows 699 to 1398"});
  EXPECT_EQ(difference(store, "s", hidden(0, 699)), "");
  EXPECT_EQ(difference(store, "s", hidden(1398, 3000)), "");
  EXPECT_EQ(difference(store, "s", sample_array("scales", DType::bf16, 0, 4, 4, {4})), "");
}

TEST_F(StageStoreDamage, NoFlippedBitAnywhereGivesWrongData) {
  const fs::path path = data_file("s");
  const StageArray scales = sample_array("scales", DType::bf16, 0, 4, 4, {4});
  // Everything outside of the large dataset: HDF5's own structures, attributes, the small array.
  const std::string text = file_text(path);
  const StageArray all = hidden(0, 3000);
  const size_t data_at = text.find(std::string(reinterpret_cast<const char*>(all.data.data()), all.data.size()));
  ASSERT_NE(data_at, std::string::npos);
  int found = 0, harmless = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (at == data_at) at += all.data.size();
    if (at >= text.size()) break;
    if (text[at] == 0 && at % 97 != 0) continue;  // much of the file is padding
    flip_bit(path, static_cast<int64_t>(at), static_cast<int>(at % 8));
    try {
      const StageStore store = open();
      EXPECT_EQ(difference(store, "s", scales), "") << "byte " << at;
      EXPECT_EQ(difference(store, "s", hidden(2990, 3000)), "") << "byte " << at;
      ++harmless;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::disk) << error.what();
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
      ++found;
    }
    flip_bit(path, static_cast<int64_t>(at), static_cast<int>(at % 8));
  }
  EXPECT_GT(found, 400);
  RecordProperty("found", found);
  RecordProperty("harmless", harmless);
  EXPECT_EQ(difference(open(), "s", scales), "");  // all flips were undone
}

TEST_F(StageStoreDamage, TruncatedAndMissingFilesAreNamedAtTheStart) {
  for (const std::string& name : file_names()) {
    const fs::path path = work_ / "stages" / name;
    const std::string text = file_text(path);
    put_file(path, text.substr(0, text.size() - 1));
    expect_error([&] { open(); }, ExitCode::disk,
                 {"stage s", path.string(), std::to_string(text.size()), std::to_string(text.size() - 1)});
    fs::remove(path);
    expect_error([&] { open(); }, ExitCode::disk, {"stage s", path.string(), "No such file"});
    put_file(path, text);
  }
  EXPECT_EQ(difference(open(), "s", hidden(0, 3000)), "");
}

TEST_F(StageStoreDamage, ADataFileOfAnotherStageWithTheSameNameAndSizeIsFound) {
  {
    StageStore store = open();
    std::vector<StageArray> arrays = one(sample_array("hidden", DType::f32, 0, 3000, 3000, {750}));
    arrays[0].data[0] ^= std::byte{1};
    arrays.push_back(sample_array("scales", DType::bf16, 0, 4, 4, {4}));
    store.put("t", std::move(arrays), "text");
    store.complete();
  }
  ASSERT_EQ(fs::file_size(data_file("s")), fs::file_size(data_file("t")));
  fs::copy_file(data_file("t"), data_file("s"), fs::copy_options::overwrite_existing);
  expect_error([&] { open().read("s", "hidden", 2999, 3000); }, ExitCode::disk,
               {data_file("s").string(), "array hidden"});
}

TEST_F(StageStoreDamage, EveryDamageOfTheManifestIsFound) {
  const fs::path path = work_ / "manifest.json";
  const std::string text = file_text(path);
  for (size_t bytes = 0; bytes + 1 < text.size(); bytes += 1 + bytes / 50) {  // the last byte is the end of line
    put_file(path, text.substr(0, bytes));
    expect_error([&] { open(); }, ExitCode::disk, {path.string(), "damaged"});
  }
  std::mt19937 random(1);
  for (size_t at = 0; at + 1 < text.size(); ++at) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ (1 << random() % 8));
    put_file(path, changed);
    try {
      const StageStore store = open();
      // Whitespace and the case of checksums aside, nothing may pass; what passes must mean the same.
      EXPECT_EQ(difference(store, "s", hidden(0, 1)), "") << at;
      EXPECT_TRUE(std::isspace(static_cast<unsigned char>(text[at]))) << at << " " << text[at] << " -> " << changed[at];
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
      EXPECT_TRUE(error.code() == ExitCode::disk || std::string(error.what()).find("version") != std::string::npos)
          << error.what();
    }
  }
  put_file(path, text);
  EXPECT_EQ(difference(open(), "s", hidden(0, 1)), "");
  put_file(path, "");
  EXPECT_TRUE(open(false).stages().empty());  // the way out that the user has
}

TEST_F(StageStoreDamage, ADamagedDescriptionIsFound) {
  const fs::path path = work_ / "stages" / "s.json";
  const std::string text = file_text(path);
  for (size_t at = 0; at < text.size(); at += 7) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ 2);
    put_file(path, changed);
    expect_error([&] { open().arrays("s"); }, ExitCode::disk, {path.string(), "damaged"});
  }
}

TEST_F(StageStoreDamage, ALaterFormatIsRefusedAsSuch) {
  const fs::path path = work_ / "manifest.json";
  std::string text = file_text(path);
  const std::string version = "\"version\":2";
  text.replace(text.find(version), version.size(), "\"version\":3");
  put_file(path, text);
  expect_error([&] { open(); }, ExitCode::usage, {path.string(), "a later", "version 3", "reads 2"});
  text.replace(text.find("\"version\":3"), version.size(), "\"version\":1");
  put_file(path, text);
  expect_error([&] { open(); }, ExitCode::usage, {path.string(), "an earlier", "version 1", "--resume never"});
}

/// Limits the size of files that this process writes, as a full disk would.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    former_handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &former_);
    rlimit limit = former_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &former_);
    signal(SIGXFSZ, former_handler_);
  }

 private:
  rlimit former_{};
  void (*former_handler_)(int) = nullptr;
};

TEST_F(StageStoreDamage, AFailedWriteIsReportedWithPathBytesAndReasonAndLeavesNothing) {
  StageStore store = open();
  const auto before = file_names();
  // At the first block, between blocks, at the end where HDF5 writes what it held back.
  for (rlim_t bytes : {rlim_t{1}, rlim_t{3000}, rlim_t{1} << 20, rlim_t{5} << 20, rlim_t{9000000}}) {
    const FileSizeLimit limit(bytes);
    store.put("full", one(hidden(0, 3000)), "");
    expect_error([&] { store.complete(); }, ExitCode::disk,
                 {"full.", ".rank0000.h5", "File too large", "9000000 bytes"});
    EXPECT_EQ(file_names(), before) << bytes;
    EXPECT_FALSE(store.has("full"));
  }
  store.put("full", one(hidden(0, 3000)), "");  // with space again
  store.complete();
  EXPECT_EQ(difference(store, "full", hidden(0, 3000)), "");
  EXPECT_EQ(difference(store, "s", hidden(0, 3000)), "");
}

TEST_F(StageStoreDamage, AFailureOfTheCommitIsThrownOnAllRanks) {
  fs::remove_all(work_);
  for (const char* point : {"stage_file_synced", "stage_file_written", "stage_described", "stage_manifest_written"}) {
    ThreadRanks ranks(2);
    const auto errors = ThreadRanks::run(2, [&](int rank) {
      StageStore store(work_, ranks.rank(rank), kFingerprint, true);
      if (rank == 0) arm_faults(std::string("throw@") + point + "=4", 0);
      ranks.rank(rank).gather("");
      store.put("s", one(sample_array("a", DType::i8, rank, 1, 2, {})), "");
      expect_error([&] { store.complete(); }, ExitCode::disk, {"rank ", point});
      EXPECT_FALSE(store.has("s"));
      ranks.rank(rank).gather("");
      arm_faults("", 0);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    // After the manifest was written, the stage counts, though the job was told otherwise; before, nothing of it may
    // stay.
    StageStore store = open();
    EXPECT_EQ(store.has("s"), std::string(point) == "stage_manifest_written");
    EXPECT_EQ(file_names().size(), store.has("s") ? 4u : 0u) << point;
  }
}

// ---- locks ---------------------------------------------------------------------------------------

/// A child process that opens the store and waits to be killed.
pid_t start_holder(const fs::path& work, const fs::path& ready) {
  const pid_t child = fork();
  if (child == 0) {
    const StageStore store(work, {}, kFingerprint, true);
    put_file(ready, "");
    while (true) pause();
  }
  while (!fs::exists(ready)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return child;
}

TEST_F(StageStoreDamage, ASecondJobIsRefusedUntilTheFirstIsDead) {
  setenv("SLURM_JOB_ID", "4711", 1);
  const pid_t holder = start_holder(work_, directory_ / "ready");
  unsetenv("SLURM_JOB_ID");
  expect_error([&] { open(); }, ExitCode::usage, {work_.string(), "in use", std::to_string(holder), "job 4711"});
  expect_error([&] { open(false); }, ExitCode::usage, {"in use"});  // and nothing is discarded
  kill(holder, SIGSTOP);                                            // frozen is not dead
  expect_error([&] { open(); }, ExitCode::usage, {"in use"});
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  Stopwatch watch;
  EXPECT_EQ(difference(open(), "s", hidden(0, 10)), "");
  EXPECT_LT(watch.seconds(), 2);  // on one host nothing needs to be waited for
}

TEST_F(StageStoreDamage, TheLockIsFreeAgainAfterTheStoreIsGone) {
  { const StageStore store = open(); }
  EXPECT_EQ(file_text(work_ / "lock"), "");
  const StageStore store = open();
  EXPECT_NE(file_text(work_ / "lock").find("\"pid\":" + std::to_string(getpid())), std::string::npos);
}

TEST_F(StageStoreDamage, AFailedOpeningReleasesTheLockAndIsThrownOnAllRanks) {
  ThreadRanks ranks(2);
  const auto errors = ThreadRanks::run(2, [&](int rank) {
    StageStore(work_, ranks.rank(rank), {{"model", "other"}}, true);
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("rank 0: cannot resume"), std::string::npos) << error;
  EXPECT_NO_THROW(open());
}

}  // namespace
}  // namespace shardq
