#include "io/output_writer.hpp"

#include <nlohmann/json.hpp>

#include "io/checkpoint.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;
using io_testing::read_file;
using io_testing::TempFolder;
using io_testing::write_file;

const std::vector<float> kValues{1, 2, 3, 4};
OutputTensor tensor(const std::string& name) {
  return {name, DType::f32, {2, 2}, as_bytes_of(kValues), {}};
}

TEST(OutputWriter, PublishesShardsIndexAndFiles) {
  const TempFolder folder, source;
  write_file(source / "tokenizer.json", "tokens");
  write_file(source / "config.json", "the source's");
  OutputWriter writer(folder / "out");
  writer.write_shard(2, 2, {tensor("b")});
  writer.write_shard(1, 2, {tensor("a"), tensor("c")});
  EXPECT_TRUE(writer.has_shard(1, 2));
  EXPECT_FALSE(OutputWriter::is_published(folder / "out"));
  writer.publish(2, "{\"k\": 1}", {source / "tokenizer.json", source / "config.json"}, {{"recipe.yaml", "bits: 4\n"}});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out"});
  EXPECT_TRUE(OutputWriter::is_published(folder / "out"));

  const Checkpoint model(folder / "out");
  EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(model.config_text(), "{\"k\": 1}");
  EXPECT_EQ(read_file(folder.path() / "out" / "tokenizer.json"), "tokens");
  EXPECT_EQ(read_file(folder.path() / "out" / "recipe.yaml"), "bits: 4\n");
  EXPECT_EQ(read_file(folder.path() / "out" / "model.safetensors.index.json"),
            R"({
  "metadata": {
    "total_parameters": 12,
    "total_size": 48
  },
  "weight_map": {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00002-of-00002.safetensors",
    "c": "model-00001-of-00002.safetensors"
  }
}
)");
}

TEST(OutputWriter, ASingleShardHasNoIndex) {
  const TempFolder folder;
  OutputWriter writer(folder / "out/");
  writer.write_shard(1, 1, {tensor("a")});
  writer.publish(1, "{}", {}, {});
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "out" / "model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "out" / "model.safetensors.index.json"));
  EXPECT_EQ(Checkpoint(folder / "out").names(), std::vector<std::string>{"a"});
}

TEST(OutputWriter, CountsTheParametersOfAPackedMatrixOnce) {
  const TempFolder folder;
  const std::vector<int32_t> packed(6);
  const std::vector<int64_t> shape{3, 16};
  const std::vector<uint16_t> scale(3);
  OutputWriter writer(folder / "out");
  writer.write_shard(1, 2,
                     {{"q.weight_packed", DType::i32, {3, 2}, as_bytes_of(packed), {}},
                      {"q.weight_shape", DType::i64, {2}, as_bytes_of(shape), {}},
                      {"q.weight_scale", DType::bf16, {3, 1}, as_bytes_of(scale), {}}});
  writer.write_shard(2, 2, {tensor("norm.weight")});
  writer.publish(2, "{}", {}, {});
  const auto index = nlohmann::json::parse(read_file(folder.path() / "out" / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_parameters"], 48 + 4);
  EXPECT_EQ(index["metadata"]["total_size"], 24 + 16 + 6 + 16);
}

TEST(OutputWriter, APartialFolderIsOneRuns) {
  const TempFolder folder;
  OutputWriter(folder / "out", "a1").write_shard(1, 2, {tensor("a")});
  EXPECT_TRUE(OutputWriter(folder / "out", "a1").has_shard(1, 2));
  EXPECT_ERROR(ExitCode::usage, ({"out.partial", "another run"}), OutputWriter(folder / "out", "b2"));
  std::filesystem::remove(folder.path() / "out.partial" / ".shardq-run");
  EXPECT_ERROR(ExitCode::usage, ({"out.partial", "model-00001-of-00002", "no mark"}),
               OutputWriter(folder / "out", "a1"));
  OutputWriter::discard(folder / "out/");
  EXPECT_EQ(folder.names(), std::vector<std::string>{});
  OutputWriter writer(folder / "out", "b2");
  writer.write_shard(1, 1, {tensor("a")});
  writer.publish(1, "{}", {}, {});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "out" / ".shardq-run"));
  // What a kill between the two last steps leaves.
  write_file(folder.path() / "out" / ".shardq-run", "b2");
  OutputWriter::remove_marker(folder / "out");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "out" / ".shardq-run"));
}

