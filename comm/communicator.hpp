#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/view.hpp"

namespace shardq {

/// Collectives over the ranks of a job. One object moves host memory (single process or MPI); on GPUs a second one
/// (NCCL) moves device memory. Element counts, never bytes by hand. Every rank makes the same calls in the same order.
///
/// Failure: any transport error, or a wait longer than the deadline, throws or ends the process; nobody waits for a
/// dead peer.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "single", "mpi" or "nccl".
  virtual std::string name() const = 0;

  /// In place, element-wise sum over ranks.
  virtual void all_reduce_sum(float* data, int64_t count) = 0;
  virtual void all_reduce_sum(double* data, int64_t count) = 0;
  virtual void all_reduce_sum(int64_t* data, int64_t count) = 0;
  /// In place: afterwards ranges[rank()] of `data` holds the sum over ranks of that range; the rest is unspecified.
  /// ranges: one a rank, disjoint, ascending, together [0, count).
  virtual void reduce_scatter_sum(float* data, std::span<const Range> ranges) = 0;
  /// In place: every rank contributes ranges[rank()] (in elements of `element_size` bytes) and ends with all.
  virtual void all_gather(void* data, std::span<const Range> ranges, int64_t element_size) = 0;
  /// all_gather of several arrays, which on GPUs start together: what a start costs is paid once.
  struct Gathered {
    void* data;
    std::vector<Range> ranges;
    int64_t element_size;
  };
  virtual void all_gather_each(std::span<const Gathered> arrays) {
    for (const Gathered& array : arrays) all_gather(array.data, array.ranges, array.element_size);
  }
  /// Every rank sends send[r] of `source` to rank r and receives what rank r sends it at receive[r] of `target` (its
  /// own part is copied). Both ranges: one a rank, ascending, without gaps from 0; receive[r] on rank q is as long as
  /// send[q] on rank r, which the caller sees to. source and target must not overlap.
  virtual void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                          int64_t element_size) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  virtual void barrier() = 0;

  /// Collectives called while `on` may run beside what the caller does after them: their memory must stay as it is
  /// until join(), which puts them before everything that follows. Without effect where collectives are done on return.
  virtual void defer(bool on) { (void)on; }
  virtual void join() {}
};

/// Defers collectives for its lifetime.
class Deferred {
 public:
  explicit Deferred(Communicator& comm) : comm_(comm) { comm_.defer(true); }
  ~Deferred() { comm_.defer(false); }
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

 private:
  Communicator& comm_;
};

/// Conveniences that need only the interface.

/// Every rank's string, in rank order. Like `agree` and `any_rank` it moves host memory: give it the host communicator.
std::vector<std::string> all_gather_strings(Communicator& comm, const std::string& mine);
/// Every rank's number, in rank order.
std::vector<int64_t> all_gather_numbers(Communicator& comm, int64_t mine);
/// What `agree` throws, on every rank alike: the job may end in order (one voice, finish_communication, the same exit
/// code), whereas any other Error was thrown on one rank alone and needs abort_job.
class AgreedError : public Error {
 public:
  using Error::Error;
};
/// Runs `body` on every rank; if any rank throws, ALL ranks throw the error of the lowest failing rank ("rank R:
/// message"; the bare message where alone) as an AgreedError with its exit code. A collective, to be used before and
/// around collective phases. Calls may be nested.
void agree(Communicator& comm, const std::function<void()>& body);
/// The logical OR of a flag over the ranks.
bool any_rank(Communicator& comm, bool flag);

/// Compares what collectives (names and sizes, in order) the ranks have made since the last check. A collective; call
/// it once a layer. Errors: AgreedError(internal) naming `where` and the first call that differs. A difference that
/// makes ranks wait for each other before they come here is the watchdog's.
void check_schedule(Communicator& host, const char* where);

/// Host communicator for a process alone.
std::unique_ptr<Communicator> make_single_communicator();
/// Starts MPI (MPI_THREAD_MULTIPLE) and returns its world, or the single one when not launched under MPI or not
/// compiled in. Throws Error(usage) for N singletons under a launcher that says N > 1 tasks (SLURM_NTASKS /
/// OMPI_COMM_WORLD_SIZE / PMI_SIZE against MPI_Comm_size).
std::unique_ptr<Communicator> make_host_communicator(int* argc, char*** argv);
/// A test's communicator over `inner` (which outlives it): what is deferred runs as late as it may, at join() or before
/// the next collective that is not. Whoever touches the memory of a deferred collective too early gets other results.
std::unique_ptr<Communicator> make_late_communicator(Communicator& inner);
/// Rank among the ranks on this node (0 where alone): chooses the GPU.
int local_rank(Communicator& host);
/// NCCL communicator for device memory; the id travels over `host`. Throws Error(internal) when not compiled in.
/// `stream` is the compute stream (cudaStream_t): collectives are ordered after what it has enqueued, and it after
/// them.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, int device, void* stream);
/// Ends MPI after a clean run; on a failed one call abort_job instead.
void finish_communication();
/// Ends the whole job at once (MPI_Abort with `code`; exit where alone). Never returns.
[[noreturn]] void abort_job(int code);

/// The watchdog: a thread that ends the job with exit code 87 and a message naming rank, operation and its number. It
/// looks only at guarded waits (WatchedWait; every collective is one), and ends the job when such a wait is older than
///   - `silence_seconds`, and a peer's heartbeat has been missing for as long (stopped, lost, network gone), or
///   - `seconds`, and no rank of the job has made progress for as long (a deadlock). 0: no watchdog at all.
/// A slow rank that makes progress is spared, however long others wait for it. Time in which this process itself was
/// suspended (scontrol suspend, SIGSTOP of the whole job) does not count. Every rank must use the same values.
void start_watchdog(int rank, double seconds, double silence_seconds = 20);
void stop_watchdog();
/// Says that this rank is alive and getting on: call it at least every few seconds of work (a sample, a tap, a module).
/// Costs one atomic addition. `what` must be a literal; it is shown when others wait for this rank in vain.
void report_progress(const char* what = nullptr);
/// Marks a region in which this thread waits for others or for the device. Nested regions are allowed: the name shown
/// is the innermost one's, the time the outermost one's. `name` must be a literal.
class WatchedWait {
 public:
  explicit WatchedWait(const char* name);
  ~WatchedWait();
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;

 private:
  const char* outer_;
  int64_t outer_since_;
};

}  // namespace shardq
