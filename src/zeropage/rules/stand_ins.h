// StandIns gives an operator other tensors in place of paged arguments that it cannot take as they are kept: the
// value of codes or of two halves, a more precise master, a copy of a small part of a huge tensor. Two arguments over
// one content get two views of one stand-in. What the operator wrote to a stand-in, declared or not, StandIns writes
// back, and where the operator returns a stand-in, the caller gets the original argument.
#pragma once

#include <c10/util/FunctionRef.h>

#include "zeropage/rules/call.h"

namespace zeropage {

class StandIns {
 public:
  /// Whether something is to stand for `tensor`, which is paged. `writes`: the call declares that it writes it.
  using Takes = c10::function_ref<bool(const at::Tensor& tensor, bool writes)>;
  /// Makes the stand-in of `tensor`, or of its whole segment, in `tensor`'s dtype; undefined: `tensor` stays.
  using Make = c10::function_ref<at::Tensor(const at::Tensor& tensor)>;
  /// `tensor` is to hold what `stand_in` does: of the segment's first argument, and what was made of it.
  using Settle = c10::function_ref<void(const at::Tensor& tensor, const at::Tensor& stand_in)>;
  /// Whether a declared write may have happened although the operator threw, as to the first tensors of a list.
  using MayHaveChanged = c10::function_ref<bool(const at::Tensor& tensor, const at::Tensor& stand_in)>;

  /// `of_views`: a stand-in has a view's shape and holds that alone; else it stands for all views of its segment.
  explicit StandIns(Call& call, bool of_views = false) : call_(call), of_views_(of_views) {}
  /// If the call failed, its paged arguments are the program's again, which an error is to name.
  ~StandIns() {
    if (!paged_.empty()) call_.paged = std::move(paged_);
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  /// Replaces arguments, in order. False if there are none to replace.
  bool replace(Takes takes, Make make);
  /// Does `run`, which takes the call and says whether it did; if not, the arguments are back and nothing was done.
  /// Throws what `run` does, when what may have changed is settled.
  bool run(c10::function_ref<bool()> run, Settle settle, MayHaveChanged may_have_changed);

 private:
  struct StandIn {
    at::Tensor tensor, made;
    bool is_written = false;
    std::int64_t version = 0;  // of what was made
  };
  struct View {
    at::Tensor original, given;
  };
  at::Tensor give(const at::Tensor& tensor, bool writes, Takes takes, Make make);
  bool is_same_content(const at::Tensor& a, const at::Tensor& b) const;
  void find_written();
  void return_originals();
  Call& call_;
  bool of_views_;
  std::vector<c10::IValue> arguments_;  // what they were
  c10::SmallVector<PagedArgument, 4> paged_;
  std::vector<StandIn> stand_ins_;
  std::vector<View> views_;
};

/// For preview(): what is only read, and is still to be made.
inline bool can_be_previewed(const at::Tensor& tensor, bool writes) {
  return !writes && segment_of(tensor)->is_deferred();
}

}  // namespace zeropage
