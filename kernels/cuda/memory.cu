// Device, streams and memory of the CUDA backend.
//
// Device memory comes from one stream-ordered pool that keeps what it once got, so that steady state never calls the
// driver's allocator. Small host tables and uploads pass through a ring of pinned memory: the caller may reuse its
// source at once, and the host does not wait for the device unless the ring is full.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/touch_pages.hpp"

namespace shardq {

void fail_cuda(cudaError_t status, const char* call, const char* file, int line) {
  const char* hint = status == cudaErrorNoKernelImageForDevice
                         ? " (built for other GPU architectures: CMAKE_CUDA_ARCHITECTURES)"
                     : status == cudaErrorECCUncorrectable ? " (uncorrectable memory error of the GPU)"
                                                           : "";
  fail(ExitCode::internal, "CUDA: {} failed: {}: {}{} [{}:{}]", call, cudaGetErrorName(status),
       cudaGetErrorString(status), hint, file, line);
}
void fail_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  fail(ExitCode::internal, "cuBLAS: {} failed: {} [{}:{}]", call, cublasGetStatusString(status), file, line);
}
void fail_cusolver(cusolverStatus_t status, const char* call, const char* file, int line) {
  fail(ExitCode::internal, "cuSOLVER: {} failed with status {} [{}:{}]", call, static_cast<int>(status), file, line);
}

namespace {
__global__ void probe_kernel() {}

std::string gib(int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

cublasHandle_t make_blas(cudaStream_t stream) {
  cublasHandle_t blas = nullptr;
  SHARDQ_CUBLAS(cublasCreate(&blas));
  SHARDQ_CUBLAS(cublasSetStream(blas, stream));
  // Sums of split products stay in fp32 even where the output is bf16.
  SHARDQ_CUBLAS(cublasSetMathMode(
      blas, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  return blas;
}
}  // namespace

CudaBackend::State::State(int index) : device(index) {
  const int visible = cuda_device_count();
  SHARDQ_CHECK(visible > 0, ExitCode::internal, "device cuda was asked for, but no CUDA device is visible{}",
               std::getenv("CUDA_VISIBLE_DEVICES")
                   ? fmt::format(" (CUDA_VISIBLE_DEVICES={})", std::getenv("CUDA_VISIBLE_DEVICES"))
                   : "");
  SHARDQ_CHECK(0 <= index && index < visible, ExitCode::internal, "CUDA device {} was asked for, {} visible", index,
               visible);
  SHARDQ_CUDA(cudaSetDevice(index));
  cudaDeviceProp properties;
  SHARDQ_CUDA(cudaGetDeviceProperties(&properties, index));
  name = fmt::format("cuda:{} {}", index, properties.name);
  compute_capability = properties.major * 10 + properties.minor;
  multiprocessors = properties.multiProcessorCount;
  shared_memory_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  cudaFuncAttributes attributes;
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel); status != cudaSuccess)
    fail(ExitCode::internal,
         "{} has compute capability {}.{}, for which this shardq holds no code ({}): rebuild with "
         "CMAKE_CUDA_ARCHITECTURES={}{}",
         name, properties.major, properties.minor, cudaGetErrorName(status), properties.major, properties.minor);

  cudaMemPoolProps pool_properties = {};
  pool_properties.allocType = cudaMemAllocationTypePinned;
  pool_properties.location.type = cudaMemLocationTypeDevice;
  pool_properties.location.id = index;
  SHARDQ_CUDA(cudaMemPoolCreate(&pool, &pool_properties));
  uint64_t keep = UINT64_MAX;
  SHARDQ_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));

  SHARDQ_CUDA(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  SHARDQ_CUDA(cudaStreamCreateWithFlags(&copy, cudaStreamNonBlocking));
  for (cudaEvent_t* event : {&fork_event_, &prefetch_event_, &compute_event_})
    SHARDQ_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  blas = make_blas(compute);
  blas_workspace_bytes = int64_t{64} << 20;
  blas_workspace = allocate(blas_workspace_bytes, "cuBLAS workspace");
  SHARDQ_CUBLAS(cublasSetWorkspace(blas, blas_workspace, static_cast<size_t>(blas_workspace_bytes)));
  SHARDQ_CUBLAS(cublasLtCreate(&blas_lt));
  SHARDQ_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&ring_), kRingBytes, cudaHostAllocDefault));
}

