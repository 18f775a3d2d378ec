// One deferred operator of a program, and its kind. Kernels for whole updates and early updates recognise programs by
// these kinds, not by names.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

#include "zeropage/kernels/update.h"
#include "zeropage/rules/substitution.h"

namespace zeropage {

/// A copy of a device's scalar, under way to the host.
struct HostCopy {
  at::Tensor tensor;                 // undefined: there is none.
  std::shared_ptr<c10::Event> done;  // null: the copy is done.
};

struct Instruction {
  enum class Kind : std::uint8_t {
    other,
    scale,        // slots[0] *= number, or /= it.
    copy,         // slots[0] = slots[1], in slots[0]'s dtype.
    zero,         // slots[0] = 0.
    widen,        // result = slots[0], in float32.
    join_hi_lo,   // result = float32 from slots[0], slots[1].
    split_hi_lo,  // slots[0], slots[1] = slots[2].
    decode,       // result = value of codes and scales.
    encode,       // codes and scales = value.
    update,       // an optimizer's whole rule: `rule`.
  };

  Instruction(c10::OperatorHandle op, Substitution call, c10::SmallVector<int, 8> slots, int result,
              std::vector<HostCopy> in_host = {});

  c10::OperatorHandle op;
  Substitution call;               // its operands are slots of the program.
  c10::SmallVector<int, 8> slots;  // by operand.
  int result;                      // the result's slot, or -1.
  std::vector<HostCopy> in_host;   // by argument, if any is on a device.
  Kind kind = Kind::other;
  std::optional<kernels::Rule> rule;  // of an update
  c10::SmallVector<bool, 8> writes;   // by operand

  bool divides() const;  // for a scale
  /// The index of the argument of that name, or -1.
  int argument(std::string_view name) const;
  /// The slot of the argument of that name, or -1.
  int slot(std::string_view name) const;
};

}  // namespace zeropage
