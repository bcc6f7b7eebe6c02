// Every collective of the host communicator on as many ranks as the launcher gives, against sums computed here: all
// values that ranks bring are known to everybody. Sums must be exact to the bit: floats added in double in rank order,
// rounded once.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "comm/communicator.hpp"
#include "comm/transfer_limits.hpp"
#include "exchange_pattern.hpp"

namespace {
using namespace shardq;

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

/// The value rank `rank` brings at `index`: cheap, different everywhere, of mixed magnitude so that the order of a
/// float sum shows.
float value(int rank, int64_t index) {
  const auto mix = static_cast<uint32_t>(index * 2654435761u + rank * 40503u + 12345u) * 2246822519u;
  const float fraction = static_cast<float>(mix >> 8) / 16777216.0f - 0.5f;
  return std::ldexp(fraction, static_cast<int>(mix & 31u) - 16);
}

float expected_sum(int ranks, int64_t index) {
  double sum = 0;
  for (int r = 0; r < ranks; ++r) sum += value(r, index);
  return static_cast<float>(sum);
}

std::vector<float> my_values(const Communicator& comm, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = value(comm.rank(), i);
  return values;
}

bool holds_sum(const std::vector<float>& values, Range range, int ranks) {
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float sum = expected_sum(ranks, i);
    if (std::memcmp(&values[i], &sum, sizeof sum) != 0) return false;
  }
  return true;
}

/// Ranges of very different length: some empty, the last not.
std::vector<Range> ragged(int ranks, int64_t unit) {
  std::vector<Range> ranges;
  int64_t end = 0;
  for (int r = 0; r < ranks; ++r) {
    const int64_t length = r % 3 == 1 ? 0 : unit * (r + 1) + r;
    ranges.push_back({end, end + length});
    end += length;
  }
  return ranges;
}

void test_helper_can_fail() {
  std::vector<float> values(4);
  for (int64_t i = 0; i < 4; ++i) values[i] = expected_sum(3, i);
  expect(holds_sum(values, {0, 4}, 3), "holds_sum accepts the right sum");
  values[2] = std::nextafter(values[2], 1e9f);
  expect(!holds_sum(values, {0, 4}, 3), "holds_sum refuses one unit in the last place");
  expect(!holds_sum(values, {2, 3}, 3), "holds_sum looks at the range it is given");
}

void test_all_reduce(Communicator& comm) {
  for (const int64_t count : {0, 1, 2, 3, 7, 1000, 100'003}) {
    std::vector<float> values = my_values(comm, count);
    comm.all_reduce_sum(values.data(), count);
    expect(holds_sum(values, {0, count}, comm.size()), fmt::format("all_reduce_sum of {} floats", count));

    std::vector<double> doubles(count);
    std::vector<int64_t> integers(count);
    for (int64_t i = 0; i < count; ++i) {
      doubles[i] = 0.1 * (comm.rank() + 1) + i;
      integers[i] = (int64_t{1} << 40) * (comm.rank() + 1) + i;
    }
    comm.all_reduce_sum(doubles.data(), count);
    comm.all_reduce_sum(integers.data(), count);
    bool right = true;
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      int64_t integer_sum = 0;
      for (int r = 0; r < comm.size(); ++r) {
        sum += 0.1 * (r + 1) + i;
        integer_sum += (int64_t{1} << 40) * (r + 1) + i;
      }
      right = right && doubles[i] == sum && integers[i] == integer_sum;
    }
    expect(right, fmt::format("all_reduce_sum of {} doubles and integers", count));
  }
}