namespace {

/// Blocks from here on are mapped by ourselves and their pages made by all threads before they are locked: 0.08 s a GiB
/// instead of 0.41 by cudaHostAlloc, which makes them one by one (H200 machine, 2026-11-30).
constexpr int64_t kMappedBytes = int64_t{8} << 20;

cudaError_t allocate_pinned(void** block, int64_t bytes) {
  if (bytes >= kMappedBytes) {
    void* mapped =
        ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped != MAP_FAILED) {
      ::madvise(mapped, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // advice: failure changes nothing
      touch_pages(static_cast<char*>(mapped), bytes);
      const cudaError_t status = cudaHostRegister(mapped, static_cast<size_t>(bytes), cudaHostRegisterPortable);
      if (status == cudaSuccess) {
        *block = mapped;
        return status;
      }
      cudaGetLastError();
      ::munmap(mapped, static_cast<size_t>(bytes));
    }
  }
  return cudaHostAlloc(block, static_cast<size_t>(std::max<int64_t>(bytes, 1)), cudaHostAllocPortable);
}

void free_host(void* block, int64_t bytes) {
  if (bytes >= kMappedBytes && cudaHostUnregister(block) == cudaSuccess) {
    ::munmap(block, static_cast<size_t>(bytes));
    return;
  }
  cudaGetLastError();
  cudaFreeHost(block);
}

}  // namespace

CudaBackend::State::~State() {
  // Best effort: a process that ends after a device failure must not throw here.
  cudaSetDevice(device);
  cudaStreamSynchronize(compute);
  cudaStreamSynchronize(copy);
  if (blas) cublasDestroy(blas);
  if (blas_lt) cublasLtDestroy(blas_lt);
  for (Side& side : sides_) {
    if (side.blas) cublasDestroy(side.blas);
    if (side.blas_workspace) cudaFreeAsync(side.blas_workspace, compute);
    if (side.solver) cusolverDnDestroy(side.solver);
    if (side.done) cudaEventDestroy(side.done);
    if (side.stream) cudaStreamDestroy(side.stream);
  }
  if (blas_workspace) cudaFreeAsync(blas_workspace, compute);
  for (const Segment& segment : segments_) cudaEventDestroy(segment.consumed);
  for (cudaEvent_t event : free_events_) cudaEventDestroy(event);
  for (cudaEvent_t event : {fork_event_, prefetch_event_, compute_event_})
    if (event) cudaEventDestroy(event);
  if (ring_) cudaFreeHost(ring_);
  for (const auto& [block, bytes] : host_blocks_) free_host(block, bytes);
  cudaStreamSynchronize(compute);
  if (copy) cudaStreamDestroy(copy);
  if (compute) cudaStreamDestroy(compute);
  if (pool) cudaMemPoolDestroy(pool);
}

void CudaBackend::State::use() const {
  SHARDQ_CUDA(cudaSetDevice(device));
}

int64_t CudaBackend::State::free_bytes() const {
  size_t free = 0, total = 0;
  uint64_t reserved = 0, used = 0;
  SHARDQ_CUDA(cudaMemGetInfo(&free, &total));
  SHARDQ_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
  SHARDQ_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  return static_cast<int64_t>(free + (reserved - std::min(used, reserved)));
}

void* CudaBackend::State::allocate(int64_t bytes, const char* what) {
  if (bytes == 0) bytes = 1;  // an owner of nothing still needs a distinct address
  SHARDQ_CHECK(bytes > 0, ExitCode::internal, "device memory for {}: {} bytes wanted", what, bytes);
  void* data = nullptr;
  cudaError_t status = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool, compute);
  if (status == cudaErrorMemoryAllocation) {
    // The pool may hold enough in pieces that do not fit: let everything pending finish, give the pieces back, try
    // again.
    cudaGetLastError();
    SHARDQ_CUDA(cudaStreamSynchronize(compute));
    SHARDQ_CUDA(cudaMemPoolTrimTo(pool, 0));
    status = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool, compute);
  }
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    uint64_t used = 0;
    cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used);
    throw OutOfMemory(fmt::format(
        "out of device memory on {}: {} wanted for {}, {} free of {} ({} in use by this process)", name, gib(bytes),
        what, gib(static_cast<int64_t>(free)), gib(static_cast<int64_t>(total)), gib(static_cast<int64_t>(used))));
  }
  if (status != cudaSuccess) fail_cuda(status, "cudaMallocFromPoolAsync", __FILE__, __LINE__);
  return data;
}

