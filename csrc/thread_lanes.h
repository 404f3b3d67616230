// Lanes of eigen_lanes.h that are threads: the tests run a GPU block's code on the CPU.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fastkd {

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const long round = round_;
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const int count_;
  int arrived_ = 0;
  long round_ = 0;
};

// A block's; warps as small as can be, since every lane is a thread.
template <int WARP>
struct ThreadLanes {
  static constexpr int kWarp = WARP;

  struct Block {
    explicit Block(int lanes) : all(lanes), sums(lanes) {
      for (int i = 0; i < lanes / kWarp; ++i) warps.emplace_back(new Barrier(kWarp));
    }
    Barrier all;
    std::vector<std::unique_ptr<Barrier>> warps;
    std::vector<double> sums;
  };

  int index, count;
  Block* block;

  void sync() const { block->all.wait(); }

  double warp_sum(double x) const {
    const int first = index / kWarp * kWarp;
    block->sums[index] = x;
    block->warps[index / kWarp]->wait();
    double sum = 0;
    for (int i = 0; i < kWarp; ++i) sum += block->sums[first + i];
    block->warps[index / kWarp]->wait();
    return sum;
  }

  // body(lanes) in every lane of one block.
  template <typename Body>
  static void run(int lanes, const Body& body) {
    Block block(lanes);
    std::vector<std::thread> threads;
    for (int i = 0; i < lanes; ++i) {
      threads.emplace_back([&, i] { body(ThreadLanes{i, lanes, &block}); });
    }
    for (auto& thread : threads) thread.join();
  }
};

}  // namespace fastkd
