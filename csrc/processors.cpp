// Which kind of processor this is.
#include "processors.h"

#include <cstdlib>
#include <string>

namespace fastkd {
namespace {

Processor find() {
#if defined(FASTKD_KINDS)
  const char* const most = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string allowed = most ? most : "";
  __builtin_cpu_init();
  if (allowed == "default" || !__builtin_cpu_supports("x86-64-v3")) return Processor::kUsual;
  if (allowed == "avx2" || !__builtin_cpu_supports("x86-64-v4")) return Processor::kAvx2;
  return Processor::kAvx512;
#else
  return Processor::kUsual;
#endif
}

}  // namespace

const Processor processor = find();

}  // namespace fastkd
