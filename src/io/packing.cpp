#include "io/packing.hpp"

#include <algorithm>
#include <cstring>

#include "core/error.hpp"

namespace shardq {
namespace {

constexpr uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0fULL;
constexpr int64_t kParallelCodes = 1 << 16;  // below, a thread team costs more than it saves

void check_bits(int bits) {
  SHARDQ_CHECK(bits >= 1 && bits <= 8, ExitCode::internal, "codes of {} bits cannot be packed, expected 1 to 8", bits);
}
void check_count(int64_t expected, size_t found) {
  SHARDQ_CHECK(static_cast<int64_t>(found) == expected, ExitCode::internal, "packing expects {} elements, found {}",
               expected, found);
}

/// Any width: a bit buffer that never holds more than 31 + 8 bits. Returns false when a code does not fit.
bool pack_stream(const int8_t* codes, int64_t count, int bits, uint32_t* words) {
  const int offset = 1 << (bits - 1);
  uint64_t buffer = 0;
  uint32_t seen = 0;
  int held = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto u = static_cast<uint32_t>(codes[i] + offset);
    seen |= u;
    buffer |= static_cast<uint64_t>(u & 0xffu) << held;
    held += bits;
    if (held >= 32) {
      *words++ = static_cast<uint32_t>(buffer);
      buffer >>= 32;
      held -= 32;
    }
  }
  if (held > 0) *words = static_cast<uint32_t>(buffer);
  return seen < (1u << bits);
}

void unpack_stream(const uint32_t* words, int64_t count, int bits, int8_t* codes) {
  const int offset = 1 << (bits - 1);
  const uint32_t mask = (1u << bits) - 1;
  uint64_t buffer = 0;
  int held = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (held < bits) {
      buffer |= static_cast<uint64_t>(*words++) << held;
      held += 32;
    }
    codes[i] = static_cast<int8_t>(static_cast<int>(buffer & mask) - offset);
    buffer >>= bits;
    held -= bits;
  }
}

/// Four bits: eight bytes fold into one word, pairs first, then pairs of pairs. q + 8 and q ^ 8 agree on the low
/// nibble.
bool pack_nibbles(const int8_t* codes, int64_t count, uint32_t* words) {
  const int64_t whole = count / 8;
  uint64_t outside = 0;
  for (int64_t w = 0; w < whole; ++w) {
    uint64_t x;
    std::memcpy(&x, codes + 8 * w, 8);
    // In range means that the high nibble repeats the sign: 0 for codes 0..7, 15 for -8..-1.
    const uint64_t sign = (x >> 3) & 0x0101010101010101ULL;
    outside |= ((x >> 4) & kLowNibbles) ^ (sign * 15);
    x = (x ^ 0x0808080808080808ULL) & kLowNibbles;
    x = (x | (x >> 4)) & 0x00ff00ff00ff00ffULL;
    x = (x | (x >> 8)) & 0x0000ffff0000ffffULL;
    words[w] = static_cast<uint32_t>(x | (x >> 16));
  }
  bool good = outside == 0;
  if (count % 8 != 0) good = pack_stream(codes + 8 * whole, count % 8, 4, words + whole) && good;
  return good;
}

void unpack_nibbles(const uint32_t* words, int64_t count, int8_t* codes) {
  const int64_t whole = count / 8;
  for (int64_t w = 0; w < whole; ++w) {
    uint64_t x = words[w];
    x = (x | (x << 16)) & 0x0000ffff0000ffffULL;
    x = (x | (x << 8)) & 0x00ff00ff00ff00ffULL;
    x = (x | (x << 4)) & kLowNibbles;
    x ^= 0x0808080808080808ULL;  // u - 8 in four bits; now extend the sign to eight
    x |= ((x >> 3) & 0x0101010101010101ULL) * 0xf0;
    std::memcpy(codes + 8 * w, &x, 8);
  }
  if (count % 8 != 0) unpack_stream(words + whole, count % 8, 4, codes + 8 * whole);
}