void CudaBackend::State::release(void* data) noexcept {
  if (data) cudaFreeAsync(data, compute);
}

char* CudaBackend::State::ring_space(int64_t bytes) {
  const auto retire_oldest = [&](bool wait) {
    const Segment oldest = segments_.front();
    if (wait) {
      SHARDQ_CUDA(cudaEventSynchronize(oldest.consumed));
    } else if (cudaEventQuery(oldest.consumed) != cudaSuccess) {
      return false;  // still in flight; a real failure shows at the next checked call
    }
    free_events_.push_back(oldest.consumed);
    segments_.pop_front();
    return true;
  };
  while (!segments_.empty() && retire_oldest(false)) {
  }
  if (ring_head_ + bytes > kRingBytes) ring_head_ = 0;
  const auto overlaps = [&](const Segment& s) {
    return s.begin < ring_head_ + bytes && ring_head_ < s.begin + s.bytes;
  };
  while (std::any_of(segments_.begin(), segments_.end(), overlaps)) retire_oldest(true);
  return ring_ + ring_head_;
}

void CudaBackend::State::ring_used(int64_t bytes) {
  if (free_events_.empty()) {
    cudaEvent_t event = nullptr;
    SHARDQ_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    free_events_.push_back(event);
  }
  SHARDQ_CUDA(cudaEventRecord(free_events_.back(), compute));
  segments_.push_back({ring_head_, bytes, free_events_.back()});
  free_events_.pop_back();
  ring_head_ += (bytes + 255) / 256 * 256;
}

namespace {
/// Whether `data` lies in page-locked memory, from and to which copies go without the ring.
bool is_pinned(const void* data) {
  cudaPointerAttributes attributes = {};
  const bool pinned =
      cudaPointerGetAttributes(&attributes, data) == cudaSuccess && attributes.type == cudaMemoryTypeHost;
  if (!pinned) cudaGetLastError();
  return pinned;
}
/// Below this the ring costs less than asking and waiting.
constexpr int64_t kDirectBytes = int64_t{1} << 20;
}  // namespace

void CudaBackend::State::upload(void* target, const void* source, int64_t bytes) {
  if (bytes >= kDirectBytes && is_pinned(source)) {
    SHARDQ_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, compute));
    SHARDQ_CUDA(cudaStreamSynchronize(compute));  // the caller may reuse its memory
    return;
  }
  const std::lock_guard lock(upload_mutex_);
  for (int64_t done = 0; done < bytes;) {
    const int64_t chunk = std::min(bytes - done, kRingBytes / 8);
    char* pinned = ring_space(chunk);
    std::memcpy(pinned, static_cast<const char*>(source) + done, static_cast<size_t>(chunk));
    SHARDQ_CUDA(cudaMemcpyAsync(static_cast<char*>(target) + done, pinned, static_cast<size_t>(chunk),
                                cudaMemcpyHostToDevice, compute));
    ring_used(chunk);
    done += chunk;
  }
}

