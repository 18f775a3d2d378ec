// The fault's hooks. Linking the library registers the fault itself.
#pragma once

#include <memory>

namespace zeropage {

/// Sets a function that each fault calls first. The fault keeps its result until it ends. Python's module releases
/// the interpreter's lock so, where the caller holds it: in torch.tensor() and in the operators of subclasses. A
/// fault may wait for threads that need the lock, such as those of a process group.
void set_around_faults(std::shared_ptr<void> (*begin)());

/// Lets operators fault on tensors that a subclass keeps inside, such as a DTensor's local tensors ([Note: inner
/// tensors] in base/torch_compat.h): registers the fault a second time, below Python. Tensors that are paged from now
/// on have both keys. Takes a few milliseconds the first time.
void page_inner_tensors();

}  // namespace zeropage
