// Placements (tensor/placement.h) of what operators compute and write.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// `same` or `own`: the placement, over ranks, of a call's results; of element `element` where it is on lists.
Placement placement_of(Call& call, std::size_t element = 0);

/// Before a call writes: what it makes this rank's own becomes whole here, as the table in tensor/placement.h says.
/// May gather, on all ranks together. `call.paged` is found anew where segments changed.
void settle_placements(Call& call);

/// The tensor is this rank's own from now on, and whole here. `overwritten`: its content is not needed any more.
/// Throws AccessError if it is pinned, BudgetError, DiskError, RankError.
void make_own(const at::Tensor& tensor, bool overwritten);
/// The tensor, which is this rank's own, counts as the same on all ranks, and lies over them as its role says.
void make_same(const at::Tensor& tensor);
/// The tensor is whole on every rank from now on, whatever its role, and still the same on all.
void make_whole(const at::Tensor& tensor);

/// Outside of steps, what is made of a parameter is made of a whole one, which ranks bring together at the first use
/// of any: where only some ranks compute this, the others need take no part. Throws as StorageSegment::refresh().
void refresh_outside_steps(StorageSegment& segment);

/// One element of an ordinary tensor on the CPU, near its middle: what ranks compare of content.
double sample_of(at::Tensor tensor);

/// An optimizer keeps these beside its parameters: they stay the same on all ranks from now on.
void note_states(c10::ArrayRef<at::Tensor> states);

}  // namespace zeropage