void CudaBackend::State::download(void* target, const void* source, int64_t bytes) {
  if (bytes <= 0) return;
  if (is_pinned(target)) {
    SHARDQ_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, compute));
    SHARDQ_CUDA(cudaStreamSynchronize(compute));
    return;
  }
  const std::lock_guard lock(upload_mutex_);
  // Two chunks in flight: one is copied out by the host while the next one arrives.
  struct Chunk {
    char* pinned;
    int64_t begin, bytes;
    cudaEvent_t arrived;
  };
  std::deque<Chunk> flying;
  const auto land = [&] {
    const Chunk chunk = flying.front();
    flying.pop_front();
    SHARDQ_CUDA(cudaEventSynchronize(chunk.arrived));
    std::memcpy(static_cast<char*>(target) + chunk.begin, chunk.pinned, static_cast<size_t>(chunk.bytes));
  };
  for (int64_t done = 0; done < bytes;) {
    const int64_t chunk = std::min(bytes - done, kRingBytes / 8);
    char* pinned = ring_space(chunk);
    SHARDQ_CUDA(cudaMemcpyAsync(pinned, static_cast<const char*>(source) + done, static_cast<size_t>(chunk),
                                cudaMemcpyDeviceToHost, compute));
    ring_used(chunk);
    flying.push_back({pinned, done, chunk, segments_.back().consumed});
    if (flying.size() == 2) land();
    done += chunk;
  }
  while (!flying.empty()) land();
}

CudaBackend::State::Side& CudaBackend::State::side(int index) {
  Side& side = sides_.at(static_cast<size_t>(index));
  if (!side.stream) {
    SHARDQ_CUDA(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    SHARDQ_CUDA(cudaEventCreateWithFlags(&side.done, cudaEventDisableTiming));
  }
  return side;
}

cublasHandle_t CudaBackend::State::side_blas(int index) {
  Side& own = side(index);
  if (!own.blas) {
    own.blas = make_blas(own.stream);
    own.blas_workspace = allocate(kSideWorkspaceBytes, "cuBLAS workspace of a side stream");
    SHARDQ_CUBLAS(cublasSetWorkspace(own.blas, own.blas_workspace, static_cast<size_t>(kSideWorkspaceBytes)));
    // The allocation is ordered on the compute stream only.
    SHARDQ_CUDA(cudaEventRecord(own.done, compute));
    SHARDQ_CUDA(cudaStreamWaitEvent(own.stream, own.done, 0));
  }
  return own.blas;
}

void CudaBackend::State::planned_gemm(int index, const GemmCall& call) {
  if (index < 0) return planned.run(blas_lt, compute, blas_workspace, blas_workspace_bytes, call);
  side_blas(index);  // makes the stream's workspace
  planned.run(blas_lt, side(index).stream, side(index).blas_workspace, kSideWorkspaceBytes, call);
}

cusolverDnHandle_t CudaBackend::State::side_solver(int index) {
  Side& own = side(index);
  if (!own.solver) {
    SHARDQ_CUSOLVER(cusolverDnCreate(&own.solver));
    SHARDQ_CUSOLVER(cusolverDnSetStream(own.solver, own.stream));
  }
  return own.solver;
}

void CudaBackend::State::fork(int count) {
  SHARDQ_CUDA(cudaEventRecord(fork_event_, compute));
  for (int i = 0; i < count; ++i) SHARDQ_CUDA(cudaStreamWaitEvent(side(i).stream, fork_event_, 0));
}

void CudaBackend::State::join(int count) {
  for (int i = 0; i < count; ++i) {
    SHARDQ_CUDA(cudaEventRecord(side(i).done, side(i).stream));
    SHARDQ_CUDA(cudaStreamWaitEvent(compute, side(i).done, 0));
  }
}

// ---- CudaBackend: memory -------------------------------------------------------------------------

CudaBackend::CudaBackend(int device) : state_(std::make_unique<State>(device)) {}
CudaBackend::~CudaBackend() = default;
std::string CudaBackend::name() const {
  return state_->name;
}
bool CudaBackend::is_host() const {
  return false;
}
void CudaBackend::set_reproducible(bool wanted) {
  state_->reproducible = wanted;
}
void* CudaBackend::stream() const {
  return state_->compute;
}

void* CudaBackend::allocate(int64_t bytes, const char* what) {
  state_->use();
  return state_->allocate(bytes, what);
}
void CudaBackend::release(void* data) noexcept {
  state_->release(data);
}

void* CudaBackend::allocate_host(int64_t bytes) {
  SHARDQ_CHECK(bytes >= 0, ExitCode::internal, "page-locked host memory: {} bytes wanted", bytes);
  state_->use();
  const std::lock_guard lock(state_->host_mutex_);
  // A kept block up to a quarter larger than wanted serves as well: page-locking a new one is slow.
  const auto kept = state_->free_host_.lower_bound(bytes);
  if (kept != state_->free_host_.end() && kept->first <= bytes + bytes / 4 + 4096) {
    void* block = kept->second;
    state_->free_host_.erase(kept);
    return block;
  }
  void* block = nullptr;
  cudaError_t status = allocate_pinned(&block, bytes);
  if (status == cudaErrorMemoryAllocation && !state_->free_host_.empty()) {
    cudaGetLastError();
    for (const auto& [size, idle] : state_->free_host_) {
      free_host(idle, size);
      state_->host_blocks_.erase(idle);
    }
    state_->free_host_.clear();
    status = allocate_pinned(&block, bytes);
  }
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ExitCode::internal, "out of page-locked host memory: {} wanted", gib(bytes));
  }
  if (status != cudaSuccess) fail_cuda(status, "cudaHostAlloc", __FILE__, __LINE__);
  state_->host_blocks_[block] = bytes;
  return block;
}

