#include "io/hdf5_handles.hpp"

#include <cstdlib>
#include <cstring>

#include "core/error.hpp"

namespace shardq {
namespace {
std::recursive_mutex& hdf5_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

bool start_library() {
  // After a failed close (a full disk) the library's exit handler would try again, in vain and aloud.
  return H5dont_atexit() >= 0;
}

struct Reason {
  std::string innermost, system;
};

herr_t collect_reason(unsigned, const H5E_error2_t* entry, void* target) {
  auto& reason = *static_cast<Reason*>(target);
  const char* text = entry->desc ? entry->desc : "";
  if (reason.innermost.empty()) reason.innermost = text;
  if (const char* mark = std::strstr(text, "errno = "); mark && reason.system.empty())
    reason.system = std::strerror(std::atoi(mark + std::strlen("errno = ")));
  return 0;
}

hid_t custom_float(size_t sign, size_t exponent_at, size_t exponent_bits, size_t mantissa_bits, size_t bias) {
  const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
  const bool made = type >= 0 && H5Tset_fields(type, sign, exponent_at, exponent_bits, 0, mantissa_bits) >= 0 &&
                    H5Tset_precision(type, 16) >= 0 && H5Tset_size(type, 2) >= 0 && H5Tset_ebias(type, bias) >= 0;
  SHARDQ_CHECK(made, ExitCode::internal, "HDF5 refused a 16-bit float type: {}", hdf5_reason());
  return type;
}

hid_t make_type(DType dtype) {
  switch (dtype) {
    case DType::i8:
      return H5Tcopy(H5T_STD_I8LE);
    case DType::u8:
      return H5Tcopy(H5T_STD_U8LE);
    case DType::i16:
      return H5Tcopy(H5T_STD_I16LE);
    case DType::u16:
      return H5Tcopy(H5T_STD_U16LE);
    case DType::i32:
      return H5Tcopy(H5T_STD_I32LE);
    case DType::u32:
      return H5Tcopy(H5T_STD_U32LE);
    case DType::i64:
      return H5Tcopy(H5T_STD_I64LE);
    case DType::u64:
      return H5Tcopy(H5T_STD_U64LE);
    case DType::f32:
      return H5Tcopy(H5T_IEEE_F32LE);
    case DType::f64:
      return H5Tcopy(H5T_IEEE_F64LE);
    case DType::bf16:
      return custom_float(15, 7, 8, 7, 127);
    case DType::f16:
      return custom_float(15, 10, 5, 10, 15);
    default:
      fail(ExitCode::internal, "stages do not hold elements of type {}", safetensors_name(dtype));
  }
}
}  // namespace

Hdf5Lock lock_hdf5() {
  Hdf5Lock lock(hdf5_mutex());
  [[maybe_unused]] static const bool started = start_library();
  // Errors come back as values. Where the library was built for threads, each has an error stack of its own.
  [[maybe_unused]] thread_local const bool quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  return lock;
}

bool Hdf5Handle::close() {
  if (id_ < 0) return true;
  const Hdf5Lock lock = lock_hdf5();
  return closer_(std::exchange(id_, -1)) >= 0;
}

void Hdf5Handle::drop() {
  close();
}

std::string hdf5_reason() {
  const Hdf5Lock lock = lock_hdf5();
  Reason reason;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, collect_reason, &reason);
  H5Eclear2(H5E_DEFAULT);
  if (!reason.system.empty()) return reason.system;
  return reason.innermost.empty() ? "HDF5 gives no reason" : reason.innermost;
}

void fail_hdf5(const std::string& action, const std::filesystem::path& path) {
  fail(ExitCode::disk, "cannot {} {}: {}", action, path.string(), hdf5_reason());
}

Hdf5Handle hdf5_type(DType dtype) {
  const Hdf5Lock lock = lock_hdf5();
  return Hdf5Handle(make_type(dtype), H5Tclose);
}

Hdf5Handle hdf5_file_access() {
  const Hdf5Lock lock = lock_hdf5();
  Hdf5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_V110);
  H5Pset_file_locking(access, false, true);
  H5Pset_alignment(access, 1 << 20, 4096);
  H5Pset_meta_block_size(access, 1 << 16);
  return access;
}

}  // namespace shardq
