// Everything that one save writes. Private to checkpoint/.
#pragma once

#include <string>
#include <vector>

#include "zeropage/base/json.h"
#include "zeropage/checkpoint/file_layout.h"
#include "zeropage/checkpoint/module_tensors.h"
#include "zeropage/checkpoint/rank_talk.h"

namespace zeropage {

struct SavedContents {
  std::vector<FileLayout> files;
  Json::Object aliases;  // names of tied tensors, and the names that they are written under
  Json optimizer;
  Json::Array rests;  // each rank's other state

  /// The contents, without `rests`. `optimizer`: null if there is none. Throws Error for one of an unknown kind.
  static SavedContents of(const std::vector<NamedTensor>& module, const torch::optim::Optimizer* optimizer);
  /// Adds each rank's state outside the module and the optimizer. All ranks call it.
  void add_rests(RankTalk& talk);
  /// Bytes of all files.
  std::uint64_t size() const;
  /// A checksum of the layout: equal on all ranks if they have the same tensors.
  std::uint32_t layout() const;

 private:
  void add(std::vector<FileLayout> more);
};

}  // namespace zeropage
