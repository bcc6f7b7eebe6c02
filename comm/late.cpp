#include <functional>
#include <vector>

#include "comm/communicator.hpp"

namespace shardq {
namespace {

class LateCommunicator final : public Communicator {
 public:
  explicit LateCommunicator(Communicator& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string name() const override { return "late " + inner_.name(); }

  void all_reduce_sum(float* data, int64_t count) override {
    run([=, this] { inner_.all_reduce_sum(data, count); });
  }
  void all_reduce_sum(double* data, int64_t count) override {
    run([=, this] { inner_.all_reduce_sum(data, count); });
  }
  void all_reduce_sum(int64_t* data, int64_t count) override {
    run([=, this] { inner_.all_reduce_sum(data, count); });
  }
  void reduce_scatter_sum(float* data, std::span<const Range> ranges) override {
    run([this, data, kept = copy(ranges)] { inner_.reduce_scatter_sum(data, kept); });
  }
  void all_gather(void* data, std::span<const Range> ranges, int64_t element_size) override {
    run([this, data, kept = copy(ranges), element_size] { inner_.all_gather(data, kept, element_size); });
  }
  void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                  int64_t element_size) override {
    run([this, source, out = copy(send), target, in = copy(receive), element_size] {
      inner_.all_to_all(source, out, target, in, element_size);
    });
  }
  void broadcast(void* data, int64_t bytes, int root) override {
    run([=, this] { inner_.broadcast(data, bytes, root); });
  }
  void barrier() override {
    join();
    inner_.barrier();
  }
  void defer(bool on) override { deferring_ = on; }
  void join() override {
    std::vector<std::function<void()>> due;
    due.swap(waiting_);
    for (const auto& collective : due) collective();
  }

 private:
  static std::vector<Range> copy(std::span<const Range> ranges) { return {ranges.begin(), ranges.end()}; }
  void run(std::function<void()> collective) {
    if (deferring_) {
      waiting_.push_back(std::move(collective));
      return;
    }
    join();  // collectives keep their order
    collective();
  }

  Communicator& inner_;
  bool deferring_ = false;
  std::vector<std::function<void()>> waiting_;
};

}  // namespace

std::unique_ptr<Communicator> make_late_communicator(Communicator& inner) {
  return std::make_unique<LateCommunicator>(inner);
}

}  // namespace shardq
