#include "comm/schedule.hpp"

#include <gtest/gtest.h>

namespace shardq {
namespace {

TEST(Schedule, HashKnowsNamesSizesAndOrder) {
  Schedule a, b, c, d;
  a.add("broadcast", 8);
  a.add("barrier", 0);
  b.add("barrier", 0);
  b.add("broadcast", 8);
  c.add("broadcast", 9);
  c.add("barrier", 0);
  d.add("broadcast", 8);
  d.add("barrier", 0);
  EXPECT_EQ(a.hash(), d.hash());
  EXPECT_NE(a.hash(), b.hash());
  EXPECT_NE(a.hash(), c.hash());
  EXPECT_EQ(a.text(), "broadcast 8\nbarrier 0\n");
  a.clear();
  EXPECT_NE(a.hash(), d.hash());
  EXPECT_EQ(a.text(), "");
}

TEST(Schedule, FirstDifference) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(first_difference(Texts{"a 1\nb 2\n", "a 1\nb 2\n"}), "");
  EXPECT_EQ(first_difference(Texts{"a 1\nnccl b 2\n", "a 1\nnccl b 2\n", "a 1\nnccl b 22\n"}),
            "call 2 is nccl b of 2 bytes on rank 0, nccl b of 22 bytes on rank 2");
  EXPECT_EQ(first_difference(Texts{"a 1\n", "a 1\nb 2\n"}), "call 2 is nothing on rank 0, b of 2 bytes on rank 1");
  EXPECT_EQ(first_difference(Texts{"a 1\nb 2\n", ""}), "call 1 is a of 1 bytes on rank 0, nothing on rank 1");
}

}  // namespace
}  // namespace shardq
