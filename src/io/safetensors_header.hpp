#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "io/safetensors.hpp"

namespace shardq {

/// The longest header that the format allows, in bytes.
constexpr int64_t kLargestSafetensorsHeader = 100'000'000;

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> entries;  ///< offsets already counted from the start of the file
  std::map<std::string, std::string> metadata;
};

/// Parses and validates the JSON header of `path`, whose data begins at byte `data_begin` of `file_bytes`.
/// Memory is bounded by a small multiple of the header's own length, whatever it says.
/// Errors: Error(input) naming file, tensor, expected and found.
SafetensorsHeader parse_safetensors_header(const std::filesystem::path& path, std::string_view json, int64_t data_begin,
                                           int64_t file_bytes);

/// A name from a file, fit for a one-line message: control characters escaped, at most 120 characters.
std::string printable(std::string_view name);

}  // namespace shardq
