#include "comm/schedule.hpp"

#include <algorithm>
#include <numeric>

#include "comm/communicator.hpp"

namespace shardq {
namespace {

constexpr size_t kMostCalls = 1 << 20;  // of a program that never compares; equal schedules stay equal

/// The line at `index` (from 0) in words.
std::string call_at(const std::string& text, int64_t index) {
  size_t begin = 0;
  for (; index > 0 && begin < text.size(); --index) begin = text.find('\n', begin) + 1;
  if (begin >= text.size()) return "nothing";
  const std::string line = text.substr(begin, text.find('\n', begin) - begin);
  const size_t space = line.rfind(' ');
  return fmt::format("{} of {} bytes", line.substr(0, space), line.substr(space + 1));
}

}  // namespace

void Schedule::add(const char* name, int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (calls_.size() == kMostCalls) calls_.clear();
  calls_.push_back({name, bytes});
}

uint64_t Schedule::hash() const {
  std::lock_guard lock(mutex_);
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  const auto mix = [&](uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3u; };
  for (const Call& call : calls_) {
    for (const char* c = call.name; *c; ++c) mix(static_cast<uint8_t>(*c));
    for (int shift = 0; shift < 64; shift += 8) mix(static_cast<uint8_t>(call.bytes >> shift));
  }
  return hash;
}

std::string Schedule::text() const {
  std::lock_guard lock(mutex_);
  std::string text;
  for (const Call& call : calls_) text += fmt::format("{} {}\n", call.name, call.bytes);
  return text;
}

void Schedule::clear() {
  std::lock_guard lock(mutex_);
  calls_.clear();
}

Schedule& own_schedule() {
  static auto* schedule = new Schedule;
  return *schedule;
}

std::string first_difference(std::span<const std::string> texts) {
  const std::string& first = texts[0];
  for (size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == first) continue;
    const auto split = std::mismatch(first.begin(), first.end(), texts[r].begin(), texts[r].end()).first;
    const int64_t index = std::count(first.begin(), split, '\n');
    return fmt::format("call {} is {} on rank 0, {} on rank {}", index + 1, call_at(first, index),
                       call_at(texts[r], index), r);
  }
  return {};
}

void check_schedule(Communicator& host, const char* where) {
  if (host.size() == 1) return;
  const std::string mine = own_schedule().text();
  std::vector<uint64_t> hashes(host.size());
  hashes[host.rank()] = own_schedule().hash();
  std::vector<Range> ranges(host.size());
  for (int r = 0; r < host.size(); ++r) ranges[r] = {r, r + 1};
  host.all_gather(hashes.data(), ranges, sizeof(uint64_t));
  own_schedule().clear();
  if (std::ranges::all_of(hashes, [&](uint64_t hash) { return hash == hashes[0]; })) return;
  const std::string difference = first_difference(all_gather_strings(host, mine));
  throw AgreedError(ExitCode::internal, fmt::format("ranks disagree on the collectives of {}: {}", where, difference));
}

}  // namespace shardq
