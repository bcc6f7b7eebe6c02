#include "model/tensor_reader.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "core/error.hpp"
#include "model_variants.hpp"

namespace shardq {
namespace {

// Larger than a piece of reading, and no multiple of anything.
constexpr int64_t kRows = 1301, kCols = 4099;

/// A model with a bf16 tensor "big" beside its own, of which no two near elements are equal.
struct BigTensor {
  explicit BigTensor(Shape shape) : model("llama") {
    model.add("big", DType::bf16, std::move(shape));
    for (int64_t i = 0; i < element_count(model.tensors["big"].shape); ++i) values()[i] = value(i);
  }
  static BFloat16 value(int64_t i) { return to_bf16(static_cast<float>(i % 65521) - 32000.0f); }
  BFloat16* values() { return reinterpret_cast<BFloat16*>(model.tensors["big"].owned.data()); }
  TemporaryModel model;
};

/// Rows of a linear as floats, read in `compute`.
std::vector<float> read_rows(const Checkpoint& checkpoint, const LinearSpec& linear, Range rows, DType compute) {
  constexpr int64_t kGuard = 8;  // bytes behind the target, which must stay
  const int64_t count = rows.size() * linear.cols, bytes = count * size_of(compute);
  std::vector<std::byte> target(bytes + kGuard, std::byte{0x5a});
  TensorReader(checkpoint).read({{&linear, nullptr, rows, target.data()}}, compute, true);
  for (int64_t i = bytes; i < bytes + kGuard; ++i) EXPECT_EQ(target[i], std::byte{0x5a});
  std::vector<float> values(count);
  convert_elements(target.data(), compute, values.data(), DType::f32, count);
  return values;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::input);
    return error.what();
  }
  return "no error";
}

LinearSpec big_linear(int64_t rows, int64_t cols) {
  LinearSpec linear;
  linear.module = "none";
  linear.tensor = "big";
  linear.rows = rows;
  linear.cols = cols;
  return linear;
}

TEST(TensorReader, LargeTensorsArePutTogetherFromPieces) {
  BigTensor big({kRows, kCols});
  const Checkpoint checkpoint = big.model.write();
  const LinearSpec linear = big_linear(kRows, kCols);
  for (const Range rows : {Range{0, kRows}, Range{17, kRows - 1}, Range{600, 601}, Range{5, 5}})
    for (DType compute : {DType::bf16, DType::f32}) {
      const std::vector<float> got = read_rows(checkpoint, linear, rows, compute);
      int64_t wrong = 0;
      for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i)
        wrong += got[i] != to_float(BigTensor::value(rows.begin * kCols + i));
      EXPECT_EQ(wrong, 0) << rows.begin << " to " << rows.end;
    }
}

TEST(TensorReader, SlicesOfLargeFusedTensors) {
  constexpr int64_t kInner = 331, kWidth = 4097;  // a slice is 2 * kInner rows: gate, then up
  BigTensor big({3, 2 * kInner, kWidth});
  const Checkpoint checkpoint = big.model.write();
  LinearSpec up = big_linear(kInner, kWidth);
  up.fused_index = 2;
  up.fused_row = kInner;
  const std::vector<float> got = read_rows(checkpoint, up, {1, kInner}, DType::bf16);
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); i += 101)
    ASSERT_EQ(got[i], to_float(BigTensor::value((2 * 2 * kInner + kInner + 1) * kWidth + i)));
  // Transposed: rows of ours are columns [kInner, 2 kInner) of lines that are 2 kInner long.
  BigTensor turned({3, kWidth, 2 * kInner});
  const Checkpoint turned_checkpoint = turned.model.write();
  up.fused_transposed = true;
  for (DType compute : {DType::bf16, DType::f32}) {
    const std::vector<float> values = read_rows(turned_checkpoint, up, {3, kInner}, compute);
    for (int64_t r = 3; r < kInner; r += 7)
      for (int64_t c = 0; c < kWidth; c += 13)
        ASSERT_EQ(values[(r - 3) * kWidth + c], to_float(BigTensor::value((2 * kWidth + c) * 2 * kInner + kInner + r)));
  }
}

