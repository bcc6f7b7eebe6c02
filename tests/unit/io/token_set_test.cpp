#include "io/token_set.hpp"

#include <hdf5.h>

#include <cstring>
#include <numeric>
#include <set>

#include "io/safetensors.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;
using io_testing::TempFolder;
using io_testing::write_file;
using Samples = std::vector<std::vector<int32_t>>;

Samples samples_of(const TokenSet& set) {
  Samples samples;
  for (int64_t i = 0; i < set.size(); ++i) samples.emplace_back(set[i].begin(), set[i].end());
  return samples;
}

template <class T>
std::string npy(const std::string& descr, const std::string& shape, const std::vector<T>& data, int version = 1,
                const std::string& order = "False") {
  std::string dict = "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
  const size_t head = version == 1 ? 10 : 12;
  dict.resize((head + dict.size() + 64) / 64 * 64 - head - 1, ' ');
  dict += '\n';
  std::string bytes = "\x93NUMPY";
  bytes += static_cast<char>(version);
  bytes += '\0';
  for (size_t i = 0; i < head - 8; ++i) bytes += static_cast<char>(dict.size() >> (8 * i));
  bytes += dict;
  bytes.append(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(T));
  return bytes;
}

TEST(TokenSet, ReadsNpy) {
  const TempFolder folder;
  const Samples expected{{1, 2, 3}, {4, 5, 6}};
  const auto path = folder / "t.npy";
  write_file(path, npy<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(samples_of(TokenSet(path, 10)), expected);
  write_file(path, npy<int64_t>("<i8", "(2, 3)", {1, 2, 3, 4, 5, 6}, 2));
  EXPECT_EQ(samples_of(TokenSet(path, 10)), expected);
  write_file(path, npy<uint16_t>("<u2", "(2, 3)", {1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(samples_of(TokenSet(path, 10)), expected);
  write_file(path, npy<int32_t>("<i4", "(6,)", {1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(samples_of(TokenSet(path, 10)), (Samples{{1, 2, 3, 4, 5, 6}}));
}

TEST(TokenSet, TruncatesSamplesAndLengths) {
  const TempFolder folder;
  const auto path = folder / "t.npy";
  write_file(path, npy<int32_t>("<i4", "(3, 2)", {1, 2, 3, 4, 99, 6}));
  EXPECT_EQ(samples_of(TokenSet(path, 10, 2, 0)), (Samples{{1, 2}, {3, 4}}));
  EXPECT_EQ(samples_of(TokenSet(path, 100, 0, 1)), (Samples{{1}, {3}, {99}}));
  EXPECT_EQ(TokenSet(path, 100, 50, 50).size(), 3);
}

TEST(TokenSet, RefusesBadNpy) {
  const TempFolder folder;
  const auto path = folder / "t.npy";
  const auto refuses = [&](const std::string& bytes, std::vector<std::string> words) {
    write_file(path, bytes);
    words.push_back(path.string());
    EXPECT_EQ(io_testing::error_mismatch(ExitCode::input, words, [&] { TokenSet set(path, 10); }), "");
  };
  const std::vector<int32_t> six{1, 2, 3, 4, 5, 6};
  refuses("", {"not an npy file"});
  refuses("no numpy at all", {"not an npy file"});
  refuses(npy<int32_t>("<i4", "(2, 3)", six, 9), {"version 9"});
  refuses(npy<float>("<f4", "(2, 3)", {1, 2, 3, 4, 5, 6}), {"little-endian integers", "'<f4'"});
  refuses(npy<int32_t>(">i4", "(2, 3)", six), {"little-endian", "'>i4'"});
  refuses(npy<int32_t>("<i4", "(2, 3)", six, 1, "True"), {"Fortran"});
  refuses(npy<int32_t>("<i4", "(2, 4)", six), {"needs 32 bytes", "found 24"});
  refuses(npy<int32_t>("<i4", "(1, 3)", six), {"needs 12 bytes", "found 24"});
  refuses(npy<int32_t>("<i4", "(1, 2, 3)", six), {"[samples, length]", "[1, 2, 3]"});
  refuses(npy<int32_t>("<i4", "()", {1}), {"[samples, length]"});
  refuses(npy<int32_t>("<i4", "(0, 3)", {}), {"no samples"});
  refuses(npy<int32_t>("<i4", "(2, 0)", {}), {"sample 0 is empty"});
  refuses(npy<int32_t>("<i4", "(4611686018427387904, 4)", six), {"needs"});
  refuses(npy<int32_t>("<i4", "(99999999999999999999,)", six), {"malformed shape"});
  refuses(npy<int32_t>("<i4", "(-1, 6)", six), {"malformed shape"});
  refuses(npy<int32_t>("<i4", "[2, 3]", six), {"malformed shape"});
  refuses(npy<int32_t>("<i4", "(2, 3)", six).substr(0, 60), {"header"});
  refuses(std::string("\x93NUMPY\x01\x00\x02\x00{}", 12), {"descr"});
  refuses(npy<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 10, 6}), {"id 10 at position 1 of sample 1", "[0, 10)"});
  refuses(npy<int32_t>("<i4", "(2, 3)", {1, -1, 3, 4, 5, 6}), {"id -1 at position 1 of sample 0"});
  refuses(npy<int64_t>("<i8", "(1, 2)", {1, int64_t{1} << 32}), {"id 4294967296"});  // must not wrap to 0
}

TEST(TokenSet, ReadsSafetensors) {
  const TempFolder folder;
  const auto path = folder / "t.safetensors";
  const std::vector<int64_t> ids{1, 2, 3, 4, 5, 6}, mask{1, 1, 0, 0, 1, 1};
  write_safetensors(path, {{"anything", DType::i64, {2, 3}, as_bytes_of(ids), {}}});
  EXPECT_EQ(samples_of(TokenSet(path, 10)), (Samples{{1, 2, 3}, {4, 5, 6}}));
  write_safetensors(path, {{"input_ids", DType::i64, {2, 3}, as_bytes_of(ids), {}},
                           {"attention_mask", DType::i64, {2, 3}, as_bytes_of(mask), {}}});
  EXPECT_EQ(samples_of(TokenSet(path, 10)), (Samples{{1, 2}, {5, 6}}));
  EXPECT_EQ(samples_of(TokenSet(path, 10, 1, 1)), (Samples{{1}}));
}

TEST(TokenSet, RefusesBadSafetensors) {
  const TempFolder folder;
  const auto path = folder / "t.safetensors";
  const std::vector<int64_t> ids{1, 2, 3, 4, 5, 6}, none(6);
  const std::vector<float> floats(6);
  write_safetensors(path,
                    {{"a", DType::i64, {2, 3}, as_bytes_of(ids), {}}, {"b", DType::i64, {2, 3}, as_bytes_of(ids), {}}});
  EXPECT_ERROR(ExitCode::input, ({path.string(), "input_ids", "found 2"}), TokenSet(path, 10));
  write_safetensors(path, {{"a", DType::f32, {2, 3}, as_bytes_of(floats), {}}});
  EXPECT_ERROR(ExitCode::input, ({"integers", "float32"}), TokenSet(path, 10));
  write_safetensors(path, {{"a", DType::i64, {1, 2, 3}, as_bytes_of(ids), {}}});
  EXPECT_ERROR(ExitCode::input, ({"[1, 2, 3]"}), TokenSet(path, 10));
  write_safetensors(path, {{"input_ids", DType::i64, {2, 3}, as_bytes_of(ids), {}},
                           {"attention_mask", DType::i64, {3, 2}, as_bytes_of(ids), {}}});
  EXPECT_ERROR(ExitCode::input, ({"attention_mask", "[3, 2]"}), TokenSet(path, 10));
  write_safetensors(path, {{"input_ids", DType::i64, {2, 3}, as_bytes_of(ids), {}},
                           {"attention_mask", DType::i64, {2, 3}, as_bytes_of(none), {}}});
  EXPECT_ERROR(ExitCode::input, ({"sample 0 is empty"}), TokenSet(path, 10));
  write_safetensors(path, {});
  EXPECT_ERROR(ExitCode::input, ({"input_ids", "found 0"}), TokenSet(path, 10));
}

TEST(TokenSet, ReadsJsonl) {
  const TempFolder folder;
  const auto path = folder / "t.jsonl";
  write_file(
      path,
      "[1, 2, 3]\n\n{\"input_ids\": [4], \"note\": \"x\"}\n{\"input_ids\": [5, 6], \"attention_mask\": [0, 1]}\r\n");
  EXPECT_EQ(samples_of(TokenSet(path, 10)), (Samples{{1, 2, 3}, {4}, {6}}));
  EXPECT_EQ(TokenSet(path, 10, 2).size(), 2);
}

TEST(TokenSet, RefusesBadJsonl) {
  const TempFolder folder;
  const auto path = folder / "t.jsonl";
  const auto refuses = [&](const std::string& text, const std::vector<std::string>& words) {
    write_file(path, text);
    EXPECT_EQ(io_testing::error_mismatch(ExitCode::input, words, [&] { TokenSet set(path, 10); }), "") << text;
  };
  refuses("", {"no samples"});
  refuses("\n\n", {"no samples"});
  refuses("[1]\n[2,", {"line 2", "not valid JSON"});
  refuses("[1]\n5", {"line 2", "array"});
  refuses("{\"ids\":[1]}", {"line 1", "lacks input_ids"});
  refuses("[1, 2.5]", {"line 1", "position 1", "2.5"});
  refuses("[1, \"2\"]", {"position 1"});
  refuses("[1]\n[]", {"sample 1 is empty"});
  refuses("{\"input_ids\":[1,2],\"attention_mask\":[1]}", {"attention_mask has 1", "input_ids 2"});
  refuses("{\"input_ids\":[1,2],\"attention_mask\":[0,0]}", {"sample 0 is empty"});
  refuses("[1]\n[3, 12]", {"id 12 at position 1 of sample 1"});
  refuses("[18446744073709551615]", {"position 0 of sample 0"});
}

/// Writes a dataset of int64 or, with `flag`, of bytes.
void add_dataset(const std::filesystem::path& path, const char* name, const std::vector<int64_t>& data,
                 std::vector<hsize_t> dims, hid_t stored) {
  const hid_t file = std::filesystem::exists(path) ? H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT)
                                                   : H5Fcreate(path.c_str(), H5F_ACC_EXCL, H5P_DEFAULT, H5P_DEFAULT);
  const hid_t space = H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr);
  const hid_t dataset = H5Dcreate2(file, name, stored, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  ASSERT_GE(H5Dwrite(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data()), 0);
  H5Dclose(dataset);
  H5Sclose(space);
  H5Fclose(file);
}

TEST(TokenSet, ReadsHdf5) {
  const TempFolder folder;
  add_dataset(folder / "one.h5", "whatever", {1, 2, 3, 4}, {2, 2}, H5T_STD_I32LE);
  EXPECT_EQ(samples_of(TokenSet(folder / "one.h5", 10)), (Samples{{1, 2}, {3, 4}}));
  EXPECT_EQ(samples_of(TokenSet(folder / "one.h5", 10, 1)), (Samples{{1, 2}}));
  add_dataset(folder / "flat.h5", "input_ids", {1, 2, 3, 4}, {4}, H5T_STD_I64BE);  // HDF5 converts byte order itself
  EXPECT_EQ(samples_of(TokenSet(folder / "flat.h5", 10)), (Samples{{1, 2, 3, 4}}));
  add_dataset(folder / "two.hdf5", "input_ids", {1, 2, 3, 4}, {2, 2}, H5T_STD_U16LE);
  add_dataset(folder / "two.hdf5", "attention_mask", {1, 0, 1, 1}, {2, 2}, H5T_STD_I8LE);
  add_dataset(folder / "two.hdf5", "labels", {1, 0, 1, 1}, {2, 2}, H5T_STD_I8LE);
  EXPECT_EQ(samples_of(TokenSet(folder / "two.hdf5", 10)), (Samples{{1}, {3, 4}}));
}

TEST(TokenSet, RefusesBadHdf5) {
  const TempFolder folder;
  write_file(folder / "no.h5", "not hdf5");
  EXPECT_ERROR(ExitCode::input, ({"no.h5", "not an HDF5 file"}), TokenSet(folder / "no.h5", 10));
  add_dataset(folder / "cut.h5", "input_ids", std::vector<int64_t>(10000), {100, 100}, H5T_STD_I64LE);
  std::filesystem::resize_file(folder / "cut.h5", 4000);
  EXPECT_ERROR(ExitCode::input, ({"cut.h5"}), TokenSet(folder / "cut.h5", 10));
  add_dataset(folder / "float.h5", "input_ids", {1, 2}, {1, 2}, H5T_IEEE_F32LE);
  EXPECT_ERROR(ExitCode::input, ({"integers"}), TokenSet(folder / "float.h5", 10));
  add_dataset(folder / "rank.h5", "input_ids", {1, 2}, {1, 2, 1}, H5T_STD_I32LE);
  EXPECT_ERROR(ExitCode::input, ({"rank 3"}), TokenSet(folder / "rank.h5", 10));
  add_dataset(folder / "many.h5", "a", {1, 2}, {1, 2}, H5T_STD_I32LE);
  add_dataset(folder / "many.h5", "b", {1, 2}, {1, 2}, H5T_STD_I32LE);
  EXPECT_ERROR(ExitCode::input, ({"input_ids", "found 2"}), TokenSet(folder / "many.h5", 10));
  add_dataset(folder / "mask.h5", "input_ids", {1, 2}, {1, 2}, H5T_STD_I32LE);
  add_dataset(folder / "mask.h5", "attention_mask", {1}, {1, 1}, H5T_STD_I32LE);
  EXPECT_ERROR(ExitCode::input, ({"attention_mask", "[1, 1]"}), TokenSet(folder / "mask.h5", 10));
  add_dataset(folder / "id.h5", "input_ids", {1, 10}, {1, 2}, H5T_STD_I32LE);
  EXPECT_ERROR(ExitCode::input, ({"id 10 at position 1 of sample 0"}), TokenSet(folder / "id.h5", 10));
}

TEST(TokenSet, RefusesUnknownFiles) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::input, ({"absent.npy", "does not exist"}), TokenSet(folder / "absent.npy", 10));
  write_file(folder / "t.txt", "1 2 3");
  EXPECT_ERROR(ExitCode::input, ({"t.txt", ".npy"}), TokenSet(folder / "t.txt", 10));
}

TEST(TokenSet, FingerprintFollowsContent) {
  const uint64_t sum = TokenSet(Samples{{1, 2}, {3}}).fingerprint();
  EXPECT_EQ(TokenSet(Samples{{1, 2}, {3}}).fingerprint(), sum);
  std::set<uint64_t> others{sum};
  for (const Samples& s : {Samples{{1}, {2, 3}}, Samples{{1, 2, 3}}, Samples{{3}, {1, 2}}, Samples{{1, 2}, {4}},
                           Samples{{1, 2}, {3, 0}}, Samples{{1, 2}, {3}, {}}})
    EXPECT_TRUE(others.insert(TokenSet(s).fingerprint()).second);
}

TEST(ShardSamples, EqualLengthsGiveContiguousShares) {
  for (const int64_t count : {1, 2, 7, 8, 100})
    for (const int ranks : {1, 2, 3, 4, 9}) {
      const auto shares =
          shard_samples(TokenSet(Samples(static_cast<size_t>(count), std::vector<int32_t>(5, 1))), ranks);
      ASSERT_EQ(static_cast<int>(shares.size()), ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        const Range expected = part(count, ranks, rank);
        std::vector<int64_t> list(static_cast<size_t>(expected.size()));
        std::iota(list.begin(), list.end(), expected.begin);
        EXPECT_EQ(shares[rank], list) << count << " samples, rank " << rank << " of " << ranks;
      }
    }
}

TEST(ShardSamples, RaggedSamplesAreBalancedAndUsedOnce) {
  Samples samples;
  for (int i = 0; i < 200; ++i) samples.emplace_back(static_cast<size_t>(1 + (i * 7919) % 300), 1);
  const TokenSet set(samples);
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto shares = shard_samples(set, ranks);
    std::vector<int> used(samples.size());
    int64_t most = 0, least = set.tokens();
    for (const auto& share : shares) {
      EXPECT_TRUE(std::is_sorted(share.begin(), share.end()));
      int64_t tokens = 0;
      for (const int64_t i : share) {
        ++used[i];
        tokens += static_cast<int64_t>(samples[i].size());
      }
      most = std::max(most, tokens);
      least = std::min(least, tokens);
    }
    EXPECT_EQ(used, std::vector<int>(samples.size(), 1));
    // Longest first never leaves two ranks further apart than the sample that was placed last on the fuller one, here
    // at most the longest.
    EXPECT_LE(most - least, set.longest());
    EXPECT_LE(most, (4 * (set.tokens() / ranks)) / 3 + set.longest());
    // 200 samples leave many small ones to even out with.
    EXPECT_TRUE(ranks == 1 || most - least < set.longest() / 10);
  }
}

TEST(ShardSamples, MoreRanksThanSamplesLeavesEmptyShares) {
  const auto shares = shard_samples(TokenSet(Samples{{1, 2, 3}, {4}}), 4);
  EXPECT_EQ(shares, (std::vector<std::vector<int64_t>>{{0}, {1}, {}, {}}));
}

}  // namespace
}  // namespace shardq
