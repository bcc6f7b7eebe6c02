#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace shardq {

/// Process exit codes; documented for users in README.md.
enum class ExitCode : int {
  ok = 0,
  usage = 2,      ///< command line or recipe
  input = 3,      ///< model directory or token file
  disk = 4,       ///< output, checkpoint or other I/O
  fallbacks = 5,  ///< more modules fell back to rounding than max_rtn_fraction allows
  internal = 77,  ///< our own fault, or a device/communication failure
  stopped = 85,   ///< stopped on request, resumable
  stalled = 87,   ///< the watchdog ended a stalled wait
};

/// An error with the exit code it ends the process with. The message is one line: what was expected, what was found, where.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// Memory of a backend did not suffice, after everything idle was given back. Another try may do with less.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& message) : Error(ExitCode::internal, message) {}
};

template <class... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace shardq

/// Always-on check of what a user or a file can get wrong: SHARDQ_CHECK(ok, ExitCode::input, "expected {} found {}", a, b).
#define SHARDQ_CHECK(condition, code, ...)                          \
  do {                                                              \
    if (!(condition)) [[unlikely]] ::shardq::fail(code, __VA_ARGS__); \
  } while (0)
