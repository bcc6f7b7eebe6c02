#include "io/files.hpp"

#include <chrono>
#include <random>

#include "io/durable_file.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::read_file;
using io_testing::TempFolder;
using io_testing::write_file;

TEST(Files, TextIsReplacedWhole) {
  const TempFolder folder;
  write_text_durably(folder / "t", "first, and long");
  write_text_durably(folder / "t", "second");
  EXPECT_EQ(read_text(folder / "t"), "second");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"t"});
  write_text_durably(folder / "e", "");
  EXPECT_EQ(read_text(folder / "e"), "");
}

TEST(Files, ReadNamesWhatIsMissing) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::input, ({"absent", "No such file"}), read_text(folder / "absent"));
  EXPECT_ERROR(ExitCode::input, ({"not a regular file"}), read_text(folder.path()));
}

TEST(Files, CopyKeepsBytesAndFollowsLinks) {
  const TempFolder folder;
  std::string text(3'000'001, 'x');
  text[1'500'000] = '\0';
  write_file(folder / "a", text);
  std::filesystem::create_symlink(folder / "a", folder / "link");
  copy_file_durably(folder / "link", folder / "b");
  EXPECT_EQ(read_file(folder / "b"), text);
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "b"));
}

TEST(Files, AnAbandonedFileLeavesNothing) {
  const TempFolder folder;
  write_file(folder / "f", "old");
  {
    DurableFile file(folder / "f", 100);
    file.write(std::as_bytes(std::span("new", 3)));
    EXPECT_EQ(folder.names(), (std::vector<std::string>{".f.tmp", "f"}));
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
  EXPECT_EQ(read_file(folder / "f"), "old");
}

TEST(Files, AReservedTailThatWasNotWrittenIsTrimmed) {
  const TempFolder folder;
  DurableFile file(folder / "f", 1000);
  file.write(std::as_bytes(std::span("abc", 3)));
  file.commit();
  EXPECT_EQ(read_file(folder / "f"), "abc");
  EXPECT_ERROR(ExitCode::internal, ({"committed twice"}), file.commit());
}

TEST(Files, AKilledRunsLeftoverIsOverwritten) {
  const TempFolder folder;
  write_file(DurableFile::temporary_name(folder / "f"), std::string(5000, 'z'));
  write_text_durably(folder / "f", "new");
  EXPECT_EQ(read_file(folder / "f"), "new");
  EXPECT_TRUE(DurableFile::is_temporary(DurableFile::temporary_name(folder / "f")));
  EXPECT_FALSE(DurableFile::is_temporary(folder / "f"));
}

TEST(Files, RenameErrorsNameBothEnds) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::disk, ({"cannot rename", "absent", "target"}),
               rename_durably(folder / "absent", folder / "target"));
  EXPECT_ERROR(ExitCode::disk, ({"cannot open folder", "absent"}), sync_folder(folder / "absent"));
}

TEST(Files, FreeBytesLooksAtTheNearestExistingParent) {
  const TempFolder folder;
  EXPECT_GT(free_bytes(folder.path()), 0);
  EXPECT_GT(free_bytes(folder.path() / "not" / "yet"), 0);
  EXPECT_GT(free_bytes("relative-and-absent"), 0);
}

TEST(Checksum, AnySingleByteChangeShows) {
  std::mt19937 random(1);
  for (const size_t size : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100}) {
    std::vector<unsigned char> data(size);
    for (auto& byte : data) byte = static_cast<unsigned char>(random());
    const uint64_t sum = checksum(data.data(), static_cast<int64_t>(size));
    for (size_t at = 0; at < size; ++at)
      for (int bit = 0; bit < 8; ++bit) {
        data[at] ^= static_cast<unsigned char>(1 << bit);
        EXPECT_NE(checksum(data.data(), static_cast<int64_t>(size)), sum);
        data[at] ^= static_cast<unsigned char>(1 << bit);
      }
    EXPECT_EQ(checksum(data.data(), static_cast<int64_t>(size)), sum);
  }
}

TEST(Checksum, TellsLengthsOfZerosAndSwapsApart) {
  const std::vector<unsigned char> zeros(200);
  std::vector<uint64_t> sums;
  for (int64_t n = 0; n <= 200; ++n) sums.push_back(checksum(zeros.data(), n));
  std::sort(sums.begin(), sums.end());
  EXPECT_EQ(std::adjacent_find(sums.begin(), sums.end()), sums.end());

  std::vector<uint64_t> words{1, 2, 3, 4, 5, 6, 7, 8};
  const uint64_t sum = checksum(words.data(), 64);
  for (size_t i = 0; i < 8; ++i)
    for (size_t j = i + 1; j < 8; ++j) {
      std::swap(words[i], words[j]);
      EXPECT_NE(checksum(words.data(), 64), sum) << i << " and " << j << " swapped";
      std::swap(words[i], words[j]);
    }
}

// Stage files written by one build are checked by another: the value is part of the format.
TEST(Checksum, IsTheSameEverywhere) {
  std::vector<unsigned char> data(100);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + 3);
  EXPECT_EQ(checksum(nullptr, 0), 15383369313885517007u);
  EXPECT_EQ(checksum(data.data(), 100), 966898808470869342u);
}

}  // namespace
}  // namespace shardq
