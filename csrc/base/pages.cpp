// Large new memory. Gradients that are allocated in every step cost as much in page faults as in
// arithmetic; pages of 2 MiB need 512 times fewer faults.
//
// Under free page reporting the hypervisor reclaims free huge pages after about two seconds, and
// getting one back costs about seven times a normal fault; small pages lie between pages in use and
// are not reclaimed. Only faulting shows which kind is cheaper. So memory that comes from the
// system is populated here, by all threads, in parts, with the kind of page that was cheaper last.
// The other kind is tried again rarely.
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

// glibc returns freed blocks of this size to the system.
constexpr uintptr_t kTakenAnew = 32 << 20;
constexpr uintptr_t kLargePage = 2 << 20, kFirstPart = 4 << 20;
constexpr int kMostPatience = 63;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14

bool advise(uintptr_t start, uintptr_t end, int advice) {
  return madvise(reinterpret_cast<void*>(start), end - start, advice) == 0;
}

// Populates memory with small or huge pages; returns seconds per byte.
double populate(uintptr_t start, uintptr_t end, bool large) {
  const auto before = std::chrono::steady_clock::now();
  advise(start, end, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const int64_t first = start / kLargePage, last = (end - 1) / kLargePage + 1;
  parallel_for(first, last, 1, [&](int64_t from, int64_t to) {
    advise(std::max(start, from * kLargePage), std::min(end, to * kLargePage), kPopulateWrite);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - before;
  return seconds.count() / double(end - start);
}

// Cost of small and huge pages when last populated, and the calls until both are tried again: more,
// the longer the same kind stays cheaper.
struct Costs {
  std::atomic_flag taken = ATOMIC_FLAG_INIT;
  double cost[2] = {};
  int left = 0, patience = 0;
} costs;

void populate_all(uintptr_t start, uintptr_t end) {
  if (costs.taken.test_and_set()) return;  // by another thread, maybe before a fork
  const uintptr_t whole = (start + kLargePage - 1) / kLargePage * kLargePage;
  advise(start, whole, kPopulateWrite);
  double* const cost = costs.cost;
  const bool was_large = cost[1] <= cost[0], tries = costs.left-- <= 0;
  if (tries) cost[0] = cost[1] = 0;  // an untried kind counts as free
  for (uintptr_t at = whole; at < end;) {
    const bool large = cost[1] <= cost[0];
    // Parts grow: the choice for half of the memory rests on the other half.
    const uintptr_t part = cost[0] > 0 ? std::max(kFirstPart, at - whole) : kFirstPart;
    const uintptr_t next = std::min(at + part, end);
    cost[large] = populate(at, next, large);
    at = next;
  }
  if (tries) {
    const bool is_as_before = (cost[1] <= cost[0]) == was_large;
    costs.patience = is_as_before ? std::min(2 * costs.patience + 1, kMostPatience) : 0;
    costs.left = costs.patience;
  }
  costs.taken.clear();
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
    advise(start, end, MADV_HUGEPAGE);  // no effect on systems without huge pages
  } else if (!(there & 1)) {
    populate_all(start, end);
  }
#endif
}

}  // namespace fastkd

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) { m.def("take_pages(Tensor x) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CPU, m) {
  m.impl("take_pages", TORCH_BOX(&fastkd::take_pages));
}
