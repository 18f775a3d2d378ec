// How ranks talk while they save and load together. A process alone sends nothing. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <string>
#include <vector>

namespace zeropage {

class Collectives;

class RankTalk {
 public:
  /// The ranks of the tensors' space. With replicas, ranks are numbered shard group by shard group. Throws RankError
  /// if the tensors are in spaces over different groups.
  explicit RankTalk(const std::vector<at::Tensor>& tensors);

  int rank() const { return rank_; }
  bool is_first() const { return rank_ == 0; }
  /// Every rank's text, by rank. Texts hold no NUL.
  std::vector<std::string> gather(const std::string& mine);
  std::string of_first(const std::string& text) { return gather(text)[0]; }
  /// Runs `work` on all ranks. If it fails on one, that one throws its error, and the others throw RankError with it.
  void together(c10::function_ref<void()> work);

 private:
  std::shared_ptr<Collectives> ranks_, replicas_;  // null: there is one
  int rank_ = 0;
};

}  // namespace zeropage
