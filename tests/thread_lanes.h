// Lanes of eigen_lanes.h that are CPU threads: tests run a GPU block's code with them.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "linalg/eigen_lanes.h"

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

// Lanes of a block, or of one warp. Warps are small, since every lane is a thread.
template <int WARP, bool ONE_WARP = false>
struct ThreadLanes {
  static constexpr int kWarp = WARP;
  static constexpr bool kOneWarp = ONE_WARP;

  struct Block {
    explicit Block(int lanes) : all(lanes), values(lanes) {
      for (int i = 0; i < lanes / kWarp; ++i) warps.emplace_back(new Barrier(kWarp));
    }
    Barrier all;
    std::vector<std::unique_ptr<Barrier>> warps;
    std::vector<double> values;
  };

  int index, count;
  Block* block;

  void sync() const { block->all.wait(); }

  double warp_sum(double x) const {
    return folded(x, [](const double* x) { return std::accumulate(x, x + kWarp, 0.0); });
  }

  double warp_max(double x) const {
    return folded(x, [](const double* x) { return std::accumulate(x, x + kWarp, 0.0, larger); });
  }

  // The first lane of the warp with ``mine`` true, or kWarp.
  int first(bool mine) const {
    return folded(mine, [](const double* x) { return int(std::find(x, x + kWarp, 1.0) - x); });
  }

  // Calls body(column) for the lane's columns.
  template <typename Body>
  void each(int n, const Body& body) const {
    for (int j = index; j < n; j += count) body(j);
  }

  // fold(the values of the warp's lanes)
  template <typename Fold>
  auto folded(double mine, const Fold& fold) const {
    block->values[index] = mine;
    block->warps[index / kWarp]->wait();
    const auto result = fold(&block->values[index / kWarp * kWarp]);
    block->warps[index / kWarp]->wait();
    return result;
  }

  // Calls body(lanes) in every lane of one block.
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
