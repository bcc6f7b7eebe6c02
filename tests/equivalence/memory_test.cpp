// Memory of the backends: transfers of any size arrive whole, errors name the buffer.
#include <numeric>
#include <thread>

#include "core/error.hpp"
#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

using MemoryEquivalence = Equivalence;

std::vector<uint8_t> pattern(int64_t bytes, uint32_t seed) {
  std::vector<uint8_t> values(static_cast<size_t>(bytes));
  uint32_t state = seed * 2654435761u + 1;
  for (uint8_t& value : values) value = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  return values;
}

TEST_F(MemoryEquivalence, TransfersOfAnySizeComeBack) {
  constexpr int64_t kMiB = 1 << 20;
  for (int64_t bytes :
       {int64_t{1}, int64_t{255}, int64_t{257}, 8 * kMiB - 1, 8 * kMiB, 8 * kMiB + 1, 150 * kMiB + 13}) {
    const auto sent = pattern(bytes, static_cast<uint32_t>(bytes));
    Tensor tensor(gpu(), DType::u8, {bytes}, "test");
    auto source = sent;
    gpu().upload(tensor.data(), source.data(), bytes);
    std::fill(source.begin(), source.end(), uint8_t{0});  // the source may be reused at once
    EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), tensor), sent)) << bytes << " bytes";
  }
}

TEST_F(MemoryEquivalence, UploadsFromPageLockedMemoryMayReuseIt) {
  for (int64_t bytes : {int64_t{5}, int64_t{1} << 20, (int64_t{96} << 20) + 7}) {
    const auto sent = pattern(bytes, static_cast<uint32_t>(bytes) + 1);
    auto* source = static_cast<uint8_t*>(gpu().allocate_host(bytes));
    const Tensor tensor(gpu(), DType::u8, {bytes}, "test");
    for (int64_t part : {int64_t{0}, bytes / 3}) {  // from the middle of a page-locked block too
      std::copy(sent.begin(), sent.end(), source);
      gpu().zero(tensor.data(), bytes);
      gpu().upload(tensor.as<uint8_t>() + part, source + part, bytes - part);
      std::fill_n(source, bytes, uint8_t{0});
      auto want = sent;
      std::fill_n(want.begin(), part, uint8_t{0});
      EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), tensor), want)) << bytes << " bytes from " << part;
    }
    gpu().release_host(source);
  }
}

TEST_F(MemoryEquivalence, ManySmallUploadsKeepTheirOrder) {
  Tensor tensor(gpu(), DType::i32, {4096}, "test");
  gpu().zero(tensor.data(), tensor.bytes());
  for (int round = 0; round < 3; ++round)
    for (int32_t i = 0; i < 4096; ++i) {
      const int32_t value = i * 7 + round;
      gpu().upload(tensor.as<int32_t>() + i, &value, sizeof(value));
    }
  const auto got = raw_of<int32_t>(gpu(), tensor);
  for (int32_t i = 0; i < 4096; ++i) ASSERT_EQ(got[i], i * 7 + 2);
}

TEST_F(MemoryEquivalence, CopyAndZeroTouchTheirRangeOnly) {
  const auto sent = pattern(1000, 3);
  const Tensor source = to_tensor_raw(gpu(), DType::u8, {1000}, sent);
  const Tensor target = poisoned(gpu(), DType::u8, {1000});
  gpu().copy(target.as<uint8_t>() + 100, source.as<uint8_t>() + 50, 300);
  gpu().zero(target.as<uint8_t>() + 390, 5);
  auto want = std::vector<uint8_t>(1000, 0xFF);
  std::copy_n(sent.begin() + 50, 300, want.begin() + 100);
  std::fill_n(want.begin() + 390, 5, uint8_t{0});
  EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), target), want));
}

TEST_F(MemoryEquivalence, PrefetchFromAnotherThreadArrivesBeforeLaterWork) {
  const int64_t bytes = 5'000'011;
  const auto sent = pattern(bytes, 9);
  auto* source = static_cast<uint8_t*>(gpu().allocate_host(bytes));
  std::copy(sent.begin(), sent.end(), source);
  Tensor staged(gpu(), DType::u8, {bytes}, "test"), result(gpu(), DType::u8, {bytes}, "test");
  std::thread([&] { gpu().prefetch(staged.data(), source, bytes); }).join();
  gpu().wait_prefetch();
  gpu().copy(result.data(), staged.data(), bytes);
  EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), result), sent));
  gpu().synchronize();
  gpu().release_host(source);
  void* again = gpu().allocate_host(bytes);  // kept blocks are handed out again
  EXPECT_NE(again, nullptr);
  gpu().release_host(again);
}

TEST_F(MemoryEquivalence, FreedMemoryIsReusedOnlyByLaterWork) {
  // Each round overwrites the memory of the one before, whose copy out was already enqueued.
  Tensor kept(gpu(), DType::u8, {64, 100'000}, "test");
  for (int round = 0; round < 64; ++round) {
    const auto sent = pattern(100'000, static_cast<uint32_t>(round));
    const Tensor scratch = to_tensor_raw(gpu(), DType::u8, {100'000}, sent);
    gpu().copy(kept.as<uint8_t>() + round * 100'000, scratch.data(), 100'000);
  }
  const auto got = raw_of<uint8_t>(gpu(), kept);
  for (int round = 0; round < 64; ++round)
    ASSERT_TRUE(std::equal(got.begin() + round * 100'000, got.begin() + (round + 1) * 100'000,
                           pattern(100'000, static_cast<uint32_t>(round)).begin()))
        << "round " << round;
}

TEST_F(MemoryEquivalence, CountsWhatIsInUse) {
  const MemoryInfo before = gpu().memory();
  {
    const Tensor tensor(gpu(), DType::u8, {50'000'000}, "test");
    const MemoryInfo during = gpu().memory();
    EXPECT_GE(during.in_use, before.in_use + 50'000'000);
    EXPECT_GE(during.peak, during.in_use);
    EXPECT_GT(during.total, 0);
  }
  gpu().synchronize();
  EXPECT_LE(gpu().memory().in_use, before.in_use + 4096);
}

TEST_F(MemoryEquivalence, EmptyAllocationsAndTransfersDoNothing) {
  const Tensor empty(gpu(), DType::f32, {0, 7}, "test");
  gpu().upload(empty.data(), nullptr, 0);
  gpu().download(nullptr, empty.data(), 0);
  gpu().copy(empty.data(), empty.data(), 0);
  gpu().zero(empty.data(), 0);
  gpu().prefetch(empty.data(), nullptr, 0);
  gpu().synchronize();
}

TEST_F(MemoryEquivalence, OutOfMemoryNamesTheBufferAndTheSizes) {
  for (Backend* backend : {&cpu(), &gpu()}) {
    try {
      backend->allocate(int64_t{1} << 46, "Hessians of layer 7");
      FAIL() << backend->name() << " handed out 64 TiB";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::internal);
      EXPECT_NE(std::string(error.what()).find("Hessians of layer 7"), std::string::npos) << error.what();
    }
  }
  // The backend goes on working.
  EXPECT_TRUE(same(raw_of<float>(gpu(), to_tensor(gpu(), DType::f32, {3}, {1, 2, 3})), std::vector<float>{1, 2, 3}));
}

}  // namespace
}  // namespace shardq::equivalence
