// Sums of gradients over ranks. A gradient that autograd hands to a leaf is put into a bucket; a full bucket goes on
// its way while backward goes on; its sums are waited for when somebody reads them, or when too much is under way.
//
// Where only each rank's share is kept (stages 1 to 3), sums are reduce-scattered: a page of a large gradient lies in
// memory as every rank's part of it, and is sent as it lies; what is left is packed. Where gradients are whole on
// every rank (stage 0, small tensors), they are packed and all-reduced. Sums are means, as DistributedDataParallel's.
//
// [Note: buckets and ranks] Ranks tell each other what is in a bucket before they send it. If one lacks a gradient
// that others have, the rest of this backward is piled up, and at its end ranks sum over the union, zeros for what a
// rank lacks. The parameter then has a gradient on every rank, as it would have with the whole batch on one.
#pragma once

#include <c10/util/FunctionRef.h>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  explicit Reducer(const Domain& domain);
  ~Reducer();

  /// Remembers a leaf, so that it gets a gradient when other ranks have one and this one has not.
  void know(const at::Tensor& leaf);
  /// A paged gradient like `leaf` whose content, the mean over ranks, is still to come.
  at::Tensor reduce(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Sends what came so far, over the union of what ranks have. All ranks call it at the same place.
  void settle();

 private:
  class Reduction;
  using ReductionPtr = std::shared_ptr<Reduction>;
  struct PiecePart;
  struct Piece;
  struct PackedPart {
    ReductionPtr reduction;
    std::size_t page;
  };

  template <class Exchange>
  void together(Exchange&& exchange);
  ReductionPtr start(const at::Tensor& leaf, at::Tensor gradient);
  void add(ReductionPtr reduction);
  void watch_backward();
  enum class Why : std::int64_t { full, end };
  void send_open(Why why);
  bool all_have(Collectives::Words mine);
  static std::set<std::uint64_t> union_over(Collectives& group, const std::set<std::uint64_t>& mine);
  void settle_pile();
  ReductionPtr missing(std::uint64_t number);

  void send(std::vector<ReductionPtr>& reductions);
  c10::ScalarType wire_dtype(c10::ScalarType dtype) const;
  void send_pages(const ReductionPtr& reduction, std::vector<PackedPart>& to_pack);
  void send_packed_parts(const std::vector<PackedPart>& parts);
  void send_packed_wholes(const std::vector<PackedPart>& wholes);
  void for_each_dtype(const std::vector<PackedPart>& parts,
                      c10::function_ref<void(c10::ScalarType, const std::vector<PackedPart>&)> send) const;
  at::TensorOptions options(c10::ScalarType dtype) const;

  void push(std::unique_ptr<Piece> piece);
  void complete(const Reduction& reduction);
  void complete_oldest();
  void make_room();
  void deliver(Piece& piece);
  void finish(Reduction& reduction);
  void write(StorageSegment& segment, std::size_t begin, const at::Tensor& content, c10::ScalarType dtype, bool add,
             std::size_t& done);

  const Domain& domain_;
  Collectives& ranks_;
  Collectives* replicas_;
  std::recursive_mutex mutex_;
  std::map<std::uint64_t, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> leaves_;  // by number
  std::vector<ReductionPtr> open_;  // the bucket being filled
  std::vector<ReductionPtr> pile_;
  bool piling_ = false;
  std::size_t open_bytes_ = 0, bytes_under_way_ = 0;
  std::deque<std::unique_ptr<Piece>> under_way_;
  std::exception_ptr failure_;  // of an exchange that ranks did not end together
  int backward_ = -1;           // the graph task whose end is watched
};

}  // namespace zeropage
