// Measures this machine to decide whether updates run in the host.
#pragma once

#include "zeropage/store/device_memory.h"

namespace zeropage {

/// Whether the host updates optimizer states in its memory sooner than the link would carry them. An update of
/// float32 states passes 28 bytes a parameter through the host's memory (Adam reads and writes three arrays and reads
/// the gradient). On the device, 12 would go up and 12 down at once. Takes some milliseconds and overwrites the
/// device's region.
bool updates_are_faster_in_host(DeviceMemory& device);

}  // namespace zeropage
