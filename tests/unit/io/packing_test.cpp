#include "io/packing.hpp"

#include <random>

#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

std::vector<uint32_t> unsigned_words(const std::vector<int32_t>& words) {
  return {words.begin(), words.end()};
}

std::vector<int8_t> random_codes(int64_t count, int bits, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> code(-(1 << (bits - 1)), (1 << (bits - 1)) - 1);
  std::vector<int8_t> codes(static_cast<size_t>(count));
  for (auto& c : codes) c = static_cast<int8_t>(code(random));
  return codes;
}

/// The definition, bit by bit.
std::vector<uint32_t> reference_row(const int8_t* codes, int64_t cols, int bits) {
  std::vector<uint32_t> words(static_cast<size_t>(packed_words(cols, bits)));
  for (int64_t i = 0; i < cols; ++i)
    for (int b = 0; b < bits; ++b) {
      const int64_t bit = i * bits + b;
      if (((codes[i] + (1 << (bits - 1))) >> b) & 1) words[bit / 32] |= 1u << (bit % 32);
    }
  return words;
}

TEST(Packing, KnownVectors) {
  EXPECT_EQ(pack_rows(std::vector<int8_t>{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}, 1, 16, 4),
            (std::vector<int32_t>{1985229328, -19088744}));
  EXPECT_EQ(unsigned_words(pack_rows(std::vector<int8_t>{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1}, 1, 10, 4)),
            (std::vector<uint32_t>{0x76543210, 0x00000098}));
  EXPECT_EQ(pack_rows(std::vector<int8_t>{-128, -1, 0, 127}, 1, 4, 8), std::vector<int32_t>{-8356096});
  EXPECT_EQ(unsigned_words(pack_rows(std::vector<int8_t>{-128, -1, 0, 127, 5}, 1, 5, 8)),
            (std::vector<uint32_t>{0xff807f00, 0x00000085}));
  std::vector<int8_t> three(32);
  for (int i = 0; i < 32; ++i) three[i] = static_cast<int8_t>(i % 8 - 4);
  EXPECT_EQ(unsigned_words(pack_rows(three, 1, 32, 3)), (std::vector<uint32_t>{0x88fac688, 0xc688fac6, 0xfac688fa}));
  EXPECT_EQ(unsigned_words(pack_columns(std::vector<int8_t>{-8, -4, 0, 3, 7, 1, -1, 2, -3, 5}, 10, 1, 4)),
            (std::vector<uint32_t>{0xa79fb840, 0x000000d5}));
  EXPECT_EQ(unsigned_words(pack_columns(std::vector<int8_t>{0, 1, -8, 7, 2, 3, 4, 5, 6}, 9, 1, 4)),
            (std::vector<uint32_t>{0xdcbaf098, 0x0000000e}));
}

TEST(Packing, EqualsTheBitwiseDefinitionAndInverts) {
  for (int bits = 1; bits <= 8; ++bits)
    for (const int64_t cols : {1, 2, 3, 5, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 77, 128, 131}) {
      const int64_t rows = 3;
      const auto codes = random_codes(rows * cols, bits, static_cast<unsigned>(bits * 1000 + cols));
      const auto packed = pack_rows(codes, rows, cols, bits);
      const int64_t words = packed_words(cols, bits);
      for (int64_t r = 0; r < rows; ++r)
        ASSERT_EQ(unsigned_words({packed.begin() + r * words, packed.begin() + (r + 1) * words}),
                  reference_row(codes.data() + r * cols, cols, bits))
            << bits << " bits, " << cols << " columns, row " << r;
      ASSERT_EQ(unpack_rows(packed, rows, cols, bits), codes) << bits << " bits, " << cols << " columns";
    }
}

TEST(Packing, ColumnsAreRowsOfTheTranspose) {
  for (int bits = 2; bits <= 8; ++bits) {
    const int64_t rows = 37, groups = 5;
    const auto zeros = random_codes(rows * groups, bits, static_cast<unsigned>(bits));
    const auto packed = pack_columns(zeros, rows, groups, bits);
    const int64_t words = packed_words(rows, bits);
    ASSERT_EQ(static_cast<int64_t>(packed.size()), words * groups);
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<int8_t> column;
      for (int64_t r = 0; r < rows; ++r) column.push_back(zeros[r * groups + g]);
      const auto expected = reference_row(column.data(), rows, bits);
      for (int64_t w = 0; w < words; ++w) ASSERT_EQ(static_cast<uint32_t>(packed[w * groups + g]), expected[w]);
    }
    EXPECT_EQ(unpack_columns(packed, rows, groups, bits), zeros);
  }
}

TEST(Packing, LargeMatricesGoThroughTheThreadedPath) {
  for (const int bits : {3, 4, 8}) {
    const int64_t rows = 257, cols = 1001;
    const auto codes = random_codes(rows * cols, bits, 7);
    EXPECT_EQ(unpack_rows(pack_rows(codes, rows, cols, bits), rows, cols, bits), codes);
  }
}

TEST(Packing, EmptyMatrices) {
  EXPECT_TRUE(pack_rows({}, 0, 16, 4).empty());
  EXPECT_TRUE(pack_rows({}, 4, 0, 4).empty());
  EXPECT_TRUE(unpack_rows({}, 4, 0, 3).empty());
  EXPECT_TRUE(pack_columns({}, 0, 3, 4).empty());
}

// A code that wraps silently would be a wrong weight in a checkpoint that looks right.
TEST(Packing, ACodeOutOfRangeIsRefused) {
  for (int bits = 1; bits < 8; ++bits)
    for (const int code : {1 << (bits - 1), -(1 << (bits - 1)) - 1, 127, -128})
      for (const size_t at : {0, 9, 16, 20}) {
        if (code >= -(1 << (bits - 1)) && code < (1 << (bits - 1))) continue;
        std::vector<int8_t> codes(21, 0);
        codes[at] = static_cast<int8_t>(code);
        EXPECT_ERROR(ExitCode::internal, ({"outside", "range"}), pack_rows(codes, 1, 21, bits))
            << bits << " bits, code " << code;
      }
}

TEST(Packing, SizesAreChecked) {
  const std::vector<int8_t> codes(10);
  EXPECT_ERROR(ExitCode::internal, ({"expects 12", "found 10"}), pack_rows(codes, 3, 4, 4));
  EXPECT_ERROR(ExitCode::internal, ({"9 bits"}), pack_rows(codes, 1, 10, 9));
  EXPECT_ERROR(ExitCode::internal, ({"expects 2", "found 1"}), unpack_rows(std::vector<int32_t>(1), 1, 10, 4));
}

}  // namespace
}  // namespace shardq
