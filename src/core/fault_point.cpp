#include "core/fault_point.hpp"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/error.hpp"

namespace shardq {
namespace fault_point_detail {
std::atomic<bool> armed{false};
}

namespace {
enum class Action { kill, stop, terminate, raise_error, out_of_memory, sleep };

struct Fault {
  Action action = Action::kill;
  std::string point;
  int64_t visit = 1;  // 0: every visit
  std::optional<double> value;
  std::optional<int> rank;
};

struct Registry {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::map<std::string, int64_t, std::less<>> visits;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> pieces;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1)
    pieces.push_back(text.substr(begin, end - begin));
  pieces.push_back(text.substr(begin));
  return pieces;
}

/// Cuts `text` at the first `mark`; what follows the mark, or nothing without one.
std::optional<std::string> cut(std::string& text, char mark) {
  const size_t at = text.find(mark);
  if (at == std::string::npos) return std::nullopt;
  std::string rest = text.substr(at + 1);
  text.resize(at);
  return rest;
}

double number(const std::string& text, const std::string& fault) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  SHARDQ_CHECK(!text.empty() && *end == 0 && value >= 0, ExitCode::usage,
               "SHARDQ_FAULT: expected a number, found \"{}\" in \"{}\"", text, fault);
  return value;
}

Action parse_action(const std::string& name, const std::string& fault) {
  if (name == "kill") return Action::kill;
  if (name == "stop") return Action::stop;
  if (name == "term") return Action::terminate;
  if (name == "throw") return Action::raise_error;
  if (name == "oom") return Action::out_of_memory;
  if (name == "sleep") return Action::sleep;
  fail(ExitCode::usage, "SHARDQ_FAULT: expected kill, stop, term, throw, oom or sleep, found \"{}\" in \"{}\"", name,
       fault);
}

Fault parse_fault(const std::string& text) {
  Fault fault;
  std::vector<std::string> pieces = split(text, ',');
  std::string head = pieces[0];
  std::optional<std::string> place = cut(head, '@');
  SHARDQ_CHECK(place && !place->empty(), ExitCode::usage, "SHARDQ_FAULT: expected ACTION@POINT, found \"{}\"", text);
  fault.action = parse_action(head, text);
  if (auto value = cut(*place, '=')) fault.value = number(*value, text);
  if (auto visit = cut(*place, '#')) {
    fault.visit = *visit == "*" ? 0 : static_cast<int64_t>(number(*visit, text));
    SHARDQ_CHECK(*visit == "*" || fault.visit >= 1, ExitCode::usage, "SHARDQ_FAULT: visits count from 1 in \"{}\"",
                 text);
  }
  fault.point = *place;
  for (size_t i = 1; i < pieces.size(); ++i) {
    std::string key = pieces[i];
    std::optional<std::string> value = cut(key, '=');
    SHARDQ_CHECK(key == "rank" && value, ExitCode::usage, "SHARDQ_FAULT: expected rank=R, found \"{}\" in \"{}\"",
                 pieces[i], text);
    fault.rank = static_cast<int>(number(*value, text));
  }
  return fault;
}

void act(const Fault& fault, std::string_view name) {
  switch (fault.action) {
    case Action::kill:
      ::kill(::getpid(), SIGKILL);
      break;
    case Action::stop:
      ::kill(::getpid(), SIGSTOP);  // the whole process, not this thread alone
      break;
    case Action::terminate:
      ::raise(SIGTERM);  // this thread: handled before raise returns
      break;
    case Action::raise_error:
      throw Error(static_cast<ExitCode>(static_cast<int>(fault.value.value_or(77))),
                  fmt::format("fault injected at {}", name));
    case Action::out_of_memory:
      throw OutOfMemory(fmt::format("out of memory, injected at {}", name));
    case Action::sleep:
      std::this_thread::sleep_for(std::chrono::duration<double>(fault.value.value_or(1)));
      break;
  }
}
}  // namespace

void fault_point_detail::visit(std::string_view name) {
  std::vector<Fault> due;
  {
    std::lock_guard guard(registry().mutex);
    auto visits = registry().visits.find(name);
    if (visits == registry().visits.end()) visits = registry().visits.emplace(name, 0).first;
    const int64_t visit = ++visits->second;
    for (const Fault& fault : registry().faults)
      if (fault.point == name && (fault.visit == 0 || fault.visit == visit)) due.push_back(fault);
  }
  for (const Fault& fault : due) act(fault, name);
}

void arm_faults(const std::string& specification, int rank) {
  std::vector<Fault> faults;
  for (const std::string& text : split(specification, ';')) {
    if (text.empty()) continue;
    Fault fault = parse_fault(text);
    if (!fault.rank || *fault.rank == rank) faults.push_back(std::move(fault));
  }
  std::lock_guard guard(registry().mutex);
  registry().faults = std::move(faults);
  registry().visits.clear();
  fault_point_detail::armed.store(!registry().faults.empty(), std::memory_order_relaxed);
}

void arm_faults_from_environment(int rank) {
  const char* specification = std::getenv("SHARDQ_FAULT");
  arm_faults(specification ? specification : "", rank);
}

}  // namespace shardq
