#ifdef SHARDQ_WITH_MPI
#define OMPI_SKIP_MPICXX 1  // the C interface only
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "comm/communicator.hpp"
#include "comm/heartbeat.hpp"
#include "comm/launcher.hpp"
#include "comm/ranges.hpp"
#include "comm/transfer_limits.hpp"
#include "comm/watch.hpp"

namespace shardq {
namespace {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(ExitCode::internal, "MPI failed in {}: {}", call, text);
}
#define SHARDQ_MPI(call) check_mpi((call), #call)

constexpr int kReduceTag = 2, kExchangeTag = 3;

/// Sums over ranks happen in this type, in rank order: floats in double, rounded once.
template <class T>
struct SumType {
  using Type = T;
};
template <>
struct SumType<float> {
  using Type = double;
};

/// target[i] = sum over r of parts[r * count + i].
template <class T>
void sum_in_rank_order(const T* parts, int ranks, int64_t count, T* target) {
  constexpr int64_t kBlock = 1024;  // the running sums stay in the first-level cache
  typename SumType<T>::Type sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t width = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < width; ++i) sums[i] = parts[begin + i];
    for (int r = 1; r < ranks; ++r)
      for (int64_t i = 0; i < width; ++i) sums[i] += parts[r * count + begin + i];
    for (int64_t i = 0; i < width; ++i) target[begin + i] = static_cast<T>(sums[i]);
  }
}