void test_reduce_scatter(Communicator& comm) {
  for (const int64_t unit : {0, 1, 5, 3000, 40'000}) {
    const std::vector<Range> ranges = ragged(comm.size(), unit);
    std::vector<float> values = my_values(comm, ranges.back().end);
    comm.reduce_scatter_sum(values.data(), ranges);
    expect(holds_sum(values, ranges[comm.rank()], comm.size()), fmt::format("reduce_scatter_sum, unit {}", unit));
  }
}

void test_all_gather(Communicator& comm) {
  for (const int64_t element_size : {1, 2, 4, 12}) {
    for (const int64_t unit : {0, 1, 3000}) {
      const std::vector<Range> ranges = ragged(comm.size(), unit);
      std::vector<uint8_t> data(ranges.back().end * element_size, 0xee);
      const auto expected = [](int64_t byte) { return static_cast<uint8_t>(byte * 31 + byte / 251); };
      const Range mine = ranges[comm.rank()];
      for (int64_t i = mine.begin * element_size; i < mine.end * element_size; ++i) data[i] = expected(i);
      comm.all_gather(data.data(), ranges, element_size);
      bool right = true;
      for (int64_t i = 0; i < static_cast<int64_t>(data.size()); ++i) right = right && data[i] == expected(i);
      expect(right, fmt::format("all_gather of {} x {} bytes", ranges.back().end, element_size));

      std::vector<uint8_t> again(data.size(), 0xee);
      std::copy(data.begin() + mine.begin * element_size, data.begin() + mine.end * element_size,
                again.begin() + mine.begin * element_size);
      std::vector<int64_t> numbers(comm.size(), comm.rank());
      std::vector<Range> one_each;
      for (int64_t r = 0; r < comm.size(); ++r) one_each.push_back({r, r + 1});
      comm.all_gather_each(std::vector<Communicator::Gathered>{{again.data(), ranges, element_size},
                                                               {numbers.data(), one_each, sizeof(int64_t)}});
      for (int64_t r = 0; r < comm.size(); ++r) right = right && numbers[r] == r;
      expect(right && again == data, "all_gather_each of two arrays");
    }
  }
}

void test_all_to_all(Communicator& comm) {
  for (const int64_t element_size : {1, 2, 12}) {
    for (const int64_t unit : {0, 1, 3000, 20'000}) {
      const testing::ExchangePattern pattern{comm.size(), unit, element_size};
      const std::vector<uint8_t> source = pattern.sent(comm.rank()), expected = pattern.expected(comm.rank());
      std::vector<uint8_t> target(expected.size(), 0xee);
      comm.all_to_all(source.data(), pattern.send(comm.rank()), target.data(), pattern.receive(comm.rank()),
                      element_size);
      expect(target == expected, fmt::format("all_to_all, unit {} x {} bytes", unit, element_size));
    }
  }
}

void test_broadcast(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const int64_t bytes : {0, 1, 4097, 70'000}) {
      std::vector<uint8_t> data(bytes);
      const auto expected = [&](int64_t i) { return static_cast<uint8_t>(i * 7 + root + 1); };
      if (comm.rank() == root)
        for (int64_t i = 0; i < bytes; ++i) data[i] = expected(i);
      comm.broadcast(data.data(), bytes, root);
      bool right = true;
      for (int64_t i = 0; i < bytes; ++i) right = right && data[i] == expected(i);
      expect(right, fmt::format("broadcast of {} bytes from rank {}", bytes, root));
    }
  }
}

void test_agreement(Communicator& comm) {
  const int last = comm.size() - 1;
  const auto message_of = [&](const std::function<void()>& body) -> std::string {
    try {
      agree(comm, body);
    } catch (const AgreedError& error) {
      return fmt::format("{} {}", static_cast<int>(error.code()), error.what());
    }
    return "nothing";
  };
  const std::string prefix = comm.size() > 1 ? fmt::format("rank {}: ", last) : "";
  expect(message_of([] {}) == "nothing", "agree with nobody failing");
  const auto last_fails = [&] {
    if (comm.rank() == last) fail(ExitCode::input, "bad file {}", last);
  };
  const std::string expected = fmt::format("3 {}bad file {}", prefix, last);
  expect(message_of(last_fails) == expected, "agree with the last rank failing");
  expect(message_of([&] { agree(comm, last_fails); }) == expected, "a nested agree keeps rank and message");
  const std::string all = message_of([&] { throw std::runtime_error(fmt::format("cause {}", comm.rank())); });
  expect(all == (comm.size() > 1 ? "77 rank 0: cause 0" : "77 cause 0"), "agree names the lowest failing rank: " + all);

  expect(!any_rank(comm, false), "any_rank of nobody");
  expect(any_rank(comm, comm.rank() == last), "any_rank of one");
  const auto strings = all_gather_strings(comm, std::string(comm.rank() * 3, 'a' + comm.rank()));
  bool right = static_cast<int>(strings.size()) == comm.size();
  for (int r = 0; right && r < comm.size(); ++r) right = strings[r] == std::string(r * 3, 'a' + r);
  expect(right, "all_gather_strings with an empty one");
}

void test_wrong_ranges(Communicator& comm) {
  std::vector<float> values(16);
  const auto refused = [&](std::vector<Range> ranges) {
    try {
      comm.all_gather(values.data(), ranges, sizeof(float));
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  std::vector<Range> gap(comm.size(), Range{16, 16});
  gap[0] = {1, 16};
  expect(refused(gap), "ranges with a gap are refused");
  expect(refused(std::vector<Range>(comm.size() + 1)), "one range too many is refused");
}

void run_all(Communicator& comm) {
  test_all_reduce(comm);
  test_reduce_scatter(comm);
  test_all_gather(comm);
  test_all_to_all(comm);
  test_broadcast(comm);
  comm.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  auto comm = make_host_communicator(&argc, &argv);
  start_watchdog(comm->rank(), 60);
  if (argc > 1)
    expect(comm->size() == std::atoi(argv[1]), fmt::format("expected {} ranks, found {}", argv[1], comm->size()));
  test_helper_can_fail();
  run_all(*comm);
  test_agreement(*comm);
  test_wrong_ranges(*comm);
  const int local = local_rank(*comm);
  expect(local >= 0 && local < comm->size(), "local_rank");

  transfer_limits() = {.message_bytes = 4096, .reduce_bytes = 1000, .small_bytes = 64};  // everything is split now
  run_all(*comm);
  test_agreement(*comm);

  int64_t failed = failures;
  comm->all_reduce_sum(&failed, 1);
  if (comm->rank() == 0)
    std::printf("%s: %d ranks, %d failures\n", comm->name().c_str(), comm->size(), static_cast<int>(failed));
  finish_communication();
  stop_watchdog();
  return failed ? 1 : 0;
}
