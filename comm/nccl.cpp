#ifdef SHARDQ_WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "comm/communicator.hpp"
#include "comm/ranges.hpp"
#include "comm/watch.hpp"
#include "core/timer.hpp"

namespace shardq {
namespace {

constexpr std::chrono::milliseconds kPoll{20};

void check_cuda(cudaError_t code, const char* call) {
  SHARDQ_CHECK(code == cudaSuccess, ExitCode::internal, "CUDA failed in {}: {}", call, cudaGetErrorString(code));
}
#define SHARDQ_CUDA(call) check_cuda((call), #call)

/// NCCL's last error names the peer or the cause; the code alone says only "remote process error".
void check_nccl(ncclResult_t code, ncclComm_t comm, const char* call) {
  SHARDQ_CHECK(code == ncclSuccess || code == ncclInProgress, ExitCode::internal, "NCCL failed in {}: {} ({})", call,
               ncclGetErrorString(code), ncclGetLastError(comm));
}
#define SHARDQ_NCCL(call) check_nccl((call), comm_, #call)

/// Device memory over NCCL, one process a GPU.
///
/// Collectives run on a stream of their own with high priority: it waits for what the compute stream has enqueued, and
/// the compute stream waits for it (deferred ones: at join), so that callers see plain stream order and the host never
/// waits. The communicator
/// is non-blocking, so no call into NCCL can hang; what can is the device, spinning for a peer that is gone. A monitor
/// thread therefore watches the end of every collective as a guarded wait and NCCL's asynchronous errors, wherever the
/// host itself is (say, in a stream synchronisation), and ends the process: NCCL is never torn down while a peer may be
/// missing.
///
/// Bits of a sum are the same from run to run for the same ranks on the same machines and the same NCCL settings.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& host, int device, cudaStream_t compute)
      : rank_(host.rank()), size_(host.size()), device_(device), compute_(compute) {
    agree(host, [&] {
      SHARDQ_CUDA(cudaSetDevice(device_));
      int least = 0, greatest = 0;
      SHARDQ_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      SHARDQ_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
      SHARDQ_CUDA(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
      SHARDQ_CUDA(cudaEventCreateWithFlags(&joined_, cudaEventDisableTiming));
      SHARDQ_CUDA(cudaMalloc(&token_, sizeof(float)));
      SHARDQ_CUDA(cudaMemset(token_, 0, sizeof(float)));
    });
    connect(host);
    monitor_ = std::thread([this] { watch_collectives(); });
    if (size_ > 1) agree(host, [&] { warm_up(); });
  }

  /// The NCCL communicator itself is left to the end of the process: destroying it is a collective.
  ~NcclCommunicator() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    monitor_.join();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "nccl"; }

  void all_reduce_sum(float* data, int64_t count) override { all_reduce(data, count, ncclFloat32); }
  void all_reduce_sum(double* data, int64_t count) override { all_reduce(data, count, ncclFloat64); }
  void all_reduce_sum(int64_t* data, int64_t count) override { all_reduce(data, count, ncclInt64); }

  void reduce_scatter_sum(float* data, std::span<const Range> ranges) override {
    const int64_t total = check_ranges(ranges, size_, "reduce_scatter_sum");
    enqueue("nccl reduce_scatter_sum", total * sizeof(float), [&] {
      if (all_equal(ranges)) {
        const int64_t count = ranges[0].size();
        SHARDQ_NCCL(ncclReduceScatter(data, data + rank_ * count, count, ncclFloat32, ncclSum, comm_, stream_));
        return;
      }
      group([&] {
        for (int r = 0; r < size_; ++r) {
          if (ranges[r].size() == 0) continue;
          float* piece = data + ranges[r].begin;
          SHARDQ_NCCL(ncclReduce(piece, piece, ranges[r].size(), ncclFloat32, ncclSum, r, comm_, stream_));
        }
      });
    });
  }

  void all_gather(void* data, std::span<const Range> ranges, int64_t element_size) override {
    const Gathered array{data, {ranges.begin(), ranges.end()}, element_size};
    all_gather_each({&array, 1});
  }

