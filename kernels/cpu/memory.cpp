// Memory of the CPU backend: aligned blocks with their size in front, counted; large ones ask for huge pages.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/error.hpp"
#include "kernels/cpu/cpu_backend.hpp"

namespace shardq {
namespace {

constexpr int64_t kHeader = 64;              // keeps the payload on a cache line
constexpr int64_t kHuge = int64_t{2} << 20;  // blocks from here on are aligned to, and may be backed by, huge pages
constexpr int64_t kCheckedFrom = int64_t{64} << 20;  // smaller blocks are not worth a look at /proc/meminfo

/// A value of /proc/meminfo in bytes, or -1.
int64_t meminfo(const char* key) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t value; file >> name >> value; std::getline(file, unit))
    if (name == key) return value * 1024;
  return -1;
}

/// One number from a control-group file; -1 where absent or "max".
int64_t cgroup_value(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

/// Page cache that the control group's usage counts although it can be dropped.
int64_t cgroup_reclaimable() {
  std::ifstream file("/sys/fs/cgroup/memory.stat");
  std::string name;
  for (int64_t value; file >> name >> value;)
    if (name == "inactive_file") return value;
  return 0;
}

}  // namespace

CpuBackend::CpuBackend() : scratch_(static_cast<size_t>(kScratchKinds) * std::max(omp_get_max_threads(), 1)) {}
CpuBackend::~CpuBackend() = default;
std::string CpuBackend::name() const {
  return "cpu";
}
bool CpuBackend::is_host() const {
  return true;
}

int CpuBackend::scratch_slots() {
  return omp_get_thread_num() * kScratchKinds;
}

float* CpuBackend::scratch(int slot, int64_t elements) {
  std::vector<float>& buffer = scratch_.at(static_cast<size_t>(slot));
  if (static_cast<int64_t>(buffer.size()) < elements) {
    buffer = {};  // before the new one, so that both never exist at once
    buffer.resize(static_cast<size_t>(elements));
  }
  return buffer.data();
}

namespace {
[[noreturn]] void refuse(const char* what, int64_t bytes, int64_t available) {
  throw OutOfMemory(fmt::format("out of memory: {} needs {} bytes, {} available on cpu", what, bytes, available));
}
}  // namespace

void* CpuBackend::allocate(int64_t bytes, const char* what) {
  SHARDQ_CHECK(bytes >= 0, ExitCode::internal, "allocation of {} bytes for {}", bytes, what);
  if (bytes >= kCheckedFrom && bytes > memory().available) refuse(what, bytes, memory().available);
  const bool huge = bytes >= 2 * kHuge;
  const int64_t alignment = huge ? kHuge : kHeader;
  const int64_t header = kHeader;
  const int64_t total = (header + bytes + alignment - 1) / alignment * alignment;
  void* block = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(total));
  if (!block) refuse(what, bytes, memory().available);
  if (huge) madvise(block, static_cast<size_t>(total), MADV_HUGEPAGE);  // advice: a refusal costs speed only
  std::memcpy(block, &bytes, sizeof bytes);
  const int64_t now = in_use_ += bytes;
  int64_t peak = peak_;
  while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
  }
  return static_cast<char*>(block) + header;
}

void CpuBackend::release(void* data) noexcept {
  if (!data) return;
  char* block = static_cast<char*>(data) - kHeader;
  int64_t bytes;
  std::memcpy(&bytes, block, sizeof bytes);
  in_use_ -= bytes;
  std::free(block);
}

void* CpuBackend::allocate_host(int64_t bytes) {
  return allocate(bytes, "host buffer");
}
void CpuBackend::release_host(void* data) noexcept {
  release(data);
}

void CpuBackend::copy(void* target, const void* source, int64_t bytes) {
  if (bytes > 0) std::memmove(target, source, static_cast<size_t>(bytes));
}
void CpuBackend::upload(void* target, const void* source, int64_t bytes) {
  copy(target, source, bytes);
}
void CpuBackend::download(void* target, const void* source, int64_t bytes) {
  copy(target, source, bytes);
}
void CpuBackend::prefetch(void* target, const void* source, int64_t bytes) {
  copy(target, source, bytes);
}
void CpuBackend::wait_prefetch() {}
void CpuBackend::zero(void* target, int64_t bytes) {
  if (bytes > 0) std::memset(target, 0, static_cast<size_t>(bytes));
}
void CpuBackend::synchronize() {}

MemoryInfo CpuBackend::memory() const {
  MemoryInfo info{in_use_, peak_, meminfo("MemAvailable:"), meminfo("MemTotal:")};
  const int64_t limit = cgroup_value("/sys/fs/cgroup/memory.max");
  if (limit >= 0) {
    const int64_t used = std::max<int64_t>(cgroup_value("/sys/fs/cgroup/memory.current"), 0) - cgroup_reclaimable();
    info.total = std::min(info.total, limit);
    info.available = std::min(info.available, std::max<int64_t>(limit - used, 0));
  }
  return info;
}

std::unique_ptr<Backend> make_cpu_backend() {
  return std::make_unique<CpuBackend>();
}

}  // namespace shardq
