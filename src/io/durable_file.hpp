#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace shardq {

/// A file on its way to a durable name: bytes go to `.<name>.tmp` in the same folder, and only commit() gives them
/// their name. A reader of the final name sees the former content or the whole new one, after a crash too. The temp
/// name is fixed, so that a killed run's leftover is overwritten by its successor and not left to pile up; two writers
/// of one name at a time are a caller's error. Errors: Error(disk) naming path, bytes wanted and the system's reason;
/// the destructor removes an uncommitted temp file.
class DurableFile {
 public:
  /// expected_bytes > 0: the space is reserved up front (or compared with what is free where the file system cannot
  /// reserve), so that a full disk shows before the work and not in the middle of it.
  explicit DurableFile(std::filesystem::path path, int64_t expected_bytes = 0);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes);
  /// fsync, close, rename, fsync of the folder. Nothing may be written afterwards.
  void commit();
  int64_t written() const { return written_; }
  /// The name that a file has before it is committed; folders are swept of these after a crash.
  static std::filesystem::path temporary_name(const std::filesystem::path& path);
  static bool is_temporary(const std::filesystem::path& path);

 private:
  void reserve(int64_t bytes);
  [[noreturn]] void fail_with(const char* action, int error) const;

  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  int64_t expected_ = 0, written_ = 0;
};

}  // namespace shardq
