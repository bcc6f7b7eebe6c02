#pragma once
#include <barrier>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "comm/communicator.hpp"

namespace shardq::testing {

/// Ranks as threads of one process, so that what is built on the interface alone is tested without a launcher. Every
/// collective publishes a pointer, waits, reads the others' memory, and waits again.
class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : barrier_(ranks), pointers_(ranks), ranks_(ranks) {}

  /// Runs body(communicator) on every rank.
  void run(const std::function<void(Communicator&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks_; ++r)
      threads.emplace_back([&, r] {
        Member member(*this, r);
        body(member);
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  class Member final : public Communicator {
   public:
    Member(ThreadRanks& all, int rank) : all_(all), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return all_.ranks_; }
    std::string name() const override { return "threads"; }
    void all_reduce_sum(float* data, int64_t count) override { sum(data, count); }
    void all_reduce_sum(double* data, int64_t count) override { sum(data, count); }
    void all_reduce_sum(int64_t* data, int64_t count) override { sum(data, count); }
    void reduce_scatter_sum(float* data, std::span<const Range> ranges) override { sum(data, ranges.back().end); }
    void all_gather(void* data, std::span<const Range> ranges, int64_t element_size) override {
      meet(data);
      for (int r = 0; r < size(); ++r) {
        const int64_t begin = ranges[r].begin * element_size;
        if (r != rank_)
          std::memcpy(static_cast<char*>(data) + begin, static_cast<char*>(all_.pointers_[r]) + begin,
                      ranges[r].size() * element_size);
      }
      barrier();
    }
    void all_to_all(const void* source, std::span<const Range> send, void* target, std::span<const Range> receive,
                    int64_t element_size) override {
      struct Side {
        const char* data;
        const Range* send;
      } mine{static_cast<const char*>(source), send.data()};
      meet(&mine);
      for (int r = 0; r < size(); ++r) {
        const Side& other = *static_cast<const Side*>(all_.pointers_[r]);
        if (receive[r].size() == 0) continue;
        std::memcpy(static_cast<char*>(target) + receive[r].begin * element_size,
                    other.data + other.send[rank_].begin * element_size, receive[r].size() * element_size);
      }
      barrier();
    }
    void broadcast(void* data, int64_t bytes, int root) override {
      meet(data);
      if (rank_ != root) std::memcpy(data, all_.pointers_[root], bytes);
      barrier();
    }
    void barrier() override { all_.barrier_.arrive_and_wait(); }

   private:
    void meet(void* data) {
      all_.pointers_[rank_] = data;
      barrier();
    }
    template <class T>
    void sum(T* data, int64_t count) {
      meet(data);
      std::vector<T> total(count);
      for (int r = 0; r < size(); ++r)
        for (int64_t i = 0; i < count; ++i) total[i] += static_cast<T*>(all_.pointers_[r])[i];
      barrier();
      std::copy(total.begin(), total.end(), data);
      barrier();
    }

    ThreadRanks& all_;
    int rank_;
  };

  std::barrier<> barrier_;
  std::vector<void*> pointers_;
  int ranks_;
};

}  // namespace shardq::testing
