// Device memory as torch has it: the only file that knows how a GPU is driven, and it does so through c10's streams
// and events, so it needs no CUDA to be built.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "zeropage/store/device_memory.h"

namespace zeropage {

/// `bytes` of the memory of `device`, taken from torch's allocator at once. Throws BudgetError if it is not free.
std::shared_ptr<DeviceMemory> make_torch_device(c10::Device device, std::size_t bytes);

/// Memory of the CPU that is treated as if it were a GPU's: everything is copied in and out. For tests of that path
/// on machines without a GPU.
std::shared_ptr<DeviceMemory> make_cpu_apart(std::size_t bytes);

/// Bytes of `device` that are free now.
std::size_t free_device_memory(c10::Device device);

}  // namespace zeropage
