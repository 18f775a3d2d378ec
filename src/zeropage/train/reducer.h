// Sums of gradients over ranks. Autograd's gradients for leaves fill a bucket, and a full bucket is sent while
// backward goes on. A thread waits for the sums when it reads them, or when too many bytes are in flight.
//
// If each rank keeps only its share (stages 1 to 3), sums are reduce-scattered. In memory a page of a large gradient
// consists of every rank's part, so it is sent as it is; the other pages are packed. Gradients that are whole on
// every rank (stage 0, small tensors) are packed and all-reduced. Sums are means, like DistributedDataParallel's.
//
// [Note: buckets and ranks] Ranks tell each other the content of a bucket before they send it. They read the answers
// once the next bucket is half full, so a rank that is ahead by less does not wait. If a rank lacks a gradient that
// others have, they send those that all have and pile up the rest, in pages that can leave memory. A rank that reads
// a gradient in backward answers the others until all have it. A rank whose backward has ended answers them until
// theirs have. Then ranks sum the union of their piles page by page, with zeros for missing gradients. The parameter
// then has a gradient on every rank, as it would with the whole batch on one. A gradient is identified by its leaf's
// key ([Note: keys of leaves] in tensor/leaves.h), its kind and the dtype of its values. If a leaf has an earlier
// gradient on some ranks, and others have cleared theirs, all ranks throw. While this rank's program waits in a
// gather, another thread answers ranks that wait for its words or sums (comm/watchdog.h). It delivers nothing, since
// the program may hold the memory.
//
// [Note: no_sync] Under no_sync() a gradient does not come here. It begins, or is added to, a sum of this rank alone
// (train/local_sums.h). The next backward that sends the leaf's gradient adds that to the local sum, and ranks sum
// the results once. Its end sends the local sums of leaves that it did not meet, if no_sync() named them together
// with some that it met. An optimizer's step sends those that are left. If p.grad is a mean over ranks when no_sync()
// begins, ranks gather it.
//
// [Note: in its own dtype] Where ranks sum themselves, as over Gloo, a gradient of a mixed-precision parameter is
// sent in the two bytes that backward made. Ranks widen the values while they sum them, so the float32 mean has the
// same bits as if they were sent wide. If the program has chosen two bytes for the mean too (reduce_dtype), its home
// holds these: the float32 gradient becomes an operator on them (rules/widened.h) once they have come.
#pragma once

#include <c10/util/FunctionRef.h>

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/train/local_sums.h"

namespace zeropage {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  static std::shared_ptr<Reducer> make(const std::shared_ptr<Domain>& domain);
  explicit Reducer(Domain& domain);
  ~Reducer();

  /// A paged gradient like `leaf`. Its content, the mean over ranks, arrives later. `gradient` may be paged.
  /// `is_last`: no other one is expected before the step, so that the update may run as soon as the mean has come.
  at::Tensor reduce(const at::Tensor& leaf, const at::Tensor& gradient, bool is_last);
  /// The gradient that AccumulateGrad shall make p.grad, or add to it, if this rank accumulates the leaf's gradients
  /// for itself. nullopt: it does not, or p.grad is a mean over ranks.
  std::optional<at::Tensor> accumulate_here(const at::Tensor& leaf, const at::Tensor& gradient);
  /// The leaf's gradients will be accumulated here, and sent with those of `group`. If p.grad is a mean over ranks,
  /// the sum begins with it. All ranks call it together.
  void expect_local_sums(const at::Tensor& leaf, std::uint64_t group);
  /// If the leaf's gradient is this rank's own, for example set by the program, replaces p.grad by the mean over
  /// ranks, which arrives later. All ranks call it together. Returns whether it did so.
  bool take_own_gradient(const at::Tensor& leaf);
  /// The program has set the leaf's gradient: the same, unless this rank accumulates it for itself.
  void take_set_gradient(const at::Tensor& leaf);
  /// The same for all of `leaves`; then sends all gradients so far. Without local sums, a backward follows that sends
  /// them.
  void average(c10::ArrayRef<at::Tensor> leaves, bool with_local_sums);
  /// Sends all gradients so far, for the union of the ranks' gradients. All ranks call it at the same place.
  void settle();
  /// All ranks' settle() when this backward ends, also if it makes no gradient here. Inside a backward.
  void expect_end();

