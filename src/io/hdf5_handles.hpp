#pragma once
// Private to src/io: the one place that other sources get HDF5 from.
#include <hdf5.h>

#include <filesystem>
#include <mutex>
#include <string>
#include <utility>

#include "core/dtype.hpp"

namespace shardq {

/// The C library is not thread-safe as packaged: every call in the process is made under this lock. Recursive, because
/// a handle locks again to close itself. Held for one transfer at a time, so that a reader waits for one block of a
/// background writer, not for all.
using Hdf5Lock = std::unique_lock<std::recursive_mutex>;
Hdf5Lock lock_hdf5();

/// Owns one HDF5 identifier.
class Hdf5Handle {
 public:
  using Closer = herr_t (*)(hid_t);
  Hdf5Handle() = default;
  Hdf5Handle(hid_t id, Closer closer) : id_(id), closer_(closer) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), closer_(other.closer_) {}
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    if (this != &other) {
      drop();
      id_ = std::exchange(other.id_, -1);
      closer_ = other.closer_;
    }
    return *this;
  }
  ~Hdf5Handle() { drop(); }

  operator hid_t() const { return id_; }
  bool valid() const { return id_ >= 0; }
  /// Closes now and says whether that worked: buffered writes fail here.
  bool close();

 private:
  void drop();
  hid_t id_ = -1;
  Closer closer_ = nullptr;
};

/// The reason of the last failed call: the system's error text where the stack names an errno, else the innermost
/// description. Clears the stack.
std::string hdf5_reason();
/// Throws Error(disk) "cannot <action> <path>: <reason>".
[[noreturn]] void fail_hdf5(const std::string& action, const std::filesystem::path& path);
/// Passes a result (identifier or status) through, or fails when it is negative.
template <class T>
T check_hdf5(T result, const std::string& action, const std::filesystem::path& path) {
  if (result < 0) fail_hdf5(action, path);
  return result;
}

/// File and memory type of a dtype, little-endian; bf16 and f16 are custom 16-bit float types, for which HDF5's
/// conversion is slow (about 0.03 GB/s), so that transfers use the same type on both sides. Error(internal) for dtypes
/// that stages do not hold.
Hdf5Handle hdf5_type(DType dtype);
/// Access properties shared by all files: checksummed metadata (format 1.8 and later), no file locks (they fail on some
/// cluster file systems; the work directory has its own lock), data aligned to pages.
Hdf5Handle hdf5_file_access();

}  // namespace shardq
