#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/stage_store.hpp"

namespace shardq {

/// gather() over threads that stand for ranks.
class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : size_(size), strings_(size) {}

  StageStore::Ranks rank(int rank) {
    return {rank, size_, [this, rank](const std::string& mine) { return gather(rank, mine); }};
  }
  /// Runs body(rank) in one thread a rank; the errors, empty where there was none.
  static std::vector<std::string> run(int size, const std::function<void(int)>& body) {
    std::vector<std::string> errors(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

 private:
  std::vector<std::string> gather(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    strings_[rank] = mine;
    const int64_t round = round_;
    if (++arrived_ == size_) {
      gathered_ = strings_;
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
    return gathered_;
  }

  int size_;
  std::vector<std::string> strings_, gathered_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int arrived_ = 0;
  int64_t round_ = 0;
};

inline const std::map<std::string, std::string> kFingerprint = {{"model", "abc"}, {"recipe", "def"}, {"tokens", "123"}};

/// Rows [first, first + rows) of an array of `total` whose every byte follows from its name and position.
inline StageArray sample_array(const std::string& name, DType dtype, int64_t first, int64_t rows, int64_t total,
                               Shape row_shape) {
  StageArray array{name, dtype, {rows}, first, total, {}};
  array.shape.insert(array.shape.end(), row_shape.begin(), row_shape.end());
  const int64_t row_bytes = element_count(row_shape) * size_of(dtype);
  array.data.resize(rows * row_bytes);
  const uint64_t seed = std::hash<std::string>()(name);
  for (int64_t i = 0; i < static_cast<int64_t>(array.data.size()); ++i) {
    uint64_t mixed = (first * row_bytes + i + seed) * 0x9e3779b97f4a7c15ULL;
    mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9ULL;  // without this step neighbourhoods of bytes recur
    array.data[i] = static_cast<std::byte>(mixed >> 56);
  }
  return array;
}

/// Empty when the store gives these rows back, else what differs.
inline std::string difference(const StageStore& store, const std::string& stage, const StageArray& expected) {
  const StageArray found = store.read(stage, expected.name, expected.first_row, expected.first_row + expected.shape[0]);
  std::string text;
  if (found.name != expected.name) text += " name " + found.name;
  if (found.dtype != expected.dtype) text += " dtype";
  if (found.shape != expected.shape) text += " shape " + to_string(found.shape);
  if (found.first_row != expected.first_row || found.total_rows != expected.total_rows) text += " rows";
  if (found.data != expected.data) text += " data";
  return text.empty() ? "" : stage + "/" + expected.name + ":" + text;
}

inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}
inline void put_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Expects an Error of that code whose message holds every one of the texts.
inline void expect_error(const std::function<void()>& body, ExitCode code, const std::vector<std::string>& texts) {
  try {
    body();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    for (const std::string& text : texts)
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << "\"" << text << "\" is not in: " << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
}

/// A new folder, in memory where there is such a file system: these tests sync hundreds of files.
inline std::filesystem::path make_test_folder() {
  const bool in_memory = ::access("/dev/shm", W_OK) == 0;
  std::string name = (in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/shardq_test_XXXXXX";
  return ::mkdtemp(name.data());
}

/// A work directory of its own for each test.
class StageStoreFixture : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = make_test_folder();
    work_ = directory_ / "work";
  }
  void TearDown() override {
    arm_faults("", 0);
    std::filesystem::remove_all(directory_);
  }
  StageStore open(bool resume = true) { return StageStore(work_, {}, kFingerprint, resume); }
  std::vector<std::string> file_names() const {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(work_ / "stages"))
      names.push_back(file.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  /// The only data file of a stage that one rank wrote.
  std::filesystem::path data_file(const std::string& stage) const {
    for (const std::string& name : file_names())
      if (name.starts_with(stage + ".") && name.find(".rank0000.h5") != std::string::npos)
        return work_ / "stages" / name;
    return {};
  }
  static std::vector<StageArray> one(StageArray array) {
    std::vector<StageArray> arrays;
    arrays.push_back(std::move(array));
    return arrays;
  }

  std::filesystem::path directory_, work_;
};

}  // namespace shardq