void CudaBackend::release_host(void* data) noexcept {
  if (!data) return;
  const std::lock_guard lock(state_->host_mutex_);
  const auto found = state_->host_blocks_.find(data);
  if (found != state_->host_blocks_.end()) state_->free_host_.emplace(found->second, data);
}

void CudaBackend::upload(void* target, const void* source, int64_t bytes) {
  state_->use();
  state_->upload(target, source, bytes);
}
void CudaBackend::download(void* target, const void* source, int64_t bytes) {
  state_->use();
  state_->download(target, source, bytes);
}

void CudaBackend::prefetch(void* target, const void* source, int64_t bytes) {
  if (bytes <= 0) return;
  state_->use();
  const std::lock_guard lock(state_->prefetch_mutex_);
  // The pool may have handed out memory that compute work enqueued before still uses: the copy starts after it.
  SHARDQ_CUDA(cudaEventRecord(state_->compute_event_, state_->compute));
  SHARDQ_CUDA(cudaStreamWaitEvent(state_->copy, state_->compute_event_, 0));
  SHARDQ_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, state_->copy));
}

void CudaBackend::wait_prefetch() {
  state_->use();
  const std::lock_guard lock(state_->prefetch_mutex_);
  SHARDQ_CUDA(cudaEventRecord(state_->prefetch_event_, state_->copy));
  SHARDQ_CUDA(cudaStreamWaitEvent(state_->compute, state_->prefetch_event_, 0));
}

void CudaBackend::copy(void* target, const void* source, int64_t bytes) {
  if (bytes <= 0) return;
  state_->use();
  SHARDQ_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, state_->compute));
}

void CudaBackend::zero(void* target, int64_t bytes) {
  if (bytes <= 0) return;
  state_->use();
  SHARDQ_CUDA(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), state_->compute));
}

void CudaBackend::synchronize() {
  state_->use();
  SHARDQ_CUDA(cudaStreamSynchronize(state_->copy));
  SHARDQ_CUDA(cudaStreamSynchronize(state_->compute));
}

MemoryInfo CudaBackend::memory() const {
  state_->use();
  uint64_t used = 0, peak = 0;
  size_t free = 0, total = 0;
  SHARDQ_CUDA(cudaMemPoolGetAttribute(state_->pool, cudaMemPoolAttrUsedMemCurrent, &used));
  SHARDQ_CUDA(cudaMemPoolGetAttribute(state_->pool, cudaMemPoolAttrUsedMemHigh, &peak));
  SHARDQ_CUDA(cudaMemGetInfo(&free, &total));
  return {.in_use = static_cast<int64_t>(used),
          .peak = static_cast<int64_t>(peak),
          .available = state_->free_bytes(),
          .total = static_cast<int64_t>(total)};
}

std::unique_ptr<Backend> make_cuda_backend(int index) {
  return std::make_unique<CudaBackend>(index);
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver, or no device: both mean none
    return 0;
  }
  return count;
}

}  // namespace shardq
