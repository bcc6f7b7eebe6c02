#include <cstring>

#include "comm/communicator.hpp"
#include "comm/ranges.hpp"
#include "comm/transfer_limits.hpp"

namespace shardq {
namespace {

/// A job of one process: every sum is its own data already.
class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string name() const override { return "single"; }
  void all_reduce_sum(float*, int64_t) override {}
  void all_reduce_sum(double*, int64_t) override {}
  void all_reduce_sum(int64_t*, int64_t) override {}
  void reduce_scatter_sum(float*, std::span<const Range> ranges) override {
    check_ranges(ranges, 1, "reduce_scatter_sum");
  }
  void all_gather(void*, std::span<const Range> ranges, int64_t) override { check_ranges(ranges, 1, "all_gather"); }
  void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                  int64_t element_size) override {
    check_exchange(send, receive, 1, 0);
    if (send[0].size() > 0) std::memcpy(target, source, send[0].size() * element_size);  // nothing may have no address
  }
  void broadcast(void*, int64_t, int root) override {
    SHARDQ_CHECK(root == 0, ExitCode::internal, "broadcast: expected root 0 of 1 rank, found {}", root);
  }
  void barrier() override {}
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() {
  return std::make_unique<SingleCommunicator>();
}

TransferLimits& transfer_limits() {
  static TransferLimits limits;
  return limits;
}

}  // namespace shardq
