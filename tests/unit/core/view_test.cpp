#include "core/view.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace shardq {
namespace {

TEST(Shape, CountsAndPrints) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({2, 3, 4}), 24);
  EXPECT_EQ(element_count({2, 0}), 0);
  EXPECT_EQ(to_string(Shape{}), "[]");
  EXPECT_EQ(to_string(Shape{2, 30}), "[2, 30]");
}

TEST(Part, CoversEveryItemOnceAndEvenly) {
  for (const int64_t count : {0, 1, 2, 7, 100, 1000003})
    for (const int ranks : {1, 2, 3, 4, 8, 13}) {
      int64_t next = 0, most = 0, least = count;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range range = part(count, ranks, rank);
        EXPECT_EQ(range.begin, next);
        next = range.end;
        most = std::max(most, range.size());
        least = std::min(least, range.size());
        EXPECT_GE(part(count, ranks, 0).size(), range.size());  // remainders go to the first ranks
      }
      EXPECT_EQ(next, count);
      EXPECT_LE(most - least, 1);
    }
}

TEST(MatrixView, RangesAddressTheRightElements) {
  std::vector<int32_t> data(4 * 6);
  std::iota(data.begin(), data.end(), 0);
  const MatrixView matrix{data.data(), DType::i32, 4, 5, 6};  // a column of padding
  const MatrixView inner = matrix.row_range(1, 4).col_range(2, 4);
  EXPECT_EQ(inner.rows, 3);
  EXPECT_EQ(inner.cols, 2);
  EXPECT_EQ(inner.stride, 6);
  EXPECT_EQ(inner.as<int32_t>()[0], 1 * 6 + 2);
  EXPECT_EQ(inner.as<int32_t>()[2 * inner.stride + 1], 3 * 6 + 3);
  EXPECT_EQ(matrix.row_range(4, 4).rows, 0);
}

TEST(StackView, RangesAddressTheRightElements) {
  std::vector<int16_t> data(3 * 20);
  std::iota(data.begin(), data.end(), 0);
  const StackView stack{data.data(), DType::i16, 3, 4, 5, 5, 20};
  EXPECT_EQ(stack[2].as<int16_t>()[0], 40);
  EXPECT_EQ(stack[2].rows, 4);
  const StackView part = stack.range(1, 3).row_range(1, 3).col_range(2, 5);
  EXPECT_EQ(part.count, 2);
  EXPECT_EQ(part.rows, 2);
  EXPECT_EQ(part.cols, 3);
  EXPECT_EQ(part[1].as<int16_t>()[part.stride + 2], 2 * 20 + 2 * 5 + 4);
  const StackView one = as_stack(stack[1]);
  EXPECT_EQ(one.count, 1);
  EXPECT_EQ(one[0].as<int16_t>()[0], 20);
}

}  // namespace
}  // namespace shardq
