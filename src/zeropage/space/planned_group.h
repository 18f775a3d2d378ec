// A c10d group of simulated ranks, for a space on a planned machine (plan/machine.h). This process is rank 0. All
// other ranks behave alike, so they send what it sends.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "zeropage/plan/machine.h"

namespace zeropage {

/// Makes a group whose collectives run one after the other and take a ring's time: a rank sends (ranks - 1) parts at
/// the speed of the machine's network. Latency counts like in a tree: once for each of log2(ranks) steps.
c10::intrusive_ptr<c10d::ProcessGroup> make_planned_group(std::shared_ptr<Machine> machine, int ranks);

}  // namespace zeropage
