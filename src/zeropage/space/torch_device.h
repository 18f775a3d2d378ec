// Device memory from torch. Only this module drives a GPU. It uses c10's streams and events, so it builds without
// CUDA.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "zeropage/store/device_memory.h"

namespace zeropage {

/// Allocates `bytes` on `device` from torch's allocator at once. Throws BudgetError if they are not free.
std::shared_ptr<DeviceMemory> make_torch_device(c10::Device device, std::size_t bytes);

/// CPU memory that zeropage treats like a GPU's: everything is copied in and out. For tests of that path on machines
/// without a GPU.
std::shared_ptr<DeviceMemory> make_cpu_apart(std::size_t bytes);

/// Bytes of `device` that are free now.
std::size_t free_device_memory(c10::Device device);

}  // namespace zeropage
