// Random numbers of a scope over ranks. While the object lives, the default generators of the CPU and of the space's
// device draw rank 0's numbers on all ranks. Initialisers then make the same tensors on all of them.
// DistributedDataParallel reaches the same by a broadcast.
//
// [Note: whose numbers] A rank that keeps only its share of a parameter cannot broadcast it later. Ranks therefore
// agree on states before they draw. If the states are equal, nothing changes at all. Else each rank gets its own
// state back at the end, as if it had drawn nothing: seeds that differ between ranks still differ after the scope. If
// the program seeds a generator inside, the generator keeps the state that the program gave it; ranks that seed
// differently there draw different numbers. Generators that the program makes itself are its own.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeropage {

struct Domain;

class SharedDraws {
 public:
  /// All ranks call it together. Throws RankError.
  explicit SharedDraws(Domain& domain);
  ~SharedDraws();
  SharedDraws(const SharedDraws&) = delete;
  SharedDraws& operator=(const SharedDraws&) = delete;

 private:
  struct Own {
    at::Generator generator;
    at::Tensor state;           // this rank's, before the scope
    std::uint64_t shared_seed;  // rank 0's
  };
  std::vector<Own> own_;  // those that were replaced
};

}  // namespace zeropage
