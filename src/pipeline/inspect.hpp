#pragma once
#include <filesystem>
#include <string>

namespace shardq {

/// What a work directory (report.json, or the manifest of a job under way) or an output directory (quantization_config)
/// says, as text or JSON. Errors: Error(input) when the directory holds neither.
std::string inspect(const std::filesystem::path& directory, bool json);

}  // namespace shardq