/// Host memory over MPI.
///
/// Reductions are our own: every rank receives the others' contributions to its piece and adds them in rank order. That
/// moves as many bytes as the best library algorithm (each rank sends its vector once, and once more to gather an
/// all-reduce), and the bits of a sum depend on nothing but the number of ranks: not on the library, its tuning or the
/// nodes the ranks sit on. They do depend on which tokens each rank summed before. Independence of that too needs sums
/// that are exact in any grouping: integers (fixed point), which all_reduce_sum(int64_t*) adds without rounding.
class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    SHARDQ_MPI(MPI_Comm_rank(comm_, &rank_));
    SHARDQ_MPI(MPI_Comm_size(comm_, &size_));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "mpi"; }

  void all_reduce_sum(float* data, int64_t count) override { all_reduce(data, count); }
  void all_reduce_sum(double* data, int64_t count) override { all_reduce(data, count); }
  void all_reduce_sum(int64_t* data, int64_t count) override { all_reduce(data, count); }

  void reduce_scatter_sum(float* data, std::span<const Range> ranges) override {
    const int64_t count = check_ranges(ranges, size_, "reduce_scatter_sum");
    const WatchedCollective watched("reduce_scatter_sum", count * sizeof(float));
    const int64_t piece = std::max<int64_t>(1, transfer_limits().reduce_bytes / size_ / sizeof(float));
    int64_t longest = 0;
    for (const Range& range : ranges) longest = std::max(longest, range.size());
    std::vector<Range> pieces(size_);
    for (int64_t done = 0; done < longest; done += piece) {
      for (int r = 0; r < size_; ++r) {
        const int64_t begin = std::min(ranges[r].begin + done, ranges[r].end);
        pieces[r] = {begin, std::min(begin + piece, ranges[r].end)};
      }
      reduce_pieces(data, pieces);
    }
  }

  void all_gather(void* data, std::span<const Range> ranges, int64_t element_size) override {
    const int64_t count = check_ranges(ranges, size_, "all_gather");
    const WatchedCollective watched("all_gather", count * element_size);
    gather_bytes(static_cast<char*>(data), ranges, element_size);
  }

  void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                  int64_t element_size) override {
    check_exchange(send, receive, size_, rank_);
    const WatchedCollective watched("all_to_all", element_size);  // how much each rank sends is its own affair
    const auto* from = static_cast<const char*>(source);
    auto* to = static_cast<char*>(target);
    if (send[rank_].size() > 0)
      std::memcpy(to + receive[rank_].begin * element_size, from + send[rank_].begin * element_size,
                  send[rank_].size() * element_size);
    // Pairs at growing distance, so that every rank sends one message and receives one at a time. Pieces of a pair meet
    // in order; a rank waits only for pairs and pieces that come no later than its own, so nobody waits in a circle.
    for (int step = 1; step < size_; ++step) {
      const int next = (rank_ + step) % size_, previous = (rank_ + size_ - step) % size_;
      exchange(from + send[next].begin * element_size, send[next].size() * element_size, next,
               to + receive[previous].begin * element_size, receive[previous].size() * element_size, previous);
    }
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    const WatchedCollective watched("broadcast", bytes);
    broadcast_bytes(static_cast<char*>(data), bytes, root);
  }

  void barrier() override {
    const WatchedCollective watched("barrier");
    SHARDQ_MPI(MPI_Barrier(comm_));
  }

 private:
  template <class T>
  void all_reduce(T* data, int64_t count) {
    const WatchedCollective watched("all_reduce_sum", count * sizeof(T));
    if (count * size_ * static_cast<int64_t>(sizeof(T)) <= transfer_limits().small_bytes)
      return all_reduce_small(data, count);
    const int64_t chunk = std::max<int64_t>(size_, transfer_limits().reduce_bytes / sizeof(T));
    std::vector<Range> pieces(size_);
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t width = std::min(chunk, count - begin);
      for (int r = 0; r < size_; ++r) pieces[r] = part(width, size_, r);
      reduce_pieces(data + begin, pieces);
      gather_bytes(reinterpret_cast<char*>(data + begin), pieces, sizeof(T));
    }
  }

  /// One call instead of two rounds of messages.
  template <class T>
  void all_reduce_small(T* data, int64_t count) {
    std::vector<T> parts(count * size_);
    const int bytes = static_cast<int>(count * sizeof(T));
    SHARDQ_MPI(MPI_Allgather(data, bytes, MPI_BYTE, parts.data(), bytes, MPI_BYTE, comm_));
    sum_in_rank_order(parts.data(), size_, count, data);
  }

  /// data[pieces[rank]] = sum over ranks of that piece.
  template <class T>
  void reduce_pieces(T* data, const std::vector<Range>& pieces) {
    const Range mine = pieces[rank_];
    T* parts = staging<T>(mine.size() * size_);  // [ranks, mine.size()]
    std::vector<MPI_Request> requests;
    for (int step = 1; step < size_; ++step) {
      const int source = (rank_ + size_ - step) % size_;
      if (mine.size() == 0) break;
      SHARDQ_MPI(MPI_Irecv(parts + source * mine.size(), static_cast<int>(mine.size() * sizeof(T)), MPI_BYTE, source,
                           kReduceTag, comm_, &requests.emplace_back()));
    }
    for (int step = 1; step < size_; ++step) {
      const int target = (rank_ + step) % size_;
      if (pieces[target].size() == 0) continue;
      SHARDQ_MPI(MPI_Isend(data + pieces[target].begin, static_cast<int>(pieces[target].size() * sizeof(T)), MPI_BYTE,
                           target, kReduceTag, comm_, &requests.emplace_back()));
    }
    std::copy_n(data + mine.begin, mine.size(), parts + rank_ * mine.size());
    SHARDQ_MPI(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
    sum_in_rank_order(parts, size_, mine.size(), data + mine.begin);
    report_progress();
  }

  /// Sends to one rank while receiving from another, in pieces that fit an MPI count.
  void exchange(const char* out, int64_t out_bytes, int target, char* in, int64_t in_bytes, int source) {
    const int64_t piece = transfer_limits().message_bytes;
    for (int64_t done = 0; done < std::max(out_bytes, in_bytes); done += piece) {
      MPI_Request requests[2];
      int count = 0;
      if (done < in_bytes)
        SHARDQ_MPI(MPI_Irecv(in + done, static_cast<int>(std::min(piece, in_bytes - done)), MPI_BYTE, source,
                             kExchangeTag, comm_, &requests[count++]));
      if (done < out_bytes)
        SHARDQ_MPI(MPI_Isend(out + done, static_cast<int>(std::min(piece, out_bytes - done)), MPI_BYTE, target,
                             kExchangeTag, comm_, &requests[count++]));
      SHARDQ_MPI(MPI_Waitall(count, requests, MPI_STATUSES_IGNORE));
      report_progress();
    }
  }

  void gather_bytes(char* data, std::span<const Range> ranges, int64_t element_size) {
    const int64_t total = ranges.back().end * element_size;
    if (total > transfer_limits().message_bytes) {
      for (int r = 0; r < size_; ++r)
        broadcast_bytes(data + ranges[r].begin * element_size, ranges[r].size() * element_size, r);
      return;
    }
    std::vector<int> counts(size_), offsets(size_);
    for (int r = 0; r < size_; ++r) {
      counts[r] = static_cast<int>(ranges[r].size() * element_size);
      offsets[r] = static_cast<int>(ranges[r].begin * element_size);
    }
    SHARDQ_MPI(
        MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, counts.data(), offsets.data(), MPI_BYTE, comm_));
    report_progress();
  }

  void broadcast_bytes(char* data, int64_t bytes, int root) {
    for (int64_t done = 0; done < bytes; done += transfer_limits().message_bytes) {
      const int64_t width = std::min(transfer_limits().message_bytes, bytes - done);
      SHARDQ_MPI(MPI_Bcast(data + done, static_cast<int>(width), MPI_BYTE, root, comm_));
      report_progress();
    }
  }

  /// Memory for received contributions, kept from round to round: fresh pages would cost as much as the sums.
  template <class T>
  T* staging(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > staging_bytes_) {
      staging_ = std::make_unique_for_overwrite<char[]>(bytes);
      staging_bytes_ = bytes;
    }
    return reinterpret_cast<T*>(staging_.get());
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::unique_ptr<char[]> staging_;
  int64_t staging_bytes_ = 0;
};