  void all_gather_each(std::span<const Gathered> arrays) override {
    int64_t bytes = 0;
    for (const Gathered& array : arrays) bytes += check_ranges(array.ranges, size_, "all_gather") * array.element_size;
    enqueue("nccl all_gather", bytes, [&] {
      group([&] {
        for (const Gathered& array : arrays) start_gather(array);
      });
    });
  }

  void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                  int64_t element_size) override {
    check_exchange(send, receive, size_, rank_);
    const auto* from = static_cast<const char*>(source);
    auto* to = static_cast<char*>(target);
    enqueue("nccl all_to_all", element_size, [&] {  // how much each rank sends is its own affair
      group([&] {
        for (int r = 0; r < size_; ++r) {
          const int64_t out = send[r].size() * element_size, in = receive[r].size() * element_size;
          if (out > 0) SHARDQ_NCCL(ncclSend(from + send[r].begin * element_size, out, ncclInt8, r, comm_, stream_));
          if (in > 0) SHARDQ_NCCL(ncclRecv(to + receive[r].begin * element_size, in, ncclInt8, r, comm_, stream_));
        }
      });
    });
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    enqueue("nccl broadcast", bytes,
            [&] { SHARDQ_NCCL(ncclBroadcast(data, data, bytes, ncclInt8, root, comm_, stream_)); });
  }

  void defer(bool on) override { deferring_ = on; }
  void join() override {
    SHARDQ_CUDA(cudaSetDevice(device_));
    SHARDQ_CUDA(cudaEventRecord(joined_, stream_));
    SHARDQ_CUDA(cudaStreamWaitEvent(compute_, joined_, 0));
  }

