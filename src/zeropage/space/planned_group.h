// Ranks that are not there: a group of c10d for a space on a planned machine (plan/machine.h). This process is rank
// 0, and all others do as it does, so what they send is what it sends.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "zeropage/plan/machine.h"

namespace zeropage {

/// Collectives take what a ring takes, one after the other: a rank sends (ranks - 1) parts at the speed of the
/// machine's network, and each of its steps takes the network's latency once in a tree, log2(ranks).
c10::intrusive_ptr<c10d::ProcessGroup> make_planned_group(std::shared_ptr<Machine> machine, int ranks);

}  // namespace zeropage
