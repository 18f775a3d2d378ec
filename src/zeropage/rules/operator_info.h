// Facts about an operator, read from its schema and name once. A rule is a function that runs a call where the bytes
// are, without loading whole tensors, and returns whether it did.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

namespace zeropage {

struct Call;
/// True: done, results are on the stack. False: nothing was done, and the general path takes the call.
using Rule = bool (*)(Call& call);

enum class OperatorKind : std::uint8_t {
  view,      // Every result aliases an argument that is not written. Needs no data.
  metadata,  // Reads a tensor's properties, or makes another like it. Needs no data.
  data,
};

/// Properties of an operator, read from its schema and name once.
struct OperatorInfo {
  OperatorKind kind = OperatorKind::data;
  bool pointwise = false;  // element i of the result depends on element i of the arguments alone.
  bool list = false;       // a _foreach_ or _fused_ operator: element i of the lists is a call of its own.
  bool fused = false;
  bool takes_tensors = false;
  bool moves = false;            // to(): a view if nothing changes, else a copy.
  bool made_of_views = false;    // a view whose kernel calls only views.
  bool fills = false;            // overwrites its first argument at random.
  bool sets = false;             // gives its first argument another storage.
  bool cuts_by_content = false;  // a view that cuts at positions in its second argument.
  bool seeded = false;           // draws random numbers.
  bool is_constant = false;      // has no derivative: true or false for each element, or for all.
  bool makes_sparse = false;     // makes a sparse tensor from indices and values.
  bool is_collective = false;    // of torch.distributed: goes on after its return, until its work has ended.
  Rule rule = nullptr;
  Rule tile = nullptr;                 // for operands that are too large to load at once (tiles.h).
  c10::SmallVector<bool, 16> writes;   // by argument.
  c10::SmallVector<bool, 16> numbers;  // by argument: a value to compute with, or a list of them.
};

/// Finds an operator's properties, once for each thread. The reference stays valid even after the operator's library
/// is unloaded.
const OperatorInfo& info_of(const c10::OperatorHandle& op);

}  // namespace zeropage
