#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace shardq {

/// Whole file as text. Error(input) naming the path when it cannot be read.
std::string read_text(const std::filesystem::path& path);
/// Durable replacement: temp file, write, fsync, rename, fsync of the folder. Error(disk) with path, bytes and reason.
void write_text_durably(const std::filesystem::path& path, std::string_view text);
/// Copies bytes durably (same steps).
void copy_file_durably(const std::filesystem::path& from, const std::filesystem::path& to);
/// fsync of a folder, so that renames in it survive power loss.
void sync_folder(const std::filesystem::path& folder);
/// rename + fsync of the parent folder(s).
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);
/// Bytes free for this user on the file system of `path` (nearest existing parent).
int64_t free_bytes(const std::filesystem::path& path);
/// 64-bit checksum (XXH3-like quality is not needed; FNV-1a over 8-byte words or CRC-64: the choice is documented in
/// the .cpp).
uint64_t checksum(const void* data, int64_t bytes);

}  // namespace shardq
