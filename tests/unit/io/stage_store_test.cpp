#include "io/stage_store.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>

#include "core/error.hpp"
#include "core/fault_point.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;

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

const std::map<std::string, std::string> kFingerprint = {{"model", "abc"}, {"recipe", "def"}, {"tokens", "123"}};

/// Rows [first, first + rows) of an array whose every byte follows from name and position.
StageArray sample_array(const std::string& name, DType dtype, int64_t first, int64_t rows, int64_t total,
                        Shape row_shape) {
  StageArray array{name, dtype, {rows}, first, total, {}};
  array.shape.insert(array.shape.end(), row_shape.begin(), row_shape.end());
  const int64_t row_bytes = element_count(row_shape) * size_of(dtype);
  array.data.resize(rows * row_bytes);
  const uint64_t seed = std::hash<std::string>()(name);
  for (int64_t i = 0; i < static_cast<int64_t>(array.data.size()); ++i) {
    uint64_t x = (first * row_bytes + i + seed) * 0x9e3779b97f4a7c15ULL;
    array.data[i] = static_cast<std::byte>(x >> 56);
  }
  return array;
}

class StageStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "stage_store_XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    work_ = directory_ / "work";
  }
  void TearDown() override {
    arm_faults("", 0);
    fs::remove_all(directory_);
  }
  StageStore open(bool resume = true) { return StageStore(work_, {}, kFingerprint, resume); }

  fs::path directory_, work_;
};

void expect_rows(const StageStore& store, const std::string& stage, const StageArray& expected) {
  const StageArray found = store.read(stage, expected.name, expected.first_row, expected.first_row + expected.shape[0]);
  EXPECT_EQ(found.dtype, expected.dtype);
  EXPECT_EQ(found.shape, expected.shape);
  EXPECT_EQ(found.first_row, expected.first_row);
  EXPECT_EQ(found.total_rows, expected.total_rows);
  EXPECT_TRUE(found.data == expected.data) << stage << " " << expected.name;
}

TEST_F(StageStoreTest, WritesAndReadsBackEveryType) {
  const std::vector<DType> dtypes = {DType::i8,  DType::u8,  DType::i16, DType::u16, DType::i32,  DType::u32,
                                     DType::i64, DType::u64, DType::f32, DType::f64, DType::bf16, DType::f16};
  {
    StageStore store = open();
    std::vector<StageArray> arrays;
    for (DType dtype : dtypes) arrays.push_back(sample_array(std::string(torch_name(dtype)), dtype, 0, 7, 7, {5, 3}));
    store.put("layer0000.attention", std::move(arrays), R"({"verdict":"ok"})");
    EXPECT_FALSE(store.has("layer0000.attention"));
    store.complete();
    EXPECT_TRUE(store.has("layer0000.attention"));
  }
  const StageStore store = open();
  ASSERT_EQ(store.stages().size(), 1u);
  EXPECT_EQ(store.stages()[0].name, "layer0000.attention");
  EXPECT_EQ(store.stages()[0].writers, 1);
  EXPECT_EQ(store.text("layer0000.attention"), R"({"verdict":"ok"})");
  EXPECT_EQ(store.arrays("layer0000.attention").size(), dtypes.size());
  for (DType dtype : dtypes)
    for (auto [begin, end] : {std::pair{0, 7}, {2, 5}, {6, 7}, {3, 3}})
      expect_rows(store, "layer0000.attention",
                  sample_array(std::string(torch_name(dtype)), dtype, begin, end - begin, 7, {5, 3}));
}

}  // namespace
}  // namespace shardq