  /// The only collective for which the host waits.
  void barrier() override {
    all_reduce(token_, 1, ncclFloat32);
    const WatchedWait wait("nccl barrier");
    while (pending() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  struct Pending {
    cudaEvent_t done;
    const char* name;
  };

  static bool all_equal(std::span<const Range> ranges) {
    return std::ranges::all_of(ranges, [&](const Range& range) { return range.size() == ranges[0].size(); });
  }

  /// One call of a group.
  void start_gather(const Gathered& array) {
    auto* bytes = static_cast<char*>(array.data);
    if (all_equal(array.ranges)) {
      const int64_t count = array.ranges[0].size() * array.element_size;
      SHARDQ_NCCL(ncclAllGather(bytes + rank_ * count, bytes, count, ncclInt8, comm_, stream_));
      return;
    }
    for (int r = 0; r < size_; ++r) {
      if (array.ranges[r].size() == 0) continue;
      char* piece = bytes + array.ranges[r].begin * array.element_size;
      SHARDQ_NCCL(
          ncclBroadcast(piece, piece, array.ranges[r].size() * array.element_size, ncclInt8, r, comm_, stream_));
    }
  }

  /// The id travels over the host; every rank then polls until the others have come.
  void connect(Communicator& host) {
    // NVLink multicast needs fabric rights that shared machines often do not give, and its failure is a hang. The user
    // may ask for it.
    ::setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id{};
    agree(host, [&] {
      if (rank_ == 0) SHARDQ_NCCL(ncclGetUniqueId(&id));
    });
    host.broadcast(&id, sizeof id, 0);
    agree(host, [&] {
      const WatchedCollective watched("nccl connect");
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      SHARDQ_NCCL(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
      wait_for_host_part("ncclCommInitRankConfig");
    });
  }

  /// One collective of each kind on some memory: NCCL connects peers at the first use of each, which a broken link
  /// should spoil now and not after hours, and which is no part of any phase.
  void warm_up() {
    const int64_t count = int64_t{4} << 20, part = count / size_;
    float* data = nullptr;
    SHARDQ_CUDA(cudaMalloc(&data, 2 * count * sizeof(float)));
    SHARDQ_CUDA(cudaMemset(data, 0, 2 * count * sizeof(float)));
    std::vector<Range> parts;
    for (int r = 0; r < size_; ++r) parts.push_back({r * part, (r + 1) * part});
    all_reduce_sum(data, count);
    reduce_scatter_sum(data, parts);
    all_gather(data, parts, sizeof(float));
    all_to_all(data, parts, data + count, parts, sizeof(float));
    broadcast(data, count * static_cast<int64_t>(sizeof(float)), 0);
    barrier();
    SHARDQ_CUDA(cudaFree(data));
  }

  /// A non-blocking communicator takes the next call only after it has finished the last one's work on the host: tens
  /// of microseconds for a collective, which a sleep would double, and seconds for the first connection.
  void wait_for_host_part(const char* call) {
    const Stopwatch watch;
    for (;;) {
      ncclResult_t result = ncclSuccess;
      check_nccl(ncclCommGetAsyncError(comm_, &result), comm_, call);
      check_nccl(result, comm_, call);
      if (result != ncclInProgress) return;
      if (watch.seconds() < 1e-3)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  template <class Body>
  void group(const Body& body) {
    SHARDQ_NCCL(ncclGroupStart());
    body();
    SHARDQ_NCCL(ncclGroupEnd());
  }

  void all_reduce(void* data, int64_t count, ncclDataType_t type) {
    if (count == 0) return;
    enqueue("nccl all_reduce_sum", count * (type == ncclFloat32 ? 4 : 8),
            [&] { SHARDQ_NCCL(ncclAllReduce(data, data, count, type, ncclSum, comm_, stream_)); });
  }

  template <class Body>
  void enqueue(const char* name, int64_t bytes, const Body& body) {
    const WatchedCollective watched(name, bytes);
    SHARDQ_CUDA(cudaSetDevice(device_));
    SHARDQ_CUDA(cudaEventRecord(ready_, compute_));
    SHARDQ_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
    body();
    wait_for_host_part(name);
    const cudaEvent_t done = take_event();
    SHARDQ_CUDA(cudaEventRecord(done, stream_));
    if (!deferring_) SHARDQ_CUDA(cudaStreamWaitEvent(compute_, done, 0));
    {
      std::lock_guard lock(mutex_);
      pending_.push_back({done, name});
    }
    wake_.notify_all();
  }

  cudaEvent_t take_event() {
    {
      std::lock_guard lock(mutex_);
      if (!free_events_.empty()) {
        const cudaEvent_t event = free_events_.back();
        free_events_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    SHARDQ_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }

  size_t pending() {
    std::lock_guard lock(mutex_);
    return pending_.size();
  }

  /// The monitor thread: while a collective is under way, this is a guarded wait, and its end is progress.
  void watch_collectives() {
    cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !pending_.empty(); });
      if (stop_) return;
      const Pending head = pending_.front();
      lock.unlock();
      wait_for_end(head);
      lock.lock();
      if (stop_) return;
      pending_.pop_front();
      free_events_.push_back(head.done);
    }
  }

  void wait_for_end(const Pending& collective) {
    const WatchedWait wait(collective.name);
    auto pause = std::chrono::microseconds(20);  // short ones end soon; long ones are looked at rarely
    while (true) {
      const cudaError_t state = cudaEventQuery(collective.done);
      if (state == cudaSuccess) return report_progress();
      if (state != cudaErrorNotReady) end_process(collective.name, cudaGetErrorString(state));
      ncclResult_t result = ncclSuccess;
      ncclCommGetAsyncError(comm_, &result);
      if (result != ncclSuccess && result != ncclInProgress) end_process(collective.name, ncclGetLastError(comm_));
      {
        std::unique_lock lock(mutex_);
        if (wake_.wait_for(lock, pause, [this] { return stop_; })) return;
      }
      pause = std::min<std::chrono::microseconds>(2 * pause, kPoll);
    }
  }

  [[noreturn]] void end_process(const char* name, const char* reason) {
    std::fprintf(stderr, "[rank %d] %s failed on the device: %s; ending the job\n", rank_, name, reason);
    abort_job(static_cast<int>(ExitCode::internal));
  }

  int rank_, size_, device_;
  cudaStream_t compute_ = nullptr, stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, joined_ = nullptr;
  bool deferring_ = false;
  float* token_ = nullptr;  // one device float for the barrier
  ncclComm_t comm_ = nullptr;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<Pending> pending_;
  std::vector<cudaEvent_t> free_events_;
  bool stop_ = false;
  std::thread monitor_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, int device, void* stream) {
  return std::make_unique<NcclCommunicator>(host, device, static_cast<cudaStream_t>(stream));
}

}  // namespace shardq
#endif
