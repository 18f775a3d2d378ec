// Ranks compare their settings here before they share tensors. Settings decide which collectives run, so ranks with
// different ones would wait for each other until their group's timeout. Instead they get one error that names the
// setting. Automatic sizes become the least of all ranks.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "zeropage/comm/collectives.h"

namespace zeropage {

/// A setting that must be the same on all ranks.
struct Agreed {
  std::string name;
  std::string meaning;  // the text that ranks compare: the same for "1MiB" and "1048576".
  std::string text;     // the user's text, for the error.
};

class Agreement {
 public:
  /// Covers a group of ranks and, unless null, its replicas. All ranks of both make it together.
  Agreement(Collectives& ranks, Collectives* replicas) : ranks_(ranks), replicas_(replicas) {}

  /// Throws ConfigError on every rank if ranks differ, with each rank's values. Else returns the least of all ranks'
  /// `sizes`, by name. Every rank gives the same names in the same order.
  std::map<std::string, std::size_t> settle(const std::vector<Agreed>& settings,
                                            const std::map<std::string, std::size_t>& sizes);

  /// Throws RankError if `failure` is empty here but not on another rank, with that rank's text.
  void confirm(const std::string& failure);

 private:
  std::vector<std::string> everyones(const std::string& mine, const Subject& subject);
  Collectives& ranks_;
  Collectives* replicas_;
};

}  // namespace zeropage
