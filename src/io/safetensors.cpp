#include "io/safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.hpp"
#include "io/safetensors_header.hpp"

namespace shardq {
namespace {

constexpr int64_t kLengthBytes = 8;
// The kernel reads at most 2^31 - 4096 bytes a call.
constexpr int64_t kLargestRead = int64_t{1} << 30;

/// `entry`: the tensor that the bytes belong to, for the message; null for the header.
void read_at(int fd, const std::filesystem::path& path, const TensorEntry* entry, int64_t offset, std::byte* target,
             int64_t bytes) {
  const auto where = [&] {
    return entry ? fmt::format("{}: tensor '{}'", path.string(), printable(entry->name)) : path.string();
  };
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, target, static_cast<size_t>(std::min(bytes, kLargestRead)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int reason = errno;
      fail(ExitCode::input, "cannot read {} bytes at {} of {}: {}", bytes, offset, where(), std::strerror(reason));
    }
    if (n == 0)
      fail(ExitCode::input, "{}: the file ends {} bytes early at byte {}: it was cut while in use", where(), bytes,
           offset);
    target += n;
    offset += n;
    bytes -= n;
  }
}

SafetensorsHeader read_header(int fd, const std::filesystem::path& path, int64_t file_bytes) {
  SHARDQ_CHECK(file_bytes >= kLengthBytes, ExitCode::input, "{}: a safetensors file has at least {} bytes, found {}",
               path.string(), kLengthBytes, file_bytes);
  unsigned char raw[kLengthBytes];
  read_at(fd, path, nullptr, 0, reinterpret_cast<std::byte*>(raw), kLengthBytes);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | raw[i];
  SHARDQ_CHECK(length <= static_cast<uint64_t>(kLargestSafetensorsHeader), ExitCode::input,
               "{}: header length {} is beyond the format's limit of {}: not a safetensors file", path.string(), length,
               kLargestSafetensorsHeader);
  SHARDQ_CHECK(static_cast<int64_t>(length) <= file_bytes - kLengthBytes, ExitCode::input,
               "{}: the header of {} bytes is longer than the file of {} bytes (truncated)", path.string(), length,
               file_bytes);
  SHARDQ_CHECK(length > 0, ExitCode::input, "{}: the header is empty, expected a JSON object", path.string());
  std::string json(length, '\0');
  read_at(fd, path, nullptr, kLengthBytes, reinterpret_cast<std::byte*>(json.data()), static_cast<int64_t>(length));
  return parse_safetensors_header(path, json, kLengthBytes + static_cast<int64_t>(length), file_bytes);
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  do fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) fail(ExitCode::input, "cannot open {}: {}", path_.string(), std::strerror(errno));
  try {
    struct stat status {};
    SHARDQ_CHECK(::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode), ExitCode::input,
                 "cannot read {}: not a regular file", path_.string());
    size_ = status.st_size;
    SafetensorsHeader header = read_header(fd_, path_, size_);
    entries_ = std::move(header.entries);
    metadata_ = std::move(header.metadata);
    void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_PRIVATE, fd_, 0);
    if (map == MAP_FAILED)
      fail(ExitCode::input, "cannot map {} ({} bytes): {}", path_.string(), size_, std::strerror(errno));
    map_ = static_cast<const std::byte*>(map);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  ::munmap(const_cast<std::byte*>(map_), static_cast<size_t>(size_));
  ::close(fd_);
}

const TensorEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  return {map_ + entry.begin, static_cast<size_t>(entry.bytes())};
}

void SafetensorsFile::read(const TensorEntry& entry, int64_t offset, std::span<std::byte> target) const {
  const auto bytes = static_cast<int64_t>(target.size());
  SHARDQ_CHECK(offset >= 0 && offset <= entry.bytes() && bytes <= entry.bytes() - offset, ExitCode::internal,
               "{}: bytes [{}, {}) asked of tensor '{}', which has {}", path_.string(), offset, offset + bytes,
               entry.name, entry.bytes());
  read_at(fd_, path_, &entry, entry.begin + offset, target.data(), bytes);
}

void SafetensorsFile::will_need(const TensorEntry& entry) const {
  if (entry.bytes() > 0)
    ::posix_fadvise(fd_, entry.begin, entry.bytes(), POSIX_FADV_WILLNEED);  // advice: failure changes nothing
}

}  // namespace shardq
