#include "io/durable_file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/files.hpp"

namespace shardq {
namespace {
// The kernel writes at most 2^31 - 4096 bytes a call; a rounder limit keeps the loop's other path tested by ordinary
// shards.
constexpr int64_t kLargestWrite = int64_t{1} << 30;
}  // namespace

std::filesystem::path DurableFile::temporary_name(const std::filesystem::path& path) {
  return path.parent_path() / fmt::format(".{}.tmp", path.filename().string());
}

bool DurableFile::is_temporary(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with('.') && name.ends_with(".tmp");
}

DurableFile::DurableFile(std::filesystem::path path, int64_t expected_bytes)
    : path_(std::move(path)), temporary_(temporary_name(path_)), expected_(expected_bytes) {
  do fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) fail(ExitCode::disk, "cannot create {}: {}", temporary_.string(), std::strerror(errno));
  try {
    if (expected_bytes > 0) reserve(expected_bytes);
  } catch (...) {  // the destructor does not run for a constructor that throws
    ::close(fd_);
    ::unlink(temporary_.c_str());
    throw;
  }
}

DurableFile::~DurableFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void DurableFile::fail_with(const char* action, int error) const {
  const int64_t needed = std::max(expected_, written_);
  if (error == ENOSPC || error == EDQUOT)
    fail(ExitCode::disk, "cannot {} {}: {} ({} bytes needed, {} written, {} free)", action, path_.string(),
         std::strerror(error), needed, written_, free_bytes(path_));
  fail(ExitCode::disk, "cannot {} {}: {} ({} bytes needed, {} written)", action, path_.string(), std::strerror(error),
       needed, written_);
}

void DurableFile::reserve(int64_t bytes) {
  // Beyond the limit a write would raise SIGXFSZ, which ends a process without a word.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    SHARDQ_CHECK(static_cast<uint64_t>(bytes) <= limit.rlim_cur, ExitCode::disk,
                 "cannot write {}: {} bytes needed, the process's file size limit (ulimit -f) is {}", path_.string(),
                 bytes, limit.rlim_cur);
  // Not posix_fallocate: where a file system (NFS, Lustre) cannot reserve, glibc would write every block once for
  // nothing.
  int result;
  do result = ::fallocate(fd_, 0, 0, bytes);
  while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) fail_with("reserve space for", errno);
  const int64_t available = free_bytes(path_);
  if (available < bytes) fail_with("reserve space for", ENOSPC);
}

void DurableFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), kLargestWrite));
    if (n < 0) {
      if (errno == EINTR) continue;
      fail_with("write", errno);
    }
    written_ += n;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void DurableFile::commit() {
  SHARDQ_CHECK(fd_ >= 0, ExitCode::internal, "{} was committed twice", path_.string());
  fault_point("file_written");
  if (written_ < expected_ && ::ftruncate(fd_, written_) != 0)
    fail_with("trim", errno);  // never leave reserved zeros behind the content
  int result;
  do result = ::fsync(fd_);
  while (result != 0 && errno == EINTR);
  if (result != 0) fail_with("fsync", errno);
  fault_point("file_synced");
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0 && errno != EINTR) {  // NFS reports a failed write here
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail_with("close", error);
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail_with("rename the finished file to", error);
  }
  fault_point("file_renamed");
  sync_folder(path_.parent_path());
}

}  // namespace shardq
