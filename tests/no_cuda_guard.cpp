// Lets a torch without CUDA handle tensors that only say that they are on CUDA (tests/dry_cuda.py).
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
