// Scans and conversions of tensor elements as they lie in checkpoints.
#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "io/checkpoint.hpp"

namespace shardq {
namespace {

constexpr int64_t kParallelElements = 1 << 16;
constexpr int64_t kScanBlock = 1 << 14;

/// Exponent bits all ones: infinity or NaN. Works on any byte alignment, as safetensors promises none.
template <class Word>
bool any_nonfinite(const std::byte* at, int64_t count, Word exponent) {
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, at + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    found |= static_cast<Word>((word & exponent) == exponent);
  }
  return found != 0;
}

template <class Word>
int64_t first_in_block(const std::byte* at, int64_t begin, int64_t end, Word exponent) {
  for (int64_t i = begin; i < end; ++i)
    if (any_nonfinite<Word>(at + i * static_cast<int64_t>(sizeof(Word)), 1, exponent)) return i;
  return end;
}

template <class Word>
int64_t scan(std::span<const std::byte> bytes, Word exponent) {
  const auto count = static_cast<int64_t>(bytes.size() / sizeof(Word));
  const int64_t blocks = (count + kScanBlock - 1) / kScanBlock;
  int64_t first = count;
#pragma omp parallel for schedule(static) reduction(min : first) if (count >= kParallelElements)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = b * kScanBlock, end = std::min(count, begin + kScanBlock);
    if (begin >= first ||
        !any_nonfinite<Word>(bytes.data() + begin * static_cast<int64_t>(sizeof(Word)), end - begin, exponent))
      continue;
    first = std::min(first, first_in_block<Word>(bytes.data(), begin, end, exponent));
  }
  return first == count ? -1 : first;
}

template <class T>
T load(const void* source, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(source) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(void* target, int64_t i, T value) {
  std::memcpy(static_cast<char*>(target) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

template <class From, class To, class Convert>
void convert_with(const void* source, void* target, int64_t count, Convert convert) {
#pragma omp parallel for simd schedule(static) if (parallel : count >= kParallelElements)
  for (int64_t i = 0; i < count; ++i) store<To>(target, i, convert(load<From>(source, i)));
}

template <class From>
void convert_from(const void* source, void* target, DType to, int64_t count) {
  switch (to) {
    case DType::f32:
      return convert_with<From, float>(source, target, count, [](From value) { return to_float(value); });
    case DType::bf16:
      return convert_with<From, BFloat16>(source, target, count, [](From value) { return to_bf16(to_float(value)); });
    case DType::f16:
      return convert_with<From, Float16>(source, target, count, [](From value) { return to_f16(to_float(value)); });
    default:
      fail(ExitCode::internal, "elements cannot be converted to {}, expected bfloat16, float16 or float32",
           torch_name(to));
  }
}

}  // namespace

int64_t first_nonfinite(std::span<const std::byte> bytes, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return scan<uint16_t>(bytes, 0x7f80);
    case DType::f16:
      return scan<uint16_t>(bytes, 0x7c00);
    case DType::f32:
      return scan<uint32_t>(bytes, 0x7f800000u);
    default:
      fail(ExitCode::internal, "{} elements cannot be scanned for NaN, expected bfloat16, float16 or float32",
           torch_name(dtype));
  }
}

void convert_elements(const void* source, DType from, void* target, DType to, int64_t count) {
  if (from == to) {
    if (count > 0) std::memcpy(target, source, static_cast<size_t>(count * size_of(from)));
    return;
  }
  switch (from) {
    case DType::bf16:
      return convert_from<BFloat16>(source, target, to, count);
    case DType::f16:
      return convert_from<Float16>(source, target, to, count);
    case DType::f32:
      return convert_from<float>(source, target, to, count);
    default:
      fail(ExitCode::internal, "{} elements cannot be converted, expected bfloat16, float16 or float32",
           torch_name(from));
  }
}

}  // namespace shardq
