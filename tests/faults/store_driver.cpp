// A small program that lives on a StageStore as the quantizer does, for the fault tests: ranks are forked processes
// that meet in a hub, each stage is computed from the one before, old stages are removed, and the output is written at
// the end.
//
//   store_driver run --ranks N --work DIR --output FILE [--stages K] [--rows R] [--pause MS]    goes on where the work
//   directory is store_driver verify --work DIR --notes FILE      everything the notes acknowledge is there, and all
//   that is there is right
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "io/files.hpp"
#include "io/stage_store.hpp"

// Exists when the recording library is preloaded.
extern "C" void io_shim_mark(const char*) __attribute__((weak));

namespace shardq {
namespace {
namespace fs = std::filesystem;

constexpr int64_t kWidth = 1500;  // of a row: 12 kB, so that a rank's part is several writes but no long one
constexpr int kKeep = 3;          // stages

struct Options {
  std::string mode;
  fs::path work, output, notes;
  int ranks = 1, stages = 12;
  int64_t rows = 61, pause_ms = 0;
};

Options parse(int argc, char** argv) {
  Options options;
  SHARDQ_CHECK(argc >= 2 && argc % 2 == 0, ExitCode::usage, "expected a mode and pairs of option and value");
  options.mode = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--work")
      options.work = value;
    else if (name == "--output")
      options.output = value;
    else if (name == "--notes")
      options.notes = value;
    else if (name == "--ranks")
      options.ranks = std::stoi(value);
    else if (name == "--stages")
      options.stages = std::stoi(value);
    else if (name == "--rows")
      options.rows = std::stoll(value);
    else if (name == "--pause")
      options.pause_ms = std::stoll(value);
    else
      fail(ExitCode::usage, "unknown option {}", name);
  }
  return options;
}

// ---- ranks ---------------------------------------------------------------------------------------

void send_all(int socket, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(socket, at, bytes, MSG_NOSIGNAL);
    SHARDQ_CHECK(n > 0, ExitCode::internal, "a rank is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}
void receive_all(int socket, void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket, at, bytes, 0);
    SHARDQ_CHECK(n > 0, ExitCode::internal, "a rank is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}
void send_string(int socket, const std::string& text) {
  const uint64_t bytes = text.size();
  send_all(socket, &bytes, sizeof bytes);
  send_all(socket, text.data(), text.size());
}
std::string receive_string(int socket) {
  uint64_t bytes = 0;
  receive_all(socket, &bytes, sizeof bytes);
  std::string text(bytes, '\0');
  receive_all(socket, text.data(), text.size());
  return text;
}

/// Forks the ranks, passes strings around until one ends, and ends the others when one failed, as a launcher does.
int run_ranks(int count, const std::function<void(StageStore::Ranks)>& body) {
  std::vector<pid_t> children;
  std::vector<int> sockets;
  for (int rank = 0; rank < count; ++rank) {
    int pair[2];
    SHARDQ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, ExitCode::internal, "no socket pair");
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (int other : sockets) ::close(other);  // or a dead rank's socket stays open
      ::close(pair[0]);
      ::setenv("IO_SHIM_RANK", std::to_string(rank).c_str(), 1);
      try {
        arm_faults_from_environment(rank);
        body({rank, count, [socket = pair[1], count](const std::string& mine) {
                send_string(socket, mine);
                std::vector<std::string> all;
                for (int other = 0; other < count; ++other) all.push_back(receive_string(socket));
                return all;
              }});
        std::_Exit(0);
      } catch (const Error& error) {
        std::cerr << "store_driver: " << error.what() << std::endl;
        std::_Exit(static_cast<int>(error.code()));
      }
    }
    ::close(pair[1]);
    children.push_back(child);
    sockets.push_back(pair[0]);
  }
  try {
    while (true) {
      std::vector<std::string> all;
      for (int socket : sockets) all.push_back(receive_string(socket));
      for (int socket : sockets)
        for (const std::string& text : all) send_string(socket, text);
    }
  } catch (const Error&) {
    // The first rank to end: alone with the others if all is well.
  }
  int result = 0;
  bool killed = false;
  for (size_t ended = 0; ended < children.size(); ++ended) {
    int status = 0;
    if (::waitpid(-1, &status, 0) < 0) break;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 0 || killed) continue;
    result = code;
    killed = true;
    // A moment for the others to report the same failure themselves.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (pid_t child : children) ::kill(child, SIGKILL);
  }
  return result;
}

// ---- the computation -----------------------------------------------------------------------------

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Rows of the state: every stage maps every word.
using State = std::vector<uint64_t>;

State first_state(Range rows) {
  State state;
  for (int64_t i = rows.begin * kWidth; i < rows.end * kWidth; ++i) state.push_back(mixed(static_cast<uint64_t>(i)));
  return state;
}
void advance(State& state, int stage) {
  for (uint64_t& word : state) word = mixed(word + static_cast<uint64_t>(stage));
}
State state_after(int stage, Range rows) {
  State state = first_state(rows);
  for (int i = 0; i <= stage; ++i) advance(state, i);
  return state;
}

std::string stage_name(int stage) {
  return fmt::format("layer{:04}", stage);
}
int stage_number(const std::string& name) {
  return std::stoi(name.substr(5));
}

StageArray as_array(const State& state, Range rows, int64_t total) {
  StageArray array{"hidden", DType::u64, {rows.size(), kWidth}, rows.begin, total, {}};
  array.data.resize(state.size() * sizeof(uint64_t));
  std::memcpy(array.data.data(), state.data(), array.data.size());
  return array;
}
State from_array(const StageArray& array) {
  State state(array.data.size() / sizeof(uint64_t));
  std::memcpy(state.data(), array.data.data(), array.data.size());
  return state;
}
std::string digest(const State& state) {
  return fmt::format("{:016x}", checksum(state.data(), static_cast<int64_t>(state.size() * sizeof(uint64_t))));
}

void note(const StageStore::Ranks& ranks, const std::string& text) {
  if (ranks.rank == 0 && io_shim_mark) io_shim_mark(text.c_str());
}

const std::map<std::string, std::string> kFingerprint = {{"model", "driver"}};

void run(const Options& options, const StageStore::Ranks& ranks) {
  StageStore store(options.work, ranks, kFingerprint, true);
  const Range rows = part(options.rows, ranks.size, ranks.rank);
  const auto stages = store.stages();
  int done = stages.empty() ? -1 : stage_number(stages.back().name);
  State state =
      done < 0 ? first_state(rows) : from_array(store.read(stages.back().name, "hidden", rows.begin, rows.end));
  if (store.finished()) return;
  for (int stage = done + 1; stage < options.stages; ++stage) {
    advance(state, stage);
    std::this_thread::sleep_for(std::chrono::milliseconds(options.pause_ms));
    fault_point("stage_computed");
    store.complete();
    if (stage > done + 1) note(ranks, stage_name(stage - 1));
    std::vector<StageArray> arrays;
    arrays.push_back(as_array(state, rows, options.rows));
    if (ranks.rank == stage % ranks.size)
      arrays.push_back({"codes", DType::u8, {9}, 0, 9, std::vector<std::byte>(9, static_cast<std::byte>(stage))});
    store.put(stage_name(stage), std::move(arrays), fmt::format("{{\"stage\": {}}}", stage));
    if (store.has(stage_name(stage - kKeep))) store.remove({stage_name(stage - kKeep)});
  }
  store.complete();
  if (done + 1 < options.stages) note(ranks, stage_name(options.stages - 1));
  const std::vector<std::string> digests = ranks.gather(digest(state));
  if (ranks.rank == 0) {
    // Whole-state digest, so that the output does not depend on the number of ranks.
    const State whole = from_array(store.read(stage_name(options.stages - 1), "hidden", 0, options.rows));
    std::error_code error;
    fs::create_directories(options.output.parent_path(), error);
    SHARDQ_CHECK(!error, ExitCode::disk, "cannot create {}: {}", options.output.parent_path().string(),
                 error.message());
    sync_folder(options.output.parent_path().parent_path());
    write_text_durably(options.output, digest(whole) + "\n");
  }
  store.finish(options.output.string());
  note(ranks, "finished");
}

/// Exits 0 when the work directory keeps its promises: nothing acknowledged is lost, nothing present is wrong.
void verify(const Options& options) {
  int acknowledged = -1;
  bool finished = false;
  std::ifstream notes(options.notes);
  for (std::string line; std::getline(notes, line);) {
    if (line == "finished")
      finished = true;
    else
      acknowledged = std::max(acknowledged, stage_number(line));
  }
  const StageStore store(options.work, {}, kFingerprint, true);
  int newest = -1;
  for (const StageInfo& stage : store.stages()) {
    newest = std::max(newest, stage_number(stage.name));
    const int64_t rows = store.arrays(stage.name).at("hidden");
    SHARDQ_CHECK(
        from_array(store.read(stage.name, "hidden", 0, rows)) == state_after(stage_number(stage.name), {0, rows}),
        ExitCode::disk, "{} is wrong", stage.name);
    for (std::byte code : store.read(stage.name, "codes", 0, 9).data)
      SHARDQ_CHECK(static_cast<int>(code) == stage_number(stage.name), ExitCode::disk, "codes of {} are wrong",
                   stage.name);
  }
  SHARDQ_CHECK(newest >= acknowledged, ExitCode::disk, "stage {} was acknowledged, the newest is {}", acknowledged,
               newest);
  SHARDQ_CHECK(!finished || store.finished(), ExitCode::disk, "the end was acknowledged and is lost");
}

int main_of(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.mode == "run")
    return run_ranks(options.ranks, [&](const StageStore::Ranks& ranks) { run(options, ranks); });
  SHARDQ_CHECK(options.mode == "verify", ExitCode::usage, "unknown mode {}", options.mode);
  verify(options);
  return 0;
}
}  // namespace
}  // namespace shardq

int main(int argc, char** argv) {
  try {
    return shardq::main_of(argc, argv);
  } catch (const shardq::Error& error) {
    std::cerr << "store_driver: " << error.what() << std::endl;
    return static_cast<int>(error.code());
  }
}
