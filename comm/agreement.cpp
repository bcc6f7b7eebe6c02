#include <cstdint>
#include <exception>

#include "comm/communicator.hpp"

namespace shardq {
namespace {

/// What one rank brings to the vote.
struct Outcome {
  int64_t code = 0;     ///< 0: fine; else an ExitCode
  bool agreed = false;  ///< already the common error of a nested agree: says its rank itself
  std::string message;
};

Outcome run(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const AgreedError& error) {
    return {static_cast<int64_t>(error.code()), true, error.what()};
  } catch (const Error& error) {
    return {static_cast<int64_t>(error.code()), false, error.what()};
  } catch (const std::bad_alloc&) {
    return {static_cast<int64_t>(ExitCode::internal), false, "out of host memory"};
  } catch (const std::exception& error) {
    return {static_cast<int64_t>(ExitCode::internal), false, error.what()};
  } catch (...) {
    return {static_cast<int64_t>(ExitCode::internal), false, "an exception of unknown type"};
  }
}

}  // namespace

std::vector<int64_t> all_gather_numbers(Communicator& comm, int64_t mine) {
  std::vector<int64_t> numbers(comm.size());
  std::vector<Range> one_each;
  for (int64_t r = 0; r < comm.size(); ++r) one_each.push_back({r, r + 1});
  numbers[comm.rank()] = mine;
  comm.all_gather(numbers.data(), one_each, sizeof(int64_t));
  return numbers;
}

std::vector<std::string> all_gather_strings(Communicator& comm, const std::string& mine) {
  const std::vector<int64_t> lengths = all_gather_numbers(comm, static_cast<int64_t>(mine.size()));
  std::vector<Range> ranges;
  int64_t total = 0;
  for (const int64_t length : lengths) {
    ranges.push_back({total, total + length});
    total += length;
  }
  std::string all(total, '\0');
  mine.copy(all.data() + ranges[comm.rank()].begin, mine.size());
  comm.all_gather(all.data(), ranges, 1);
  std::vector<std::string> strings;
  for (const Range& range : ranges) strings.push_back(all.substr(range.begin, range.size()));
  return strings;
}

void agree(Communicator& comm, const std::function<void()>& body) {
  Outcome mine = run(body);
  const std::vector<int64_t> codes = all_gather_numbers(comm, mine.code);
  for (int r = 0; r < comm.size(); ++r) {
    if (codes[r] == 0) continue;
    // Some name their rank themselves (the stage store, which has its own way to agree).
    if (!mine.agreed && comm.size() > 1 && !mine.message.starts_with("rank "))
      mine.message = fmt::format("rank {}: {}", comm.rank(), mine.message);
    throw AgreedError(static_cast<ExitCode>(codes[r]), all_gather_strings(comm, mine.message)[r]);
  }
}

bool any_rank(Communicator& comm, bool flag) {
  int64_t flags = flag ? 1 : 0;
  comm.all_reduce_sum(&flags, 1);
  return flags > 0;
}

}  // namespace shardq