/// Eight bits: the bytes themselves with the sign bit flipped.
void pack_bytes(const int8_t* codes, int64_t count, uint32_t* words) {
  auto* target = reinterpret_cast<uint8_t*>(words);
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<uint8_t>(codes[i]) ^ 0x80u;
}
void unpack_bytes(const uint32_t* words, int64_t count, int8_t* codes) {
  const auto* source = reinterpret_cast<const uint8_t*>(words);
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(source[i] ^ 0x80u);
}

bool pack_row(const int8_t* codes, int64_t count, int bits, uint32_t* words) {
  if (bits == 4) return pack_nibbles(codes, count, words);
  if (bits != 8) return pack_stream(codes, count, bits, words);
  pack_bytes(codes, count, words);
  return true;
}

void unpack_row(const uint32_t* words, int64_t count, int bits, int8_t* codes) {
  if (bits == 4)
    unpack_nibbles(words, count, codes);
  else if (bits == 8)
    unpack_bytes(words, count, codes);
  else
    unpack_stream(words, count, bits, codes);
}

std::vector<int8_t> transposed(std::span<const int8_t> source, int64_t rows, int64_t cols) {
  std::vector<int8_t> target(source.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) target[c * rows + r] = source[r * cols + c];
  return target;
}

}  // namespace

std::vector<int32_t> pack_rows(std::span<const int8_t> codes, int64_t rows, int64_t cols, int bits) {
  check_bits(bits);
  check_count(rows * cols, codes.size());
  const int64_t words = packed_words(cols, bits);
  std::vector<int32_t> packed(static_cast<size_t>(rows * words));
  auto* target = reinterpret_cast<uint32_t*>(packed.data());
  bool good = true;
#pragma omp parallel for schedule(static) reduction(&& : good) if (rows * cols >= kParallelCodes)
  for (int64_t r = 0; r < rows; ++r) good = pack_row(codes.data() + r * cols, cols, bits, target + r * words) && good;
  SHARDQ_CHECK(good, ExitCode::internal, "a code is outside the {}-bit range [{}, {}]", bits, -(1 << (bits - 1)),
               (1 << (bits - 1)) - 1);
  return packed;
}

std::vector<int8_t> unpack_rows(std::span<const int32_t> packed, int64_t rows, int64_t cols, int bits) {
  check_bits(bits);
  const int64_t words = packed_words(cols, bits);
  check_count(rows * words, packed.size());
  std::vector<int8_t> codes(static_cast<size_t>(rows * cols));
  const auto* source = reinterpret_cast<const uint32_t*>(packed.data());
#pragma omp parallel for schedule(static) if (rows * cols >= kParallelCodes)
  for (int64_t r = 0; r < rows; ++r) unpack_row(source + r * words, cols, bits, codes.data() + r * cols);
  return codes;
}

// Zero points are a group_size-th of the codes: a transposition each way costs nothing that matters.
std::vector<int32_t> pack_columns(std::span<const int8_t> zeros, int64_t rows, int64_t groups, int bits) {
  check_bits(bits);
  check_count(rows * groups, zeros.size());
  const std::vector<int32_t> packed = pack_rows(transposed(zeros, rows, groups), groups, rows, bits);
  const int64_t words = packed_words(rows, bits);
  std::vector<int32_t> target(packed.size());
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t w = 0; w < words; ++w) target[w * groups + g] = packed[g * words + w];
  return target;
}

std::vector<int8_t> unpack_columns(std::span<const int32_t> packed, int64_t rows, int64_t groups, int bits) {
  check_bits(bits);
  const int64_t words = packed_words(rows, bits);
  check_count(words * groups, packed.size());
  std::vector<int32_t> turned(packed.size());
  for (int64_t w = 0; w < words; ++w)
    for (int64_t g = 0; g < groups; ++g) turned[g * words + w] = packed[w * groups + g];
  return transposed(unpack_rows(turned, groups, rows, bits), groups, rows);
}

}  // namespace shardq
