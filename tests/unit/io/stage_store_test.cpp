#include "io/stage_store.hpp"

#include <hdf5.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core/timer.hpp"
#include "io/hdf5_handles.hpp"
#include "unit/io/stage_store_fixture.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;

class StageStoreTest : public StageStoreFixture {};

TEST_F(StageStoreTest, TheComparisonSeesEveryKindOfDifference) {
  StageStore store = open();
  const StageArray right = sample_array("a", DType::i32, 0, 4, 4, {3});
  store.put("s", one(right), "");
  store.complete();
  EXPECT_EQ(difference(store, "s", right), "");
  StageArray wrong = right;
  wrong.data[47] ^= std::byte{1};
  EXPECT_NE(difference(store, "s", wrong), "");
  wrong = right;
  wrong.dtype = DType::u32;
  EXPECT_NE(difference(store, "s", wrong), "");
  wrong = right;
  wrong.total_rows = 5;
  EXPECT_NE(difference(store, "s", wrong), "");
  wrong = right;
  wrong.shape = {4, 1, 3};
  EXPECT_NE(difference(store, "s", wrong), "");
}

TEST_F(StageStoreTest, EveryTypeComesBackAfterReopening) {
  const std::vector<DType> dtypes = {DType::i8,  DType::u8,  DType::i16, DType::u16, DType::i32,  DType::u32,
                                     DType::i64, DType::u64, DType::f32, DType::f64, DType::bf16, DType::f16};
  const auto name = [](DType dtype) { return "of/" + std::string(torch_name(dtype)); };
  {
    StageStore store = open();
    EXPECT_TRUE(store.stages().empty());
    std::vector<StageArray> arrays;
    for (DType dtype : dtypes) arrays.push_back(sample_array(name(dtype), dtype, 0, 7, 7, {5, 3}));
    store.put("layer0000.attention", std::move(arrays), R"({"verdict":"ok"})");
    EXPECT_FALSE(store.has("layer0000.attention"));
    store.complete();
    EXPECT_TRUE(store.has("layer0000.attention"));
    store.complete();  // nothing in flight: nothing happens
  }
  const StageStore store = open();
  ASSERT_EQ(store.stages().size(), 1u);
  EXPECT_EQ(store.stages()[0].name, "layer0000.attention");
  EXPECT_EQ(store.stages()[0].text, R"({"verdict":"ok"})");
  EXPECT_EQ(store.stages()[0].writers, 1);
  EXPECT_EQ(store.arrays("layer0000.attention").size(), dtypes.size());
  for (DType dtype : dtypes)
    for (auto [begin, end] : {std::pair{0, 7}, {2, 5}, {6, 7}, {3, 3}})
      EXPECT_EQ(
          difference(store, "layer0000.attention", sample_array(name(dtype), dtype, begin, end - begin, 7, {5, 3})),
          "");
}

TEST_F(StageStoreTest, UnsupportedTypesAndWrongSizesAreOurError) {
  StageStore store = open();
  const auto put = [&](StageArray array) {
    store.put("s", one(std::move(array)), "");
    store.complete();
  };
  expect_error([&] { put(sample_array("a", DType::f8_e4m3, 0, 2, 2, {2})); }, ExitCode::internal, {"F8_E4M3"});
  StageArray array = sample_array("a", DType::f32, 0, 2, 2, {2});
  array.data.pop_back();
  expect_error([&] { put(array); }, ExitCode::internal, {"array a", "16", "15"});
  array = sample_array("a", DType::f32, 0, 2, 2, {2});
  array.shape = {};
  expect_error([&] { put(array); }, ExitCode::internal, {"dimension"});
  array = sample_array("a", DType::f32, 1, 2, 2, {2});
  expect_error([&] { put(array); }, ExitCode::internal, {"rows 1 to 3 of 2"});
  std::vector<StageArray> twice = one(sample_array("a", DType::f32, 0, 2, 2, {2}));
  twice.push_back(twice[0]);
  store.put("s", std::move(twice), "");
  expect_error([&] { store.complete(); }, ExitCode::internal, {"array a", "twice"});
  const std::vector<StageArray> none;
  for (const char* name : {"", "a/b", "../x", ".hidden", "a b"})
    expect_error([&] { store.put(name, none, ""); }, ExitCode::internal, {"stage name"});
  store.put("s", one(sample_array("a", DType::f32, 0, 2, 2, {2})), "\xff\xfe");
  expect_error([&] { store.complete(); }, ExitCode::internal, {"UTF-8"});
  EXPECT_TRUE(store.stages().empty());
  put(sample_array("a", DType::f32, 0, 2, 2, {2}));  // and the store still works
  EXPECT_TRUE(store.has("s"));
  expect_error([&] { store.put("s", none, ""); }, ExitCode::internal, {"already"});
}

