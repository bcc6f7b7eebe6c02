#include <gtest/gtest.h>

#include <cstring>

#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {
namespace {

TEST(CpuMemory, CountsWhatIsInUse) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  EXPECT_EQ(backend->memory().in_use, 0);
  {
    const Tensor small(*backend, DType::f32, {10}, "small");
    Tensor large(*backend, DType::f32, {3, 1 << 20}, "large");
    std::memset(large.data(), 1, static_cast<size_t>(large.bytes()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(large.data()) % 64, 0u);
    EXPECT_EQ(backend->memory().in_use, 40 + 3 * 4 * (1 << 20));
  }
  EXPECT_EQ(backend->memory().in_use, 0);
  EXPECT_EQ(backend->memory().peak, 40 + 3 * 4 * (1 << 20));
  EXPECT_GT(backend->memory().available, 0);
  EXPECT_GE(backend->memory().total, backend->memory().available);
}

TEST(CpuMemory, EmptyTensorsExist) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const Tensor empty(*backend, DType::f32, {0, 5}, "empty");
  EXPECT_TRUE(static_cast<bool>(empty));
  EXPECT_EQ(empty.size(), 0);
}

TEST(CpuMemory, RefusalNamesTheBufferAndBothAmounts) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const int64_t bytes = int64_t{1} << 50;
  try {
    backend->allocate(bytes, "expert Hessians");
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ExitCode::internal);
    EXPECT_NE(message.find("expert Hessians"), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(bytes)), std::string::npos) << message;
    EXPECT_NE(message.find("available"), std::string::npos) << message;
  }
}

TEST(CpuMemory, CopiesBothWays) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const Tensor a(*backend, DType::i32, {4}, "a"), b(*backend, DType::i32, {4}, "b");
  const int32_t values[4] = {1, -2, 3, -4};
  int32_t back[4] = {};
  backend->upload(a.data(), values, sizeof values);
  backend->copy(b.data(), a.data(), sizeof values);
  backend->zero(a.data(), sizeof values);
  backend->download(back, b.data(), sizeof values);
  EXPECT_EQ(std::memcmp(back, values, sizeof values), 0);
  backend->download(back, a.data(), sizeof values);
  EXPECT_EQ(back[1], 0);
  backend->prefetch(a.data(), values, sizeof values);
  backend->wait_prefetch();
  EXPECT_EQ(std::memcmp(a.data(), values, sizeof values), 0);
}

}  // namespace
}  // namespace shardq