TEST(OutputWriter, RefusesAnOutputThatHoldsSomething) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "out");
  write_file(folder.path() / "out" / "x", "precious");
  EXPECT_ERROR(ExitCode::usage, ({"out", "already holds something"}), OutputWriter(folder / "out"));
  write_file(folder / "file", "x");
  EXPECT_ERROR(ExitCode::usage, ({"file", "no directory"}), OutputWriter(folder / "file"));
  EXPECT_ERROR(ExitCode::usage, ({"name of a new directory"}), OutputWriter("/"));
  EXPECT_ERROR(ExitCode::usage, ({"name of a new directory"}), OutputWriter(""));
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"file", "out"}));
}

TEST(OutputWriter, TakesAnEmptyOutputDirectory) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "out");
  OutputWriter writer(folder / "out");
  writer.write_shard(1, 1, {tensor("a")});
  writer.publish(1, "{}", {}, {});
  EXPECT_EQ(Checkpoint(folder / "out").names(), std::vector<std::string>{"a"});
}

TEST(OutputWriter, AnOutputFilledMeanwhileIsLeftAlone) {
  const TempFolder folder;
  OutputWriter writer(folder / "out");
  writer.write_shard(1, 1, {tensor("a")});
  std::filesystem::create_directory(folder / "out");
  write_file(folder.path() / "out" / "x", "precious");
  EXPECT_ERROR(ExitCode::usage, ({"already holds something"}), writer.publish(1, "{}", {}, {}));
  EXPECT_EQ(read_file(folder.path() / "out" / "x"), "precious");
  EXPECT_TRUE(writer.has_shard(1, 1));
}

TEST(OutputWriter, MakesParentFolders) {
  const TempFolder folder;
  OutputWriter writer(folder.path() / "deep" / "down" / "out");
  EXPECT_TRUE(std::filesystem::is_directory(folder.path() / "deep" / "down" / "out.partial"));
  write_file(folder / "file", "x");
  EXPECT_ERROR(ExitCode::disk, ({"cannot create"}), OutputWriter(folder.path() / "file" / "out"));
}

TEST(OutputWriter, ResumesAPartialFolder) {
  const TempFolder folder;
  {
    OutputWriter writer(folder / "out");
    writer.write_shard(1, 3, {tensor("a")});
    writer.write_shard(2, 3, {tensor("b")});
  }
  const auto partial = folder.path() / "out.partial";
  // What a killed run may leave: a damaged file, a temp file, the shards and index of another count.
  std::filesystem::resize_file(partial / "model-00002-of-00003.safetensors", 100);
  write_file(partial / ".model-00003-of-00003.safetensors.tmp", "half");
  write_file(partial / "model-00001-of-00007.safetensors", "other");
  write_file(partial / "model.safetensors.index.json", "old");

  OutputWriter writer(folder / "out");
  EXPECT_TRUE(writer.has_shard(1, 3));
  EXPECT_FALSE(writer.has_shard(2, 3));
  EXPECT_FALSE(writer.has_shard(3, 3));
  EXPECT_ERROR(ExitCode::disk, ({"model-00002-of-00003", "truncated"}), writer.publish(3, "{}", {}, {}));
  writer.write_shard(2, 3, {tensor("b")});
  EXPECT_ERROR(ExitCode::disk, ({"model-00003-of-00003.safetensors is missing"}), writer.publish(3, "{}", {}, {}));
  writer.write_shard(3, 3, {tensor("c")});
  writer.publish(3, "{}", {}, {});
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(folder / "out"))
    names.push_back(item.path().filename().string());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"config.json", "model-00001-of-00003.safetensors",
                                             "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                                             "model.safetensors.index.json"}));
}

TEST(OutputWriter, OneTensorInTwoShardsIsOurFault) {
  const TempFolder folder;
  OutputWriter writer(folder / "out");
  writer.write_shard(1, 2, {tensor("a")});
  writer.write_shard(2, 2, {tensor("a")});
  EXPECT_ERROR(ExitCode::internal, ({"'a'", "two shards"}), writer.publish(2, "{}", {}, {}));
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

TEST(OutputWriter, AMissingFileToCopyStopsThePublication) {
  const TempFolder folder;
  OutputWriter writer(folder / "out");
  writer.write_shard(1, 1, {tensor("a")});
  EXPECT_ERROR(ExitCode::input, ({"absent.json"}), writer.publish(1, "{}", {folder / "absent.json"}, {}));
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

}  // namespace
}  // namespace shardq