 private:
  enum class Kind : std::uint8_t {
    own,    // the program has set it.
    first,  // of a leaf that had no gradient before this backward.
    added,  // to a gradient of an earlier backward.
    again,  // of a leaf that this backward has met before, or whose gradient the program had set.
  };
  /// Ranks recognise a gradient by it.
  struct Identity {
    std::uint64_t key;  // of the leaf
    Kind kind;
    c10::ScalarType made_in;  // the dtype of each rank's values
    auto operator<=>(const Identity&) const = default;
  };
  class Reduction;
  using ReductionPtr = std::shared_ptr<Reduction>;
  struct PiecePart;
  struct Piece;
  struct PackedPart {
    ReductionPtr reduction;
    std::size_t page;
  };

  at::Tensor reduce(const at::Tensor& leaf, const at::Tensor& gradient, const at::Tensor& local_sum, Kind kind,
                    bool is_last);
  bool send_local_sum(const at::Tensor& leaf);
  void send_local_sums();
  void end_local_sums();
  void hand_over();
  bool is_met(const at::Tensor& leaf, std::optional<bool> had_sum);
  template <class Exchange>
  void together(Exchange&& exchange);
  void answer(const std::function<bool()>& has_begun);
  c10::ScalarType made_in(const at::Tensor& leaf, c10::ScalarType dtype) const;
  ReductionPtr start(const at::Tensor& leaf, at::Tensor gradient, c10::ScalarType made_in, Kind kind);
  void add(ReductionPtr reduction);
  class Watch;
  void watch_backward();
  void backward_failed();
  enum class Why : std::int64_t { full, end, read };  // read: backward waits for a gradient that has not been sent
  /// A bucket whose words are on their way to the other ranks.
  struct Proposal {
    std::vector<ReductionPtr> bucket;
    Why why;
    Collectives::Words words;
    bool has_pile;
    std::string contract;  // the text behind words[3]
    std::shared_ptr<Collectives::Agreement> agreement;
    bool is_stale = false;  // its backward failed on this rank
  };
  struct Agreed {
    /// Every rank has the same bucket and an empty pile.
    bool same = false;
    /// Every rank is at the end of its backward.
    bool all_ended = false;
    /// Every rank is there, or waits for a gradient that has not been sent.
    bool all_wait = false;
    /// A rank reads a gradient in backward.
    bool any_reads = false;
    /// Ranks had gradients in common.
    bool has_sent = false;
  };
  void send_open();
  void propose(Why why, bool reads = false);
  Agreed decide();
  void sort_out(Proposal& proposal, Agreed& agreed);
  void send_for_reading(const Reduction& reduction);
  bool is_stuck(const Agreed& agreed) const;
  bool must_receive_together(std::uint64_t up_to) const;
  bool can_read_alone(const Reduction& reduction) const;
  Agreed compare(Proposal& proposal);
  void check_contract(const std::vector<Collectives::Words>& all, Collectives& group, const Proposal& proposal,
                      bool have_ended);
  struct Counts {
    std::map<Identity, std::size_t> least, most;  // gradients of each identity, over ranks
  };
  Counts count_over_ranks() const;
  static Counts count_over(Collectives& group, const Counts& mine);
  bool send_what_all_have(const Counts& counts);
  void send_the_rest(const Counts& counts);
  void spill_pile();
  ReductionPtr missing(const Identity& identity);
  ReductionPtr own_of(const at::Tensor& parameter, const Identity& identity);
  void check_cleared(const Counts& counts) const;
  void throw_together(std::string failure);

