// Sums of gradients over ranks. A gradient that autograd hands to a leaf is put into a bucket; a full bucket goes on
// its way while backward goes on; its sums are waited for when somebody reads them, or when too much is under way.
//
// Where only each rank's share is kept (stages 1 to 3), sums are reduce-scattered: a page of a large gradient lies in
// memory as every rank's part of it, and is sent as it lies; what is left is packed. Where gradients are whole on
// every rank (stage 0, small tensors), they are packed and all-reduced. Sums are means, as DistributedDataParallel's.
//
// [Note: buckets and ranks] Ranks tell each other what is in a bucket before they send it. If a rank lacks a gradient
// that others have, they send what all of them have; the rest is piled up, in pages that can leave memory. A rank
// whose backward has ended answers the others until theirs have. Then ranks sum over the union of their piles, page
// by page, zeros for what a rank lacks. The parameter has a gradient on every rank then, as it would have with the
// whole batch on one. A gradient is known by its leaf's key ([Note: keys of leaves] in tensor/leaves.h).
#pragma once

#include <c10/util/FunctionRef.h>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  explicit Reducer(Domain& domain);
  ~Reducer();

  /// A paged gradient like `leaf` whose content, the mean over ranks, is still to come. `gradient` may be paged.
  at::Tensor reduce(const at::Tensor& leaf, const at::Tensor& gradient);
  /// If the leaf's gradient is this rank's own, as one that the program has set: p.grad is the mean over ranks from
  /// now on, which is still to come. All ranks do it together. Whether it was.
  bool take_own_gradient(const at::Tensor& leaf);
  /// The same for all of `leaves`, and sends what came so far.
  void average(c10::ArrayRef<at::Tensor> leaves);
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
  class Watch;
  void watch_backward();
  void backward_failed();
  enum class Why : std::int64_t { full, end };
  void send_open(Why why);
  struct Agreed {
    bool same;       // in every rank's bucket and pile
    bool all_ended;  // every rank is at the end of its backward
  };
  Agreed agree(Why why);
  void check_contract(const std::vector<Collectives::Words>& all, Collectives& group, std::int64_t mine);
  struct Counts {
    std::map<std::uint64_t, std::size_t> least, most;  // of gradients of each key, over ranks
  };
  Counts count_over_ranks() const;
  static Counts count_over(Collectives& group, const Counts& mine);
  void send_what_all_have(const Counts& counts);
  void send_the_rest(const Counts& counts);
  void spill_pile();
  ReductionPtr missing(std::uint64_t key);

  void send(std::vector<ReductionPtr>& reductions);
  c10::ScalarType wire_dtype(c10::ScalarType dtype) const;
  void send_pages(const ReductionPtr& reduction, std::vector<PackedPart>& to_pack);
  void send_packed_parts(const std::vector<PackedPart>& parts);
  void send_packed_wholes(const std::vector<PackedPart>& wholes);
  void for_each_dtype(const std::vector<PackedPart>& parts,
                      c10::function_ref<void(c10::ScalarType, const std::vector<PackedPart>&)> send) const;
  at::TensorOptions options(c10::ScalarType dtype) const;
  at::Tensor part_of(const Reduction& reduction, std::size_t begin, std::size_t elements, std::size_t length) const;

  void push(std::unique_ptr<Piece> piece);
  void complete(const Reduction& reduction);
  void complete_oldest();
  void make_room();
  void deliver(Piece& piece);
  void finish(Reduction& reduction);
  void write(StorageSegment& segment, std::size_t begin, const at::Tensor& content, c10::ScalarType dtype, bool add,
             std::size_t& done);

  Domain& domain_;
  Collectives& ranks_;
  Collectives* replicas_;
  std::recursive_mutex mutex_;
  std::vector<ReductionPtr> open_;  // the bucket being filled
  std::vector<ReductionPtr> pile_;
  std::vector<std::pair<at::Tensor, at::Tensor>> to_add_;  // to gradients that the program set, means of others
  std::size_t open_bytes_ = 0, bytes_under_way_ = 0;
  std::deque<std::unique_ptr<Piece>> under_way_;
  std::exception_ptr failure_;  // of an exchange that ranks did not end together
  int backward_ = -1;           // the graph task that was watched last
  int backwards_ = 0;           // graph tasks that are watched: a checkpoint's runs inside another
  bool unsettled_ = false;      // something came since ranks last settled
  bool has_failed_ = false;     // a backward ended in an error since ranks last agreed
};

}  // namespace zeropage
