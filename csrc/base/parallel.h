// Loops on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>

namespace fastkd {

// body(begin, end) on torch's threads. An exception of the body is rethrown on the calling thread:
// torch's C interface would replace its type and text by "API call failed".
template <typename Body>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;  // of the first thread that failed
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace fastkd