TEST(TensorReader, TheFirstOfSeveralErrorsIsNamedWithItsPlaceInTheFile) {
  for (DType compute : {DType::bf16, DType::f32}) {
    BigTensor big({kRows, kCols});
    big.values()[1300 * kCols + 4098] = to_bf16(INFINITY);
    big.values()[601 * kCols + 3] = to_bf16(NAN);
    const Checkpoint checkpoint = big.model.write();
    const LinearSpec linear = big_linear(kRows, kCols);
    // The first item fails long after the second, which is one row.
    std::vector<std::byte> target(512 * kCols * size_of(compute)), row(kCols * size_of(compute));
    const std::vector<ReadItem> items{{&linear, nullptr, {91, 602}, target.data()},
                                      {&linear, nullptr, {1300, 1301}, row.data()}};
    for (int repeat = 0; repeat < 10; ++repeat)
      EXPECT_NE(message_of([&] {
                  TensorReader(checkpoint).read(items, compute, true);
                }).find("tensor big: NaN or infinity at [601, 3] of shape [1301, 4099]"),
                std::string::npos);
    EXPECT_NE(message_of([&] {
                read_rows(checkpoint, linear, {602, kRows}, compute);
              }).find("[1300, 4098]"),
              std::string::npos);
    EXPECT_EQ(message_of([&] { read_rows(checkpoint, linear, {602, 1300}, compute); }), "no error");
  }
  BigTensor turned({3, 4097, 662});
  turned.values()[(2 * 4097 + 4001) * 662 + 331 + 9] = to_bf16(NAN);
  const Checkpoint checkpoint = turned.model.write();
  LinearSpec up = big_linear(331, 4097);
  up.fused_index = 2;
  up.fused_row = 331;
  up.fused_transposed = true;
  EXPECT_NE(message_of([&] {
              read_rows(checkpoint, up, {2, 331}, DType::f32);
            }).find("[2, 4001, 340]"),
            std::string::npos);
  EXPECT_EQ(message_of([&] { read_rows(checkpoint, up, {10, 331}, DType::f32); }), "no error");
}

TEST(TensorReader, AFileCutWhileInUseNamesFileTensorAndOffset) {
  BigTensor big({kRows, kCols});
  const Checkpoint checkpoint = big.model.write();
  const auto& path = checkpoint.shards()[0]->path();
  const int64_t cut = checkpoint.entry("big").begin + 700 * kCols * 2 + 5;
  std::filesystem::resize_file(path, cut);
  const std::string message = message_of([&] {
    read_rows(checkpoint, big_linear(kRows, kCols), {0, kRows}, DType::bf16);
  });
  for (const std::string& word : {path.string(), std::string("'big'"), "at byte " + std::to_string(cut) + ":"})
    EXPECT_NE(message.find(word), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(TensorReader, RowsOfQuantizedLinearsAreThoseOfTheWhole) {
  for (const int bits : {3, 4}) {
    PackedPair pair("qwen3_moe", bits, false, 8);  // zero points are packed along rows
    const Checkpoint checkpoint = pair.packed.write();
    const LayerSpec layer = read_model_spec(checkpoint).layer[0];
    const LinearSpec& linear = layer.linears[0];
    ASSERT_GT(linear.rows, 40);
    const std::vector<float> whole = read_rows(checkpoint, linear, {0, linear.rows}, DType::f32);
    for (const Range rows : {Range{0, 1}, Range{31, 33}, Range{32, linear.rows}, Range{37, 38}, Range{7, 41}}) {
      const std::vector<float> got = read_rows(checkpoint, linear, rows, DType::f32);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin() + rows.begin * linear.cols)) << rows.begin;
    }
  }
}

}  // namespace
}  // namespace shardq
