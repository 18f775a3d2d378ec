// Placements (tensor/placement.h) of operators' results and outputs.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// The placement, over ranks, of a call's results: `same` or `own`. `element`: the element of a call on lists.
Placement placement_of(Call& call, std::size_t element = 0);

/// Makes outputs that become this rank's own whole here, before the call writes (table in tensor/placement.h). May
/// gather, on all ranks together. Finds `call.paged` again if segments changed.
void settle_placements(Call& call);

/// Makes the tensor whole here and this rank's own. `overwritten`: its content is not needed any more. Throws
/// AccessError if it is pinned, BudgetError, DiskError, RankError.
void make_own(const at::Tensor& tensor, bool overwritten);
/// Makes a tensor of this rank's own count as the same on all ranks, with the layout of its role.
void make_same(const at::Tensor& tensor);
/// Makes the tensor whole on every rank, whatever its role, and still the same on all.
void make_whole(const at::Tensor& tensor);

/// Makes a stale parameter whole before an operator outside of steps uses it. All ranks refresh at the first use of
/// any parameter. If only some ranks compute this operator, the others need not take part. Throws like
/// StorageSegment::refresh().
void refresh_outside_steps(StorageSegment& segment);

/// One element of an ordinary tensor on the CPU, near its middle, as the sample that ranks compare.
double sample_of(at::Tensor tensor);

/// Marks tensors as optimizer states: they stay the same on all ranks from now on.
void note_states(c10::ArrayRef<at::Tensor> states);

}  // namespace zeropage
