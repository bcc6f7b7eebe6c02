#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/view.hpp"

namespace shardq {

/// Where one tensor lies in a safetensors file.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  int64_t begin = 0, end = 0;  ///< bytes from the start of the FILE
  int64_t bytes() const { return end - begin; }
};

/// A safetensors file, mapped read-only. The constructor validates everything the header claims (stricter than the
/// official reader: duplicate keys are refused) and throws Error(input) that names the file, the tensor, what was
/// expected and what was found. Names that are empty or hold a NUL, ranks above 64 and sub-byte dtypes are refused too.
/// Source: safetensors README.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Null where absent.
  const TensorEntry* find(const std::string& name) const;
  /// The mapped bytes; no alignment is promised.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  /// Reads target.size() bytes of the tensor from byte `offset` of it with pread: faster than page faults for bulk
  /// reads, and an I/O error or a file cut short meanwhile is an Error(input) instead of a SIGBUS.
  void read(const TensorEntry& entry, int64_t offset, std::span<std::byte> target) const;
  /// Asks the kernel to read the tensor ahead; returns at once.
  void will_need(const TensorEntry& entry) const;

 private:
  std::filesystem::path path_;
  std::map<std::string, TensorEntry> entries_;
  std::map<std::string, std::string> metadata_;
  int fd_ = -1;
  const std::byte* map_ = nullptr;
  int64_t size_ = 0;
};

/// A tensor to be written; `data` must stay valid until write_safetensors returns.
struct OutputTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::span<const std::byte> data;
  std::vector<std::byte> owned;  ///< optional storage that `data` may point into (kept alive with the entry)
};

/// Writes a file durably: temp name in the same folder, write, fsync, rename, fsync of the folder. Metadata {"format":
/// "pt"}. Tensors are laid out by alignment of dtype descending, then name, as the official writer does. Errors:
/// Error(disk) naming path, bytes and the system's reason; the temp file is removed. Returns the bytes of the file.
int64_t write_safetensors(const std::filesystem::path& path, std::vector<OutputTensor> tensors);

}  // namespace shardq
