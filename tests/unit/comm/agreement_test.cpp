#include <gtest/gtest.h>

#include <mutex>

#include "thread_ranks.hpp"

namespace shardq {
namespace {

/// What `body` under agree throws on each rank: "code message", or "nothing".
std::vector<std::string> outcomes(int ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::string> results(ranks);
  testing::ThreadRanks(ranks).run([&](Communicator& comm) {
    try {
      agree(comm, [&] { body(comm); });
      results[comm.rank()] = "nothing";
    } catch (const AgreedError& error) {
      results[comm.rank()] = fmt::format("{} {}", static_cast<int>(error.code()), error.what());
    }
  });
  return results;
}

using Strings = std::vector<std::string>;

TEST(Agree, NobodyFails) {
  EXPECT_EQ(outcomes(3, [](Communicator&) {}), Strings(3, "nothing"));
}

TEST(Agree, AllRanksThrowTheOneFailure) {
  const auto body = [](Communicator& comm) {
    if (comm.rank() == 2) fail(ExitCode::disk, "no space");
  };
  EXPECT_EQ(outcomes(4, body), Strings(4, "4 rank 2: no space"));
}

TEST(Agree, LowestFailingRankSpeaks) {
  const auto body = [](Communicator& comm) {
    if (comm.rank() == 1) throw std::runtime_error("first");
    if (comm.rank() == 3) fail(ExitCode::input, "a much longer message of the third rank");
  };
  EXPECT_EQ(outcomes(4, body), Strings(4, "77 rank 1: first"));
}

TEST(Agree, NestedKeepsTheInnerRank) {
  const auto body = [](Communicator& comm) {
    agree(comm, [&] {
      if (comm.rank() == 1) fail(ExitCode::usage, "inner");
    });
  };
  EXPECT_EQ(outcomes(3, body), Strings(3, "2 rank 1: inner"));
}

TEST(Agree, UnknownExceptionsBecomeInternal) {
  EXPECT_EQ(outcomes(2,
                     [](Communicator& comm) {
                       if (comm.rank() == 1) throw 5;
                     })[0],
            "77 rank 1: an exception of unknown type");
  EXPECT_EQ(outcomes(2, [](Communicator&) { throw std::bad_alloc(); })[1], "77 rank 0: out of host memory");
}

TEST(Agree, AloneAddsNoRank) {
  auto comm = make_single_communicator();
  try {
    agree(*comm, [] { fail(ExitCode::input, "bad"); });
    FAIL() << "did not throw";
  } catch (const AgreedError& error) {
    EXPECT_STREQ(error.what(), "bad");
    EXPECT_EQ(error.code(), ExitCode::input);
  }
}

TEST(AllGatherStrings, KeepsOrderAndEmptyOnes) {
  const Strings given = {"", "alpha", std::string(1000, 'b'), ""};
  testing::ThreadRanks(4).run(
      [&](Communicator& comm) { EXPECT_EQ(all_gather_strings(comm, given[comm.rank()]), given); });
}

TEST(AnyRank, IsTheOr) {
  testing::ThreadRanks(3).run([&](Communicator& comm) {
    EXPECT_FALSE(any_rank(comm, false));
    EXPECT_TRUE(any_rank(comm, comm.rank() == 1));
    EXPECT_TRUE(any_rank(comm, true));
  });
}

TEST(Single, LeavesDataAlone) {
  auto comm = make_single_communicator();
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  std::vector<float> values = {1, 2, 3};
  comm->all_reduce_sum(values.data(), 3);
  const Range all{0, 3};
  comm->reduce_scatter_sum(values.data(), std::span(&all, 1));
  comm->all_gather(values.data(), std::span(&all, 1), 4);
  comm->broadcast(values.data(), 12, 0);
  comm->barrier();
  EXPECT_EQ(values, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(local_rank(*comm), 0);
}

TEST(Single, RefusesOtherRanks) {
  auto comm = make_single_communicator();
  float value = 1;
  const std::vector<Range> two = {{0, 1}, {1, 1}};
  EXPECT_THROW(comm->all_gather(&value, two, 4), Error);
  const Range late{1, 2};
  EXPECT_THROW(comm->reduce_scatter_sum(&value, std::span(&late, 1)), Error);
  EXPECT_THROW(comm->broadcast(&value, 4, 1), Error);
}

#ifndef SHARDQ_WITH_CUDA
TEST(Nccl, WithoutCudaSaysSo) {
  auto comm = make_single_communicator();
  EXPECT_THROW(make_nccl_communicator(*comm, 0, nullptr), Error);
}
#endif

}  // namespace
}  // namespace shardq
