#include "pipeline/chunk_store.hpp"

#include <gtest/gtest.h>

namespace shardq {
namespace {

constexpr int64_t kRows = 64, kCols = 32;

/// Chunks whose hidden states are `100 * chunk + element`.
struct Chunks {
  explicit Chunks(int64_t count) : store(*backend) {
    for (int64_t i = 0; i < count; ++i) store.add({0, kRows});
    for (int64_t i = 0; i < count; ++i)
      store.visit(
          i,
          [&](ChunkState& chunk) {
            chunk.hidden = Tensor(*backend, DType::f32, {kRows, kCols}, "hidden");
            for (int64_t k = 0; k < kRows * kCols; ++k) chunk.hidden.as<float>()[k] = static_cast<float>(100 * i + k);
          },
          true);
  }
  float first(int64_t index) {
    float value = 0;
    store.visit(index, [&](ChunkState& chunk) { value = chunk.hidden.as<float>()[0]; });
    return value;
  }
  std::unique_ptr<Backend> backend = make_cpu_backend();
  ChunkStore store;
};

/// On the CPU host memory is backend memory as well, so what is away is seen by the tensors that are gone.
int64_t tensors_here(Chunks& chunks, int64_t at_work) {
  int64_t here = 0;
  chunks.store.visit(at_work, [&](ChunkState&) {});
  for (int64_t i = 0; i < chunks.store.size(); ++i) here += chunks.store.resident(i);
  return here;
}

TEST(ChunkStore, KeepsEverythingInBackendMemoryUnlessTold) {
  Chunks chunks(5);
  EXPECT_EQ(tensors_here(chunks, 0), 5);
}

TEST(ChunkStore, OffloadedChunksComeBackAsTheyWere) {
  Chunks chunks(5);
  chunks.store.offload();
  for (int pass = 0; pass < 3; ++pass)
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(chunks.first(i), 100.0f * static_cast<float>(i));
  EXPECT_LE(tensors_here(chunks, 0), 1);  // the next one, on its way in
}

TEST(ChunkStore, ChangesAtAnotherTapAreKept) {
  Chunks chunks(3);
  chunks.store.offload();
  for (int64_t i = 0; i < 3; ++i) chunks.first(i);
  chunks.store.visit(1, [&](ChunkState& chunk) {
    chunk.hidden.as<float>()[0] = 7;
    chunk.tap = Tensor(*chunks.backend, DType::f32, {2, 2}, "tap");
    chunk.tap.as<float>()[3] = 9;
    chunk.at = Tap::o;
  });
  EXPECT_EQ(chunks.first(0), 0.0f);
  chunks.store.visit(1, [&](ChunkState& chunk) {
    EXPECT_EQ(chunk.hidden.as<float>()[0], 7.0f);
    ASSERT_TRUE(chunk.tap);
    EXPECT_EQ(chunk.tap.as<float>()[3], 9.0f);
    chunk.tap = Tensor();
    chunk.at = Tap::gate_up;
  });
  chunks.first(0);
  chunks.store.visit(1, [&](ChunkState& chunk) { EXPECT_FALSE(chunk.tap); });
}

TEST(ChunkStore, MakesRoomWhenMemoryRunsOutAndTriesAgain) {
  Chunks chunks(4);
  int tries = 0;
  chunks.store.visit(2, [&](ChunkState& chunk) {
    const int64_t result = with_room(chunks.store, [&] {
      if (++tries == 1) throw OutOfMemory("too little");
      return chunk.hidden.size();
    });
    EXPECT_EQ(result, kRows * kCols);
    for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(chunks.store.resident(i), i == 2) << i;
    EXPECT_THROW(with_room(chunks.store, [&]() -> int { throw OutOfMemory("still too little"); }), OutOfMemory);
  });
  EXPECT_EQ(tries, 2);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(chunks.first(i), 100.0f * static_cast<float>(i));
  EXPECT_TRUE(chunks.store.offloaded());
}

}  // namespace
}  // namespace shardq
