#include <cstring>
#include <numeric>

#include "io/durable_file.hpp"
#include "io/safetensors.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;
using io_testing::read_file;
using io_testing::TempFolder;

TEST(SafetensorsWriter, ReadsBackEveryTensor) {
  const TempFolder folder;
  const std::vector<int64_t> shape{2, 3};
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> halves{7, 8, 9};
  const std::vector<uint8_t> small{1};
  const int64_t bytes = write_safetensors(folder / "f", {{"half", DType::bf16, {3}, as_bytes_of(halves), {}},
                                                         {"small", DType::u8, {}, as_bytes_of(small), {}},
                                                         {"empty", DType::f32, {0, 4}, {}, {}},
                                                         {"shape", DType::i64, {2}, as_bytes_of(shape), {}},
                                                         {"float", DType::f32, {2, 3}, as_bytes_of(floats), {}}});
  EXPECT_EQ(bytes, static_cast<int64_t>(std::filesystem::file_size(folder / "f")));
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.entries().size(), 5u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const TensorEntry& entry = *file.find("float");
  EXPECT_EQ(entry.shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(file.bytes(entry).data(), floats.data(), 24), 0);
  EXPECT_EQ(std::memcmp(file.bytes(*file.find("half")).data(), halves.data(), 6), 0);
  EXPECT_EQ(file.find("small")->shape, Shape{});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

TEST(SafetensorsWriter, LaysOutByAlignmentThenName) {
  const TempFolder folder;
  const std::vector<int64_t> wide{1};
  const std::vector<uint16_t> half{1};
  const std::vector<uint8_t> byte{1};
  write_safetensors(folder / "f", {{"a", DType::u8, {1}, as_bytes_of(byte), {}},
                                   {"z", DType::i64, {1}, as_bytes_of(wide), {}},
                                   {"c", DType::bf16, {1}, as_bytes_of(half), {}},
                                   {"b", DType::f16, {1}, as_bytes_of(half), {}}});
  const SafetensorsFile file(folder / "f");
  const int64_t data = file.find("z")->begin;
  EXPECT_EQ(data % 8, 0);
  EXPECT_EQ(file.find("b")->begin, data + 8);
  EXPECT_EQ(file.find("c")->begin, data + 10);
  EXPECT_EQ(file.find("a")->begin, data + 12);
  EXPECT_EQ(read_file(folder / "f").substr(8, 32), R"({"__metadata__":{"format":"pt"},)");
}

TEST(SafetensorsWriter, WritesTheSameBytesForAnyOrderGiven) {
  const TempFolder folder;
  const std::vector<float> x{1, 2};
  const std::vector<float> y{3};
  write_safetensors(folder / "f",
                    {{"x", DType::f32, {2}, as_bytes_of(x), {}}, {"y", DType::f32, {1}, as_bytes_of(y), {}}});
  write_safetensors(folder / "g",
                    {{"y", DType::f32, {1}, as_bytes_of(y), {}}, {"x", DType::f32, {2}, as_bytes_of(x), {}}});
  EXPECT_EQ(read_file(folder / "f"), read_file(folder / "g"));
}

TEST(SafetensorsWriter, OwnedStorageMovesAlong) {
  const TempFolder folder;
  std::vector<OutputTensor> tensors;
  for (int i = 0; i < 20; ++i) {  // grows: entries move, and data must go on pointing at the bytes
    OutputTensor tensor{
        fmt::format("t{}", i), DType::u8, {4}, {}, std::vector<std::byte>(4, static_cast<std::byte>(i))};
    tensor.data = tensor.owned;
    tensors.push_back(std::move(tensor));
  }
  write_safetensors(folder / "f", std::move(tensors));
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.bytes(*file.find("t13"))[3], static_cast<std::byte>(13));
}

TEST(SafetensorsWriter, RefusesWhatItWasHandedWrongly) {
  const TempFolder folder;
  const std::vector<float> x{1, 2};
  EXPECT_ERROR(ExitCode::internal, ({"'x'", "needs 12", "8 were"}),
               write_safetensors(folder / "f", {{"x", DType::f32, {3}, as_bytes_of(x), {}}}));
  EXPECT_ERROR(ExitCode::internal, ({"'x'", "twice"}),
               write_safetensors(folder / "f", {{"x", DType::f32, {2}, as_bytes_of(x), {}},
                                                {"x", DType::f32, {2}, as_bytes_of(x), {}}}));
  EXPECT_ERROR(ExitCode::internal, ({"no tensor name"}),
               write_safetensors(folder / "f", {{"", DType::f32, {2}, as_bytes_of(x), {}}}));
  EXPECT_TRUE(folder.names().empty());
}

TEST(SafetensorsWriter, NoFolderNoFile) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::disk, ({"cannot create", "No such file"}),
               write_safetensors(folder.path() / "absent" / "f", {}));
}

// Beyond 2 GiB a single write() is cut short by the kernel. A sparse anonymous map costs no memory to read; the file
// costs 2 GiB of disk for a moment.
TEST(SafetensorsWriter, LoopsOverTensorsBeyondTwoGiB) {
  const TempFolder folder;
  const int64_t bytes = (int64_t{1} << 31) + 12345;
  std::error_code ignored;
  if (std::filesystem::space(folder.path(), ignored).available < 2 * static_cast<uint64_t>(bytes) ||
      !std::getenv("SHARDQ_TEST_LARGE"))
    GTEST_SKIP() << "writes 2 GiB: set SHARDQ_TEST_LARGE=1 to run it";
  std::vector<std::byte> large(static_cast<size_t>(bytes));
  large.back() = std::byte{42};
  write_safetensors(folder / "f", {{"x", DType::u8, {bytes}, large, {}}});
  const SafetensorsFile file(folder / "f");
  ASSERT_EQ(file.find("x")->bytes(), bytes);
  EXPECT_EQ(file.bytes(*file.find("x")).back(), std::byte{42});
}

}  // namespace
}  // namespace shardq
