// StandIns replaces paged arguments that an operator cannot use in their stored form. A stand-in is a value decoded
// from codes or joined from two halves, a more precise master, or a copy of a small part of a huge tensor. Two
// arguments over one content get two views of one stand-in. StandIns writes changes to a stand-in back, declared or
// not. If the operator returns a stand-in, the caller gets the original argument.
#pragma once

#include <c10/util/FunctionRef.h>

#include <unordered_map>

#include "zeropage/rules/call.h"

namespace zeropage {

class StandIns {
 public:
  /// Whether to replace `tensor`, which is paged. `writes`: the call declares that it writes it.
  using Takes = c10::function_ref<bool(const at::Tensor& tensor, bool writes)>;
  /// Makes the stand-in of `tensor`, or of its whole segment, in `tensor`'s dtype; undefined: `tensor` stays.
  using Make = c10::function_ref<at::Tensor(const at::Tensor& tensor)>;
  /// Writes the content of `stand_in` to `tensor`, the segment's first argument.
  using Settle = c10::function_ref<void(const at::Tensor& tensor, const at::Tensor& stand_in)>;
  /// Whether a declared write may have happened although the operator threw, for example to a list's first tensors.
  using MayHaveChanged = c10::function_ref<bool(const at::Tensor& tensor, const at::Tensor& stand_in)>;

  /// The arguments for which one stand-in serves: all of one segment, all over one part of it, or, because autograd
  /// records the part's copy, those that are one tensor to autograd.
  enum class Per { segment, part, recorded_part };
  explicit StandIns(Call& call, Per per = Per::segment) : call_(call), per_(per) {}
  /// After a failed call, restores the paged arguments of the program, which an error names.
  ~StandIns() {
    if (!paged_.empty()) call_.paged = std::move(paged_);
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  /// Replaces arguments, in order. False if there are none to replace.
  bool replace(Takes takes, Make make);
  /// Calls `run`, which returns whether it ran the call. If not, restores the arguments; nothing was done. Rethrows
  /// errors of `run` after writing back stand-ins that may have changed.
  bool run(c10::function_ref<bool()> run, Settle settle, MayHaveChanged may_have_changed);

 private:
  struct StandIn {
    at::Tensor tensor, made;
    bool is_written = false;
    std::int64_t version = 0;  // of `made`, when it was made
  };
  struct View {
    at::Tensor original, given;
  };
  at::Tensor give(const at::Tensor& tensor, bool writes, Takes takes, Make make);
  StandIn* find(const at::Tensor& tensor);
  /// Whether one stand-in serves two tensors of one segment.
  bool is_same_content(const at::Tensor& a, const at::Tensor& b) const;
  void find_written();
  void return_originals();
  Call& call_;
  Per per_;
  std::vector<c10::IValue> arguments_;  // the originals
  c10::SmallVector<PagedArgument, 4> paged_;
  std::vector<StandIn> stand_ins_;
  std::unordered_multimap<const StorageSegment*, std::size_t> of_segment_;  // indices of stand_ins_
  std::vector<View> views_;
};

/// Whether preview() may replace it: the call only reads it, and it is deferred.
inline bool can_be_previewed(const at::Tensor& tensor, bool writes) {
  return !writes && segment_of(tensor)->is_deferred();
}

}  // namespace zeropage
