// Every collective of the NCCL communicator, one rank a GPU: comm_nccl [RANKS] [stop|kill]. Values come back to the
// host and are compared with sums computed there. With a fault, rank 1 stops or dies before a collective while the
// others sit in a stream synchronisation, where nothing but the monitor thread and the watchdog can help. Without
// enough GPUs: skipped, exit code 125.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>

#include "comm/communicator.hpp"
#include "exchange_pattern.hpp"

namespace {
using namespace shardq;

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

void check(cudaError_t code) {
  SHARDQ_CHECK(code == cudaSuccess, ExitCode::internal, "CUDA: {}", cudaGetErrorString(code));
}

/// Host values on the device for the length of one test.
template <class T>
class DeviceCopy {
 public:
  DeviceCopy(const std::vector<T>& values, cudaStream_t stream) : count_(values.size()), stream_(stream) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(1, count_) * sizeof(T)));
    check(cudaMemcpyAsync(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream_));
  }
  ~DeviceCopy() { cudaFree(data_); }
  T* data() { return data_; }
  /// On the compute stream and with no other wait: the communicator must have ordered it after the collective.
  std::vector<T> back() {
    std::vector<T> values(count_);
    check(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
  cudaStream_t stream_;
};

float value(int rank, int64_t index) {
  const auto mix = static_cast<uint32_t>(index * 2654435761u + rank * 40503u + 12345u) * 2246822519u;
  return std::ldexp(static_cast<float>(mix >> 8) / 16777216.0f - 0.5f, static_cast<int>(mix & 15u) - 8);
}

/// The exact sum and how far a float sum in any order may be from it: (ranks - 1) roundings of at most the sum of
/// magnitudes.
bool holds_sum(const std::vector<float>& values, Range range, int ranks) {
  for (int64_t i = range.begin; i < range.end; ++i) {
    double sum = 0, magnitude = 0;
    for (int r = 0; r < ranks; ++r) {
      sum += value(r, i);
      magnitude += std::fabs(value(r, i));
    }
    if (!(std::fabs(values[i] - sum) <= (ranks - 1) * 0x1p-24 * magnitude)) return false;
  }
  return true;
}

std::vector<float> my_values(int rank, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = value(rank, i);
  return values;
}

std::vector<std::vector<Range>> range_sets(int ranks) {
  std::vector<std::vector<Range>> sets;
  for (const int64_t unit : {0, 1, 1000, 300'000}) {
    std::vector<Range> equal, ragged;
    int64_t end = 0;
    for (int r = 0; r < ranks; ++r) {
      equal.push_back({r * unit, (r + 1) * unit});
      const int64_t length = r % 3 == 1 ? 0 : unit * (r + 1) + r;
      ragged.push_back({end, end + length});
      end += length;
    }
    sets.push_back(equal);
    sets.push_back(ragged);
  }
  return sets;
}

void test_all_reduce(Communicator& comm, cudaStream_t stream) {
  for (const int64_t count : {0, 1, 1023, 5'000'003}) {
    DeviceCopy<float> floats(my_values(comm.rank(), count), stream);
    comm.all_reduce_sum(floats.data(), count);
    expect(holds_sum(floats.back(), {0, count}, comm.size()), fmt::format("all_reduce_sum of {} floats", count));

    DeviceCopy<int64_t> integers(std::vector<int64_t>(count, (int64_t{1} << 40) + comm.rank()), stream);
    DeviceCopy<double> doubles(std::vector<double>(count, 1 + comm.rank()), stream);
    comm.all_reduce_sum(integers.data(), count);
    comm.all_reduce_sum(doubles.data(), count);
    const int64_t ranks = comm.size(), extra = ranks * (ranks - 1) / 2;
    expect(integers.back() == std::vector<int64_t>(count, (ranks << 40) + extra), "all_reduce_sum of integers");
    expect(doubles.back() == std::vector<double>(count, static_cast<double>(ranks + extra)),
           "all_reduce_sum of doubles");
  }
}

void test_ranges(Communicator& comm, cudaStream_t stream) {
  for (const std::vector<Range>& ranges : range_sets(comm.size())) {
    const int64_t count = ranges.back().end;
    const Range mine = ranges[comm.rank()];
    DeviceCopy<float> floats(my_values(comm.rank(), count), stream);
    comm.reduce_scatter_sum(floats.data(), ranges);
    expect(holds_sum(floats.back(), mine, comm.size()), fmt::format("reduce_scatter_sum of {} floats", count));

    std::vector<uint8_t> expected(count * 3), start(count * 3, 0xee);
    for (int64_t i = 0; i < count * 3; ++i) expected[i] = static_cast<uint8_t>(i * 31 + i / 251);
    std::copy(expected.begin() + mine.begin * 3, expected.begin() + mine.end * 3, start.begin() + mine.begin * 3);
    DeviceCopy<uint8_t> bytes(start, stream);
    comm.all_gather(bytes.data(), ranges, 3);
    expect(bytes.back() == expected, fmt::format("all_gather of {} x 3 bytes", count));

    // Two of these ranges and one of equal ranges, in one launch.
    std::vector<Range> equal;
    for (int64_t r = 0; r < comm.size(); ++r) equal.push_back({r, r + 1});
    DeviceCopy<uint8_t> again(start, stream), third(start, stream);
    DeviceCopy<float> ranks(std::vector<float>(comm.size(), static_cast<float>(comm.rank())), stream);
    comm.all_gather_each(std::vector<Communicator::Gathered>{
        {again.data(), ranges, 3}, {ranks.data(), equal, sizeof(float)}, {third.data(), ranges, 3}});
    bool right = again.back() == expected && third.back() == expected;
    const std::vector<float> found = ranks.back();
    for (int r = 0; r < comm.size(); ++r) right = right && found[r] == static_cast<float>(r);
    expect(right, fmt::format("all_gather_each of {} x 3 bytes", count));
  }
}

void test_all_to_all(Communicator& comm, cudaStream_t stream) {
  for (const int64_t unit : {0, 1, 3000, 200'000}) {
    const testing::ExchangePattern pattern{comm.size(), unit, 6};
    DeviceCopy<uint8_t> source(pattern.sent(comm.rank()), stream);
    const std::vector<uint8_t> expected = pattern.expected(comm.rank());
    DeviceCopy<uint8_t> target(std::vector<uint8_t>(expected.size(), 0xee), stream);
    comm.all_to_all(source.data(), pattern.send(comm.rank()), target.data(), pattern.receive(comm.rank()), 6);
    expect(target.back() == expected, fmt::format("all_to_all, unit {}", unit));
  }
}

void test_broadcast(Communicator& comm, cudaStream_t stream) {
  for (int root = 0; root < comm.size(); ++root) {
    DeviceCopy<float> floats(my_values(comm.rank(), 70'001), stream);
    comm.broadcast(floats.data(), 70'001 * sizeof(float), root);
    expect(floats.back() == my_values(root, 70'001), fmt::format("broadcast from {}", root));
  }
}

void test_order(Communicator& comm, cudaStream_t stream) {
  // Collectives and copies on the compute stream, one after another with no host wait between: the sums must nest.
  DeviceCopy<double> value(std::vector<double>(1000, 1.0), stream);
  for (int i = 0; i < 20; ++i) comm.all_reduce_sum(value.data(), 1000);
  expect(value.back() == std::vector<double>(1000, std::pow(comm.size(), 20)), "20 sums in a row");
}

void go_wrong(const std::string& fault, Communicator& comm, cudaStream_t stream) {
  DeviceCopy<float> floats(my_values(comm.rank(), 1000), stream);
  comm.all_reduce_sum(floats.data(), 1000);
  floats.back();
  if (comm.rank() == 1) raise(fault == "stop" ? SIGSTOP : SIGKILL);
  comm.all_reduce_sum(floats.data(), 1000);
  floats.back();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto host = make_host_communicator(&argc, &argv);
    const int local = local_rank(*host);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (any_rank(*host, local >= devices)) {
      if (host->rank() == 0) std::printf("SKIPPED: %d ranks need a GPU each, %d visible\n", host->size(), devices);
      finish_communication();
      return 125;
    }
    const std::string fault = argc > 2 ? argv[2] : "";
    start_watchdog(host->rank(), fault.empty() ? 60 : 8, fault.empty() ? 20 : 3);
    if (argc > 3) std::ofstream(fmt::format("{}/{}", argv[3], host->rank())) << ::getpid() << "\n";
    check(cudaSetDevice(local));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int64_t failed = 0;
    {
      auto comm = make_nccl_communicator(*host, local, stream);
      if (!fault.empty()) go_wrong(fault, *comm, stream);
      test_all_reduce(*comm, stream);
      test_ranges(*comm, stream);
      test_all_to_all(*comm, stream);
      test_broadcast(*comm, stream);
      test_order(*comm, stream);
      comm->barrier();
      failed = failures;
      host->all_reduce_sum(&failed, 1);
      if (host->rank() == 0)
        std::printf("%s: %d ranks, %d failures\n", comm->name().c_str(), comm->size(), static_cast<int>(failed));
    }
    finish_communication();
    return failed ? 1 : 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    abort_job(static_cast<int>(error.code()));
  }
}
