#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace shardq {

/// Words of a dense little-endian stream of `count` codes of `bits` bits: ceil(count * bits / 32).
inline int64_t packed_words(int64_t count, int bits) {
  return (count * bits + 31) / 32;
}

/// Packs signed codes along columns as compressed-tensors' pack_to_int32 does: u = q + 2^(bits-1), element i at bits
/// [i*bits, (i+1)*bits) of the row's stream, LSB first, unused bits 0.  Shapes: codes [rows, cols] -> [rows,
/// packed_words(cols, bits)]. Source: formats.md 5.3.
std::vector<int32_t> pack_rows(std::span<const int8_t> codes, int64_t rows, int64_t cols, int bits);
/// Packs zero points [rows, groups] along rows -> [packed_words(rows, bits), groups].
std::vector<int32_t> pack_columns(std::span<const int8_t> zeros, int64_t rows, int64_t groups, int bits);
/// Inverses.
std::vector<int8_t> unpack_rows(std::span<const int32_t> packed, int64_t rows, int64_t cols, int bits);
std::vector<int8_t> unpack_columns(std::span<const int32_t> packed, int64_t rows, int64_t groups, int bits);

}  // namespace shardq
