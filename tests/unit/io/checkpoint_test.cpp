#include "io/checkpoint.hpp"

#include <cstring>

#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;
using io_testing::read_file;
using io_testing::TempFolder;
using io_testing::write_file;

const std::vector<float> kOne{1}, kTwo{2}, kThree{3};
OutputTensor tensor(const std::string& name, const std::vector<float>& value) {
  return {name, DType::f32, {1}, as_bytes_of(value), {}};
}

/// Two shards, an index, a config and some companions.
void make_sharded(const TempFolder& folder) {
  write_file(folder / "config.json", R"({"model_type":"llama"})");
  write_safetensors(folder / "model-00001-of-00002.safetensors", {tensor("a", kOne), tensor("b", kTwo)});
  write_safetensors(folder / "model-00002-of-00002.safetensors", {tensor("c", kThree)});
  write_file(folder / "model.safetensors.index.json",
             R"({"metadata":{"total_size":12},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
             R"("b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})");
}
void replace_index(const TempFolder& folder, const std::string& from, const std::string& to) {
  std::string text = read_file(folder / "model.safetensors.index.json");
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos);
  write_file(folder / "model.safetensors.index.json", text.replace(at, from.size(), to));
}

TEST(Checkpoint, ReadsShards) {
  const TempFolder folder;
  make_sharded(folder);
  const Checkpoint model(folder.path());
  EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(model.total_bytes(), 12);
  EXPECT_EQ(model.shards().size(), 2u);
  EXPECT_EQ(model.config_text(), R"({"model_type":"llama"})");
  EXPECT_TRUE(model.has("c"));
  EXPECT_FALSE(model.has("d"));
  float value = 0;
  std::memcpy(&value, model.bytes("c").data(), 4);
  EXPECT_EQ(value, 3);
  model.read("b", 0, std::as_writable_bytes(std::span(&value, 1)));
  EXPECT_EQ(value, 2);
  EXPECT_EQ(model.entry("a").shape, (Shape{1}));
  EXPECT_ERROR(ExitCode::input, ({folder.path().string(), "no tensor 'd'"}), model.entry("d"));
  EXPECT_ERROR(ExitCode::input, ({"'d'"}), model.bytes("d"));
}

TEST(Checkpoint, ReadsASingleFileAndPrefersIt) {
  const TempFolder folder;
  make_sharded(folder);
  write_safetensors(folder / "model.safetensors", {tensor("x", kOne)});
  EXPECT_EQ(Checkpoint(folder.path()).names(), std::vector<std::string>{"x"});
}

TEST(Checkpoint, FollowsTheLinksOfADownloadCache) {
  const TempFolder blobs, folder;
  make_sharded(blobs);
  for (const std::string& name : blobs.names()) std::filesystem::create_symlink(blobs / name, folder / name);
  const Checkpoint model(folder.path());
  EXPECT_EQ(model.names().size(), 3u);
  EXPECT_EQ(model.other_files(), std::vector<std::filesystem::path>{folder / "config.json"});
}

TEST(Checkpoint, OtherFilesAreTheTopLevelWithoutWeights) {
  const TempFolder folder;
  make_sharded(folder);
  for (const char* name : {"tokenizer.json", "tokenizer.model", "modeling_x.py", "chat_template.jinja", "README.md"})
    write_file(folder / name, "x");
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model-q4.gguf",
                           "x.pt", "consolidated.safetensors"})
    write_file(folder / name, "x");
  std::filesystem::create_directory(folder / "original");
  write_file(folder.path() / "original" / "params.json", "{}");
  std::vector<std::string> names;
  for (const auto& path : Checkpoint(folder.path()).other_files()) names.push_back(path.filename().string());
  EXPECT_EQ(names, (std::vector<std::string>{"README.md", "chat_template.jinja", "config.json", "modeling_x.py",
                                             "tokenizer.json", "tokenizer.model"}));
}

TEST(Checkpoint, ATensorBesideTheIndexIsLoaded) {
  const TempFolder folder;
  make_sharded(folder);
  replace_index(folder, R"("b":"model-00001-of-00002.safetensors",)", "");
  EXPECT_TRUE(Checkpoint(folder.path()).has("b"));
}

TEST(Checkpoint, RefusesAbsentPieces) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::input, ({"absent", "does not exist"}), Checkpoint(folder.path() / "absent"));
  EXPECT_ERROR(ExitCode::input, ({"no config.json"}), Checkpoint(folder.path()));
  write_file(folder / "config.json", "{}");
  EXPECT_ERROR(ExitCode::input, ({"neither model.safetensors nor model.safetensors.index.json"}),
               Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesAMissingShard) {
  const TempFolder folder;
  make_sharded(folder);
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");
  EXPECT_ERROR(ExitCode::input, ({"1 of 2 weight shards are missing", "model-00002-of-00002.safetensors"}),
               Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesATruncatedShard) {
  const TempFolder folder;
  make_sharded(folder);
  const auto shard = folder / "model-00002-of-00002.safetensors";
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  EXPECT_ERROR(ExitCode::input, ({shard.string(), "'c'", "truncated"}), Checkpoint(folder.path()));
  std::filesystem::resize_file(shard, 20);
  EXPECT_ERROR(ExitCode::input, ({shard.string(), "longer than the file of 20 bytes"}), Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesAnIndexThatNamesWhatAShardLacks) {
  const TempFolder folder;
  make_sharded(folder);
  replace_index(folder, R"("c":)", R"("q":)");
  EXPECT_ERROR(ExitCode::input, ({"index.json", "'q'", "model-00002-of-00002.safetensors", "lacks it"}),
               Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesAnIndexThatNamesTheWrongShard) {
  const TempFolder folder;
  make_sharded(folder);
  replace_index(folder, R"("b":"model-00001)", R"("b":"model-00002)");
  EXPECT_ERROR(ExitCode::input,
               ({"'b'", "model-00002-of-00002.safetensors", "it is in model-00001-of-00002.safetensors"}),
               Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesATensorInTwoShards) {
  const TempFolder folder;
  make_sharded(folder);
  write_safetensors(folder / "model-00002-of-00002.safetensors", {tensor("c", kThree), tensor("a", kOne)});
  EXPECT_ERROR(ExitCode::input, ({"'a'", "two shards", "model-00001", "model-00002"}), Checkpoint(folder.path()));
}

TEST(Checkpoint, RefusesAMalformedIndex) {
  const TempFolder folder;
  make_sharded(folder);
  const auto index = folder / "model.safetensors.index.json";
  const auto refuses = [&](const std::string& text, const std::vector<std::string>& words) {
    write_file(index, text);
    EXPECT_EQ(io_testing::error_mismatch(ExitCode::input, words, [&] { Checkpoint model(folder.path()); }), "") << text;
  };
  refuses("{", {"index.json", "not valid JSON"});
  refuses("[]", {"weight_map"});
  refuses("{}", {"weight_map"});
  refuses(R"({"weight_map":[]})", {"weight_map"});
  refuses(R"({"weight_map":{}})", {"names no tensor"});
  refuses(R"({"weight_map":{"a":5}})", {"'a'", "file name"});
  refuses(R"({"weight_map":{"a":"../model.safetensors"}})", {"'a'", "same directory"});
  refuses(R"({"weight_map":{"a":".."}})", {"same directory"});
  refuses(R"({"weight_map":{"a":""}})", {"same directory"});
  refuses(R"({"weight_map":{"a":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}})",
          {"duplicate key 'a'"});
}

}  // namespace
}  // namespace shardq