  void send(std::vector<ReductionPtr>& reductions);
  c10::ScalarType wire_dtype(const Reduction& reduction) const;
  std::optional<c10::ScalarType> chosen_dtype(const Reduction& reduction) const;
  Collectives::Rounding rounding_of(const Piece& piece) const;
  void send_pages(const ReductionPtr& reduction, std::vector<PackedPart>& to_pack);
  void send_packed_parts(const std::vector<PackedPart>& parts);
  void send_packed_piece(const std::vector<PackedPart>& parts, c10::ScalarType dtype);
  void send_packed_wholes(const std::vector<PackedPart>& wholes);
  void send_packed_whole(std::unique_ptr<Piece> piece, c10::ScalarType dtype);
  void for_each_dtype(const std::vector<PackedPart>& parts,
                      c10::function_ref<void(c10::ScalarType, const std::vector<PackedPart>&)> send) const;
  at::TensorOptions options(c10::ScalarType dtype) const;
  at::Tensor part_of(const Reduction& reduction, std::size_t begin, std::size_t elements, std::size_t length) const;

  void push(std::unique_ptr<Piece> piece);
  void complete(Reduction& reduction);
  void receive_all_of(const Reduction& reduction);
  bool keeps_narrow(const at::Tensor& leaf) const;
  void complete_oldest();
  void receive(Piece& piece);
  void receive_next();
  void make_room();
  void deliver(Piece& piece);
  void finish(Reduction& reduction);
  template <class Fill>
  void write(StorageSegment& segment, std::size_t begin, c10::ScalarType dtype, std::size_t count, std::size_t& done,
             Fill&& fill, bool adds = false);

  Domain& domain_;
  Collectives& ranks_;
  Collectives* replicas_;
  std::recursive_mutex mutex_;
  std::vector<ReductionPtr> open_;    // the bucket being filled
  std::optional<Proposal> proposed_;  // the bucket before it
  std::vector<ReductionPtr> pile_;
  LocalSums local_sums_;
  // By key of the leaves that backward has met: whether they had a sum before. None: the program had set a gradient.
  std::unordered_map<std::uint64_t, std::optional<bool>> had_sum_;
  std::vector<std::pair<at::Tensor, at::Tensor>> to_add_;  // gradients that the program set, and means to add to them
  std::vector<ReductionPtr> to_widen_;                     // whose mean has come in fewer bytes than the program sees
  std::vector<std::uint64_t> to_update_;                   // keys of leaves whose last gradient has come
  std::size_t open_bytes_ = 0;
  std::size_t bytes_under_way_ = 0;  // of pieces that are not delivered
  std::size_t largest_ = 0;          // bytes of a gradient so far
  std::deque<std::unique_ptr<Piece>> under_way_;
  struct Awaited {
    std::size_t bytes;
    bool ends_together;
  };
  // The latest pieces, those that ranks have yet to receive at one place of the program. Each rank may have received,
  // or delivered, some of them for itself.
  std::deque<Awaited> awaited_;
  std::size_t bytes_awaited_ = 0;        // of them
  std::uint64_t pieces_ = 0;             // pushed so far
  std::exception_ptr failure_;           // of an exchange that some ranks may have ended.
  int backward_ = -1;                    // the latest watched graph task.
  int backwards_ = 0;                    // watched graph tasks: a checkpoint's runs inside another.
  bool unsettled_ = false;               // a gradient came since ranks last settled.
  bool uses_local_sums_ = false;         // a rank may have some. The same on all ranks.
  std::set<std::uint64_t> sent_groups_;  // of leaves, by accumulated_with: this backward sends some of each.
  bool has_failed_ = false;              // a backward failed since ranks last agreed.
  bool is_answering_ = false;            // on the watchdog's thread
};

}  // namespace zeropage
