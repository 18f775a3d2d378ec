// How fast this machine is, measured: what decides where updates run.
#pragma once

#include "zeropage/store/device_memory.h"

namespace zeropage {

/// Whether an optimizer's states at home in the host are updated there sooner than they would pass over the link. An
/// update of float32 states passes 28 bytes a parameter through the host's memory (Adam: three arrays read and
/// written, the gradient read); on the device, 12 would go up and 12 down at once. Takes some milliseconds;
/// overwrites what lies in the device's memory.
bool updates_are_faster_in_host(DeviceMemory& device);

}  // namespace zeropage
