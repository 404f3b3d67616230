// Memory that is new in every step costs as much by being touched as by what is computed in it: of
// pages of 2 MiB there are 512 times fewer to fetch and to find again.
//
// But a hypervisor takes whole free ones back within seconds, and gives one again for seven times
// what it costs otherwise, while small pages lie between those in use and stay. Which of both are
// dear can't be seen but by fetching some. So what surely comes from the system is fetched here, by
// all threads, in parts of the kind that was cheaper last; the dearer one is tried again seldom.
#include "base/tensors.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#endif

namespace fastkd {

#ifdef MADV_HUGEPAGE
namespace {

// From here on glibc keeps nothing for the next step.
constexpr uintptr_t kTakenAnew = 32 << 20;
constexpr uintptr_t kLargePage = 2 << 20, kFirstPart = 4 << 20;
constexpr int kMostPatience = 63;
constexpr int kPopulateWrite = 23;  // of Linux 5.14, which older headers don't know

bool advise(uintptr_t start, uintptr_t end, int advice) {
  return madvise(reinterpret_cast<void*>(start), end - start, advice) == 0;
}

// Seconds a byte.
double fetch(uintptr_t start, uintptr_t end, bool large) {
  const auto before = std::chrono::steady_clock::now();
  advise(start, end, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const int64_t first = start / kLargePage, last = (end - 1) / kLargePage + 1;
  parallel_for(first, last, 1, [&](int64_t from, int64_t to) {
    advise(std::max(start, from * kLargePage), std::min(end, to * kLargePage), kPopulateWrite);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - before;
  return seconds.count() / double(end - start);
}

// What small and large pages cost when last fetched, and after how many times both are tried again:
// the longer the same is the cheaper one.
struct Seen {
  std::atomic_flag taken = ATOMIC_FLAG_INIT;
  double cost[2] = {};
  int left = 0, patience = 0;
} seen;

void fetch_all(uintptr_t start, uintptr_t end) {
  if (seen.taken.test_and_set()) return;  // another fetches, or did when this process was forked off
  const uintptr_t whole = (start + kLargePage - 1) / kLargePage * kLargePage;
  advise(start, whole, kPopulateWrite);
  double* const cost = seen.cost;
  const bool was_large = cost[1] <= cost[0], tries = seen.left-- <= 0;
  if (tries) cost[0] = cost[1] = 0;  // what is untried is free
  for (uintptr_t at = whole; at < end;) {
    const bool large = cost[1] <= cost[0];
    // Parts grow, so that half of all goes by what was seen in the other half.
    const uintptr_t part = cost[0] > 0 ? std::max(kFirstPart, at - whole) : kFirstPart;
    const uintptr_t next = std::min(at + part, end);
    cost[large] = fetch(at, next, large);
    at = next;
  }
  if (tries) {
    const bool is_as_before = (cost[1] <= cost[0]) == was_large;
    seen.left = seen.patience = is_as_before ? std::min(2 * seen.patience + 1, kMostPatience) : 0;
  }
  seen.taken.clear();
}

}  // namespace
#endif

void take_pages([[maybe_unused]] const Tensor& x) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t bytes = uintptr_t(x.numel()) * x.element_size();
  const uintptr_t start = (uintptr_t(x.data_ptr()) + page - 1) / page * page;
  const uintptr_t end = (uintptr_t(x.data_ptr()) + bytes) / page * page;
  if (start >= end) return;
  unsigned char there = 0;
  if (bytes < kTakenAnew || mincore(reinterpret_cast<void*>(start), page, &there) != 0 ||
      !advise(start, start + page, kPopulateWrite)) {
    advise(start, end, MADV_HUGEPAGE);  // where a system has none, all stays as it is
  } else if (!(there & 1)) {
    fetch_all(start, end);
  }
#endif
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) { m.def("take_pages(Tensor x) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("take_pages", TORCH_BOX(&fastkd::take_pages));
}