/// MPI as this process started it; never destroyed, since only finish_communication may end it.
struct World {
  MPI_Comm comm = MPI_COMM_NULL;
  std::unique_ptr<Heartbeat> heartbeat;
};
World* world = nullptr;

bool mpi_is_running() {
  int started = 0, ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  return started && !ended;
}

void start_mpi(int* argc, char*** argv, const Launcher& launcher) {
#ifdef OPEN_MPI
  // Open MPI would end the process itself, with a page of text that never says "--mpi=pmix".
  SHARDQ_CHECK(launcher.speaks_mpi || launcher.tasks <= 1, ExitCode::usage,
               "{} started {} tasks without the PMIx that MPI needs: use `srun --mpi=pmix` (`srun --mpi=list` shows "
               "what is there)",
               launcher.name, launcher.tasks);
#endif
  int provided = MPI_THREAD_SINGLE;
  SHARDQ_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
  world = new World;
  SHARDQ_CHECK(provided == MPI_THREAD_MULTIPLE, ExitCode::internal,
               "this MPI library provides thread level {}, shardq needs MPI_THREAD_MULTIPLE ({})", provided,
               +MPI_THREAD_MULTIPLE);
  SHARDQ_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  int ranks = 1;
  SHARDQ_MPI(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  check_world_size(launcher, ranks);
  SHARDQ_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &world->comm));
  SHARDQ_MPI(MPI_Comm_set_errhandler(world->comm, MPI_ERRORS_RETURN));
  world->heartbeat = std::make_unique<Heartbeat>();
  watch_peers(world->heartbeat->table());
}

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(int* argc, char*** argv) {
  const Launcher launcher = detect_launcher();
  if (launcher.name.empty()) return make_single_communicator();
  if (!world) start_mpi(argc, argv, launcher);
  return std::make_unique<MpiCommunicator>(world->comm);
}

int local_rank(Communicator& host) {
  if (host.name() != "mpi") return 0;
  const WatchedCollective watched("local_rank");
  MPI_Comm node = MPI_COMM_NULL;
  int rank = 0;
  SHARDQ_MPI(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node));
  SHARDQ_MPI(MPI_Comm_rank(node, &rank));
  SHARDQ_MPI(MPI_Comm_free(&node));
  return rank;
}

void finish_communication() {
  if (!world || !mpi_is_running()) return;
  const WatchedCollective watched("finish_communication");
  if (world->heartbeat) {
    SHARDQ_MPI(MPI_Barrier(world->comm));  // a late rank is still watched by its heartbeat
    watch_peers(nullptr);
    world->heartbeat->finish();
  }
  if (world->comm != MPI_COMM_NULL) SHARDQ_MPI(MPI_Comm_free(&world->comm));
  SHARDQ_MPI(MPI_Finalize());
}

void abort_job(int code) {
  if (mpi_is_running()) {
    std::thread([code] {  // MPI_Abort waits for the launcher, which may be gone
      std::this_thread::sleep_for(std::chrono::seconds(10));
      std::_Exit(code);
    })
        .detach();
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  std::_Exit(code);
}

}  // namespace shardq
#endif
