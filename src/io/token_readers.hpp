#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace shardq {

/// Token ids as a file holds them, unchecked: one vector a sample, masked tokens already dropped.
using RawSamples = std::vector<std::vector<int64_t>>;

/// Each reads at most max_samples samples (0: all). Errors: Error(input) naming the file and what was expected.
RawSamples read_npy_tokens(const std::filesystem::path& path, int64_t max_samples);
RawSamples read_safetensors_tokens(const std::filesystem::path& path, int64_t max_samples);
RawSamples read_hdf5_tokens(const std::filesystem::path& path, int64_t max_samples);
RawSamples read_jsonl_tokens(const std::filesystem::path& path, int64_t max_samples);

/// The samples of a [samples, length] array; mask (same shape, or empty) says which tokens are real.
RawSamples split_samples(const std::vector<int64_t>& ids, const std::vector<int64_t>& mask, int64_t samples,
                         int64_t length);

}  // namespace shardq