TEST_F(StageStoreTest, RowsSpanBlocksOfSeveralMegabytes) {
  // 2 MiB blocks hold 699 of these rows; 3000 rows are five blocks, the last one ragged.
  const Shape row = {750};
  StageStore store = open();
  store.put("s", one(sample_array("hidden", DType::f32, 0, 3000, 3000, row)), "");
  store.complete();
  for (auto [begin, end] :
       {std::pair{0, 3000}, {0, 1}, {698, 700}, {699, 1398}, {100, 2900}, {2999, 3000}, {2097, 2097}})
    EXPECT_EQ(difference(store, "s", sample_array("hidden", DType::f32, begin, end - begin, 3000, row)), "")
        << begin << " " << end;
  EXPECT_EQ(store.bytes_written(), 3000 * 750 * 4);
  expect_error([&] { store.read("s", "hidden", 0, 3001); }, ExitCode::internal, {"rows 0 to 3001 of 3000"});
  expect_error([&] { store.read("s", "hiden", 0, 1); }, ExitCode::internal, {"hiden"});
  expect_error([&] { store.read("t", "hidden", 0, 1); }, ExitCode::internal, {"stage t"});
}

TEST_F(StageStoreTest, EmptyArraysAndStagesAreKept) {
  {
    StageStore store = open();
    std::vector<StageArray> arrays = one(sample_array("no rows", DType::f32, 0, 0, 0, {4}));
    arrays.push_back(sample_array("no columns", DType::bf16, 0, 5, 5, {0}));
    arrays.push_back(sample_array("vector", DType::i64, 0, 5, 5, {}));
    store.put("s", std::move(arrays), "");
    store.put("nothing", std::vector<StageArray>(), "text");
    store.complete();
  }
  const StageStore store = open();
  EXPECT_EQ(difference(store, "s", sample_array("no rows", DType::f32, 0, 0, 0, {4})), "");
  EXPECT_EQ(difference(store, "s", sample_array("no columns", DType::bf16, 0, 5, 5, {0})), "");
  EXPECT_EQ(difference(store, "s", sample_array("vector", DType::i64, 1, 3, 5, {})), "");
  EXPECT_TRUE(store.arrays("nothing").empty());
  EXPECT_EQ(store.text("nothing"), "text");
}

/// 23 rows over any number of writers, an array of one rank only, and one of which some ranks hold nothing.
void put_over_ranks(StageStore& store, const std::string& stage, int rank, int size) {
  const Range mine = part(23, size, rank), few = part(2, size, rank);
  std::vector<StageArray> arrays;
  arrays.push_back(sample_array("hidden", DType::bf16, mine.begin, mine.size(), 23, {6, 4}));
  arrays.push_back(sample_array("few", DType::i32, few.begin, few.size(), 2, {3}));
  if (rank == size - 1) arrays.push_back(sample_array("codes/q_proj", DType::i8, 0, 9, 9, {5}));
  store.put(stage, std::move(arrays), "from rank " + std::to_string(rank));
}

