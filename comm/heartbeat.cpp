#ifdef SHARDQ_WITH_MPI
#include "comm/heartbeat.hpp"

#define OMPI_SKIP_MPICXX 1  // the C interface only
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "comm/watch.hpp"

namespace shardq {
namespace {
constexpr std::chrono::milliseconds kPoll{50};
constexpr int kPollsPerBeat = 10;
constexpr int kTag = 1;
}  // namespace

// Errors of single calls are ignored on purpose: a peer that cannot be reached is silent, and silence is the watchdog's
// matter.
struct Heartbeat::State {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, ranks = 1;
  std::shared_ptr<PulseTable> table;
  std::atomic<bool> stop{false};
  std::thread thread;

  struct Send {
    int target = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    std::vector<Pulse> pulses;
  };
  std::vector<Send> sends;    // in the order they are served
  std::vector<int64_t> sent;  // messages to each rank so far
  int64_t received = 0;
  MPI_Request receive = MPI_REQUEST_NULL;
  std::vector<Pulse> incoming;

  int bytes() const { return static_cast<int>(ranks * sizeof(Pulse)); }

  void post_receive() { MPI_Irecv(incoming.data(), bytes(), MPI_BYTE, MPI_ANY_SOURCE, kTag, comm, &receive); }

  void take_arrivals() {
    for (int done = 1; done;) {
      if (MPI_Test(&receive, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) return;
      ++received;
      table->merge(incoming.data(), 0, ranks);
      post_receive();
    }
  }

  void send_round(int64_t beat) {
    Pulse mine = own_pulse();
    mine.beat = beat;
    table->merge(&mine, rank, 1);
    Send& send = sends[beat % sends.size()];
    int free = 0;
    if (MPI_Test(&send.request, &free, MPI_STATUS_IGNORE) != MPI_SUCCESS || !free) return;
    const auto entries = table->snapshot();
    for (int r = 0; r < ranks; ++r) send.pulses[r] = entries[r].pulse;
    if (MPI_Isend(send.pulses.data(), bytes(), MPI_BYTE, send.target, kTag, comm, &send.request) == MPI_SUCCESS)
      ++sent[send.target];
  }

  /// Nobody sends any more: receive exactly what is still under way.
  void drain() {
    int64_t expected = 0;
    MPI_Request counting = MPI_REQUEST_NULL;
    MPI_Ireduce_scatter_block(sent.data(), &expected, 1, MPI_INT64_T, MPI_SUM, comm, &counting);
    for (int counted = 0; !counted;) {
      MPI_Test(&counting, &counted, MPI_STATUS_IGNORE);
      take_arrivals();
      if (!counted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    while (received < expected) {
      take_arrivals();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (Send& send : sends) MPI_Wait(&send.request, MPI_STATUS_IGNORE);
    MPI_Cancel(&receive);
    MPI_Wait(&receive, MPI_STATUS_IGNORE);
  }

  void run() {
    post_receive();
    int64_t beat = 0;
    for (int64_t poll = 0; !stop; ++poll) {
      take_arrivals();
      if (poll % kPollsPerBeat == 0) send_round(++beat);
      std::this_thread::sleep_for(kPoll);
    }
    drain();
  }
};

Heartbeat::Heartbeat() : state_(new State) {
  State& s = *state_;
  MPI_Comm_dup(MPI_COMM_WORLD, &s.comm);
  MPI_Comm_set_errhandler(s.comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(s.comm, &s.rank);
  MPI_Comm_size(s.comm, &s.ranks);
  s.table = std::make_shared<PulseTable>(s.ranks);
  s.incoming.resize(s.ranks);
  s.sent.resize(s.ranks);
  for (int distance = 1; distance < s.ranks; distance *= 2)
    for (const int target : {(s.rank + distance) % s.ranks, (s.rank + s.ranks - distance) % s.ranks})
      s.sends.push_back({target, MPI_REQUEST_NULL, std::vector<Pulse>(s.ranks)});
  if (s.ranks > 1) s.thread = std::thread([&s] { s.run(); });
}

Heartbeat::~Heartbeat() = default;

std::shared_ptr<const PulseTable> Heartbeat::table() const {
  return state_->table;
}

void Heartbeat::finish() {
  state_->stop = true;
  if (state_->thread.joinable()) state_->thread.join();
  MPI_Comm_free(&state_->comm);
  delete state_;
  state_ = nullptr;
}

}  // namespace shardq
#endif