TEST_F(StageStoreTest, AnyNumberOfRanksReadsWhatAnyOtherWrote) {
  for (int writers = 1; writers <= 4; ++writers) {
    const std::string stage = "by" + std::to_string(writers);
    ThreadRanks ranks(writers);
    const auto errors = ThreadRanks::run(writers, [&](int rank) {
      StageStore store(work_, ranks.rank(rank), kFingerprint, true);
      put_over_ranks(store, stage, rank, writers);
      store.complete();
      // Every rank reads all, also what others have just written.
      EXPECT_EQ(difference(store, stage, sample_array("hidden", DType::bf16, 0, 23, 23, {6, 4})), "");
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
  for (int readers = 1; readers <= 4; ++readers) {
    ThreadRanks ranks(readers);
    const auto errors = ThreadRanks::run(readers, [&](int rank) {
      const StageStore store(work_, ranks.rank(rank), kFingerprint, true);
      ASSERT_EQ(store.stages().size(), 4u);
      const Range mine = part(23, readers, rank);
      for (const StageInfo& stage : store.stages()) {
        EXPECT_EQ(stage.text, "from rank 0");
        EXPECT_EQ("by" + std::to_string(stage.writers), stage.name);
        EXPECT_EQ(
            difference(store, stage.name, sample_array("hidden", DType::bf16, mine.begin, mine.size(), 23, {6, 4})),
            "");
        EXPECT_EQ(difference(store, stage.name, sample_array("few", DType::i32, 0, 2, 2, {3})), "");
        EXPECT_EQ(difference(store, stage.name, sample_array("codes/q_proj", DType::i8, 2, 7, 9, {5})), "");
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST_F(StageStoreTest, PartsOfRanksThatDoNotFitAreNamed) {
  struct Case {
    std::function<StageArray(int)> array;
    std::vector<std::string> texts;
  };
  const std::vector<Case> cases = {
      {[](int rank) { return sample_array("a", DType::i8, rank * 3, 2, 5, {}); },
       {"array a", "rows 2 to 3", "no rank"}},
      {[](int rank) { return sample_array("a", DType::i8, rank, 2, 3, {}); }, {"array a", "rows 1 to 2", "two ranks"}},
      {[](int rank) { return sample_array("a", DType::i8, rank, 1, 3, {}); }, {"array a", "3 rows", "put 2"}},
      {[](int rank) { return sample_array("a", rank ? DType::u8 : DType::i8, rank, 1, 2, {}); },
       {"array a", "rank 0", "I8", "rank 1", "U8"}},
      {[](int rank) { return sample_array("a", DType::i8, rank, 1, 2, {2 + rank}); }, {"array a", "[2]", "[3]"}},
      {[](int rank) { return sample_array("a", DType::i8, rank, 1, 2 + rank, {}); }, {"array a", "2 rows", "3 rows"}}};
  for (size_t i = 0; i < cases.size(); ++i) {
    ThreadRanks ranks(2);
    const auto errors = ThreadRanks::run(2, [&](int rank) {
      StageStore store(work_, ranks.rank(rank), kFingerprint, true);
      store.put("s", one(cases[i].array(rank)), "");
      store.complete();
    });
    for (const std::string& error : errors)
      for (const std::string& text : cases[i].texts)
        EXPECT_NE(error.find(text), std::string::npos) << i << ": " << error;
  }
  EXPECT_TRUE(open().stages().empty());
}

TEST_F(StageStoreTest, WhatFailsOnOneRankIsThrownOnAllAndTheStoreGoesOn) {
  ThreadRanks ranks(3);
  const auto errors = ThreadRanks::run(3, [&](int rank) {
    StageStore store(work_, ranks.rank(rank), kFingerprint, true);
    StageArray array = sample_array("a", DType::i8, rank, 1, 3, {});
    if (rank == 1) array.data.clear();
    store.put("bad", one(std::move(array)), "");
    expect_error([&] { store.complete(); }, ExitCode::internal, {"rank 1", "array a"});
    store.put("good", one(sample_array("a", DType::i8, rank, 1, 3, {})), "");
    store.complete();
    EXPECT_FALSE(store.has("bad"));
    EXPECT_EQ(difference(store, "good", sample_array("a", DType::i8, 0, 3, 3, {})), "");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_F(StageStoreTest, RemovedStagesAreGoneWithTheirFiles) {
  {
    StageStore store = open();
    for (const char* stage : {"a", "b", "c"}) store.put(stage, one(sample_array("x", DType::i8, 0, 4, 4, {})), "");
    EXPECT_EQ(difference(store, "a", sample_array("x", DType::i8, 0, 4, 4, {})), "");
    store.remove({"a", "b"});  // while c is in flight
    EXPECT_FALSE(store.has("a"));
    store.complete();
    store.put("a", one(sample_array("y", DType::i8, 0, 4, 4, {})), "again");
    store.complete();
    expect_error([&] { store.remove({"b"}); }, ExitCode::internal, {"stage b"});
  }
  const StageStore store = open();
  ASSERT_EQ(store.stages().size(), 2u);
  EXPECT_EQ(store.stages()[0].name, "c");  // oldest first
  EXPECT_EQ(store.stages()[1].text, "again");
  EXPECT_EQ(difference(store, "a", sample_array("y", DType::i8, 0, 4, 4, {})), "");
  EXPECT_EQ(file_names().size(), 6u);  // data, virtual, description
}

TEST_F(StageStoreTest, FinishedIsRemembered) {
  {
    StageStore store = open();
    EXPECT_FALSE(store.finished());
    store.put("a", std::vector<StageArray>(), "");
    expect_error([&] { store.finish("/out"); }, ExitCode::internal, {"in flight"});
    store.complete();
    store.finish("/out");
    EXPECT_EQ(store.finished(), "/out");
  }
  EXPECT_EQ(open().finished(), "/out");
  EXPECT_FALSE(open(false).finished());
}

TEST_F(StageStoreTest, ChangedFingerprintIsRefusedByName) {
  { StageStore store = open(); }
  EXPECT_EQ(StageStore::peek_fingerprint(work_), kFingerprint);
  EXPECT_FALSE(StageStore::peek_fingerprint(directory_));
  const std::map<std::string, std::string> changed = {{"model", "abc"}, {"recipe", "xyz"}, {"version", "2"}};
  expect_error([&] { StageStore(work_, {}, changed, true); }, ExitCode::usage,
               {"recipe: def -> xyz", "tokens: 123 -> (none)", "version: (none) -> 2"});
  try {
    StageStore(work_, {}, changed, true);
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("model"), std::string::npos) << error.what();
  }
  { StageStore store(work_, {}, changed, false); }
  EXPECT_EQ(StageStore::peek_fingerprint(work_), changed);
}

TEST_F(StageStoreTest, NotResumingDiscardsFormerStages) {
  {
    StageStore store = open();
    store.put("a", one(sample_array("x", DType::i8, 0, 4, 4, {})), "");
    store.complete();
  }
  StageStore store = open(false);
  EXPECT_TRUE(store.stages().empty());
  EXPECT_TRUE(file_names().empty());
}

TEST_F(StageStoreTest, OrphansAreRemovedAndForeignFoldersAreNot) {
  {
    StageStore store = open();
    store.put("a", one(sample_array("x", DType::i8, 0, 4, 4, {})), "");
    store.complete();
  }
  const auto before = file_names();
  for (const char* orphan : {"b.00000000.rank0000.h5", ".c.00000000.rank0001.h5.tmp", "b.h5", "b.json"})
    put_file(work_ / "stages" / orphan, "x");
  { StageStore store = open(); }
  EXPECT_EQ(file_names(), before);

  fs::create_directories(directory_ / "other" / "stages");
  put_file(directory_ / "other" / "stages" / "thesis.txt", "x");
  expect_error([&] { StageStore(directory_ / "other", {}, kFingerprint, true); }, ExitCode::usage, {"other", "stages"});
  EXPECT_EQ(file_text(directory_ / "other" / "stages" / "thesis.txt"), "x");
}

TEST_F(StageStoreTest, WritingOverlapsWithTheCaller) {
  StageStore store = open();
  store.put("first", one(sample_array("x", DType::f32, 0, 64, 64, {8})), "");
  store.complete();
  arm_faults("sleep@stage_block_written#*=1.5", 0);
  Stopwatch watch;
  store.put("a", one(sample_array("x", DType::i8, 0, 4, 4, {})), "");
  EXPECT_LT(watch.seconds(), 1);
  EXPECT_EQ(difference(store, "first", sample_array("x", DType::f32, 0, 64, 64, {8})),
            "");  // and reads go on meanwhile
  EXPECT_LT(watch.seconds(), 1.2);
  store.complete();
  EXPECT_GE(watch.seconds(), 1.5);
}

TEST_F(StageStoreTest, AStoreThatIsLeftEarlyStopsWritingSoon) {
  constexpr int64_t kBlocks = 20, kBlockBytes = 2 << 20;
  arm_faults("sleep@stage_block_written#*=0.5", 0);  // 10 s for all
  auto store = std::make_unique<StageStore>(work_, StageStore::Ranks{}, kFingerprint, true);
  store->put("a", one(sample_array("x", DType::i8, 0, kBlocks, kBlocks, {kBlockBytes})), "");
  while (store->bytes_written() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Stopwatch watch;
  store.reset();
  EXPECT_LT(watch.seconds(), 5);
  EXPECT_TRUE(file_names().empty());
}

TEST_F(StageStoreTest, ReadsAndBackgroundWritesDoNotDisturbEachOther) {
  StageStore store = open();
  const auto array = [](int stage) {
    return sample_array("x" + std::to_string(stage), DType::bf16, 0, 900, 900, {2000});
  };
  for (int stage = 0; stage < 4; ++stage) {
    store.put("s" + std::to_string(stage), one(array(stage)), "");
    for (int before = 0; before + 1 < stage; ++before)
      EXPECT_EQ(difference(store, "s" + std::to_string(before), array(before)), "");
  }
  store.complete();
}

TEST_F(StageStoreTest, ThousandsOfExpertArraysAreNoBurden) {
  constexpr int kArrays = 2000;
  const auto name = [](int i) { return "codes/model.layers.0.mlp.experts." + std::to_string(i) + ".gate_proj"; };
  StageStore store = open();
  std::vector<StageArray> arrays;
  for (int i = 0; i < kArrays; ++i) arrays.push_back(sample_array(name(i), DType::i8, 0, 4, 4, {16}));
  Stopwatch watch;
  store.put("s", std::move(arrays), "");
  store.complete();
  for (int i = 0; i < kArrays; ++i)
    EXPECT_EQ(difference(store, "s", sample_array(name(i), DType::i8, 0, 4, 4, {16})), "");
  EXPECT_LT(watch.seconds(), 10) << "about 1 s is usual";
}

// ---- what other tools see ------------------------------------------------------------------------

TEST_F(StageStoreTest, BFloat16IsAFloatTypeToEveryHdf5Reader) {
  const std::vector<float> values = {0.f, -0.f, 1.f, -2.5f, 3.0e38f, 1.0e-40f, INFINITY, -INFINITY, NAN};
  for (DType dtype : {DType::bf16, DType::f16}) {
    StageArray array{"x", dtype, {static_cast<int64_t>(values.size())}, 0, static_cast<int64_t>(values.size()), {}};
    std::vector<float> rounded;
    for (float value : values) {
      const uint16_t bits = dtype == DType::bf16 ? to_bf16(value).bits : to_f16(value).bits;
      array.data.insert(array.data.end(), reinterpret_cast<const std::byte*>(&bits),
                        reinterpret_cast<const std::byte*>(&bits) + 2);
      rounded.push_back(round_to(dtype, value));
    }
    const std::string stage(torch_name(dtype));
    StageStore store = open();
    store.put(stage, one(array), "");
    store.complete();
    const Hdf5Lock lock = lock_hdf5();
    const Hdf5Handle file(H5Fopen((work_ / "stages" / (stage + ".h5")).c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
    const Hdf5Handle dataset(H5Dopen2(file, "x", H5P_DEFAULT), H5Dclose);
    std::vector<float> found(values.size());
    ASSERT_GE(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, found.data()), 0) << hdf5_reason();
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i]))
        EXPECT_TRUE(std::isnan(found[i])) << stage;
      else
        EXPECT_EQ(float_bits(found[i]), float_bits(rounded[i])) << stage << " " << values[i];
    }
  }
}

TEST_F(StageStoreTest, PythonReadsAStageAsOneFileAlsoAfterTheFolderMoved) {
  const char* chosen = std::getenv("SHARDQ_PYTHON");
  std::string python;
  for (const std::string& candidate :
       {std::string(chosen ? chosen : ""), std::string(SHARDQ_SOURCE_DIR "/.venv/bin/python"), std::string("python3")})
    if (python.empty() && !candidate.empty() &&
        std::system((candidate + " -c 'import h5py, numpy' 2>/dev/null").c_str()) == 0)
      python = candidate;
  if (python.empty()) GTEST_SKIP() << "no Python with h5py: run jobs/setup.sh tests, or set SHARDQ_PYTHON";
  ThreadRanks ranks(3);
  ThreadRanks::run(3, [&](int rank) {
    StageStore store(work_, ranks.rank(rank), kFingerprint, true);
    put_over_ranks(store, "s", rank, 3);
    store.complete();
  });
  fs::rename(work_, directory_ / "moved");
  // The expected bytes go to a file; bf16 arrives in Python as float32 with the same values.
  const StageArray hidden = sample_array("hidden", DType::bf16, 0, 23, 23, {6, 4}),
                   codes = sample_array("codes/q_proj", DType::i8, 0, 9, 9, {5});
  put_file(directory_ / "hidden", std::string(reinterpret_cast<const char*>(hidden.data.data()), hidden.data.size()));
  put_file(directory_ / "codes", std::string(reinterpret_cast<const char*>(codes.data.data()), codes.data.size()));
  put_file(directory_ / "check.py", R"(
import sys, h5py, numpy
top = sys.argv[1]
with h5py.File(top + "/moved/stages/s.h5") as file:
    hidden, codes = file["hidden"][:], file["codes/q_proj"][:]
expected = (numpy.fromfile(top + "/hidden", "<u2").astype("<u4") << 16).view("<f4").reshape(23, 6, 4)
assert hidden.shape == (23, 6, 4) and hidden.dtype == numpy.float32, (hidden.shape, hidden.dtype)
assert numpy.array_equal(hidden, expected, equal_nan=True)
assert codes.dtype == numpy.int8 and numpy.array_equal(codes, numpy.fromfile(top + "/codes", "i1").reshape(9, 5))
)");
  EXPECT_EQ(
      std::system(("cd / && " + python + " " + (directory_ / "check.py").string() + " " + directory_.string()).c_str()),
      0);
}

}  // namespace
}  // namespace shardq
