// Collectives of one group of ranks through c10d, counted and checked. Ranks that are no longer at the same operator
// get one error that says where each is, instead of a hang or another tensor's bytes.
//
// [Note: together] Each collective goes into a running hash of its kind, subject and size: gathers into one, all
// others into another, since ranks' programs may interleave them differently (comm/watchdog.h). Ranks compare hashes
// before they move data: always for the first collectives, then now and then, and for gradients at every bucket. If
// ranks differ without a check, the watchdog ends the wait within seconds, or the group's own timeout does. Each rank
// then leaves a note of its position in the group's store, so that the error can still name it.
//
// [Note: parts] Gloo's all-gather receives into memory of its own, and copies from there. Its all-to-all copies the
// own part too. Over Gloo, ranks therefore send each other their parts, which arrive where they belong. The tag of
// such a message is made of the history of collectives, so ranks that differ never take each other's bytes. Large
// parts of ranks on one host are read from the other's memory (comm/neighbours).
//
// [Note: words on their way] An agreement may be on its way while other collectives start. Whatever exchanges words
// next waits for it first. A rank without such an agreement would answer it with its own words, and all ranks see
// that their histories differ before they go on.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "zeropage/comm/link_meter.h"
#include "zeropage/comm/neighbours.h"
#include "zeropage/comm/ranks.h"
#include "zeropage/comm/watchdog.h"
#include "zeropage/kernels/block_codes.h"

namespace zeropage {

enum class CheckRanks : std::uint8_t { automatic, always, never };

/// Bytes that this rank sent, by purpose. A ring or an all-to-all sends the same number.
struct Traffic {
  std::size_t gathered = 0;         // all-gathers: (N-1) times its part
  std::size_t reduced = 0;          // reduce-scatters: (N-1) parts; all-reduces: twice that
  std::size_t inside_nodes = 0;     // of both, in exchanges of one node's ranks alone
  std::size_t broadcast = 0;        // at the start: ordinary tensors, from rank 0
  std::size_t control = 0;          // checks, agreements, norms
  std::size_t collectives = 0;      // those that moved data
  std::size_t in_memory = 0;        // of all these bytes, those that ranks of this host read from this one's memory
  LinkMeter::Totals received = {};  // in gathers and sums. On the CPU alone: elsewhere no thread waits for them

  Traffic& operator+=(const Traffic& other) {
    gathered += other.gathered, inside_nodes += other.inside_nodes;
    reduced += other.reduced, broadcast += other.broadcast, control += other.control;
    collectives += other.collectives, in_memory += other.in_memory;
    received.busy_seconds += other.received.busy_seconds, received.waited_seconds += other.received.waited_seconds;
    return *this;
  }
};

class Collectives final : public Ranks {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  /// [Note: whose group] A group of Python's belongs to torch.distributed. Its threads must not outlive the
  /// interpreter, so destroy_process_group() must end them, as in a program without zeropage. `keep` is false for
  /// such a group, and collectives after its end throw RankError.
  Collectives(const Group& group, c10::Device device, CheckRanks check, bool keep);
  /// [Note: groups of their own] A group's transfers to one rank share a connection. A word that ranks compare would
  /// wait there for the tens of megabytes under way, and a gather for the sums before it. Gathers and sums may each
  /// have a group over the same ranks, and `checks` serves the words that ranks compare before a gather. `group` then
  /// serves the rest: words, norms and the broadcasts at the start. Gathers start in one order, and so do all others.
  /// All ranks call this together, before they share tensors. The groups are kept as `group` is. `peer_bytes`: ranks
  /// of one host read parts of at least so many bytes from each other's memory, if the system permits it; none: they
  /// read nothing there.
  void set_groups(const Group& gathers, const Group& sums, const Group& checks,
                  std::optional<std::size_t> peer_bytes);
  /// Instead of set_groups(): lets this object gather over the group that another one gathers over. Their messages
  /// have different tags. All ranks call this together, before the first gather.
  void share_group(std::optional<std::size_t> peer_bytes);
  /// Whether it keeps its group alive: [Note: whose group].
  bool keeps_group() const { return small_.kept != nullptr; }
  /// Every `ranks` consecutive ranks are a node; they divide size(). `gathers` has the ranks of this one's node.
  /// Null: a gather of a node uses the group of all gathers, which must be Gloo's.
  void set_nodes(int ranks, const Group& gathers);
  /// Whether a rank sends its part of a gather to each other rank (Gloo), not by the backend's own all-gather.
  bool gathers_by_parts() const { return small_.sends_parts && (device_.is_cpu() || is_staged_); }
  /// While a thread waits in a gather, `answer` may take part in exchanges of words and sums on another one.
  void answer_with(Watchdog::Answer answer);
  /// Ends every wait of this rank, and for it, with an error. `why`: empty if ranks wait for each other.
  void give_up(const std::string& why);
  /// While it is held, no other thread exchanges words.
  std::unique_lock<std::recursive_mutex> talk_alone() { return std::unique_lock(talking_); }
  /// The ranks whose memory this rank reads.
  int neighbours() const { return neighbours_ ? neighbours_->count() : 0; }

  int size() const override { return size_; }
  int rank() const override { return rank_; }
  int node_size() const override { return node_size_; }
  /// Also where the backend has streams of its own, as NCCL does: no word of the host waits for them.
  bool gathers_apart() const override {
    return gathers_.has_value() || (control_device_.is_cpu() && !device_.is_cpu() && !is_staged_);
  }
  std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part, std::size_t part_bytes,
                                   const Subject& subject, Sending sending) override;
  void fail(std::string_view why) override;
  std::shared_ptr<std::byte> scratch(std::size_t bytes) override;

  /// A range of a mean.
  struct Elements {
    std::size_t begin, end;
  };
  /// A mean over ranks on its way. Keeps this rank's values, and those that it received, until it is destroyed. On
  /// the CPU they are summed in rank order, in float32 at least, and the mean is rounded once.
  class Mean : public Work {
   public:
    /// After wait(): writes elements [begin, begin + into.numel()) of the mean to `into`, or adds them. `into` is
    /// flat and contiguous.
    virtual void take(const at::Tensor& into, std::size_t begin, bool adds = false) = 0;
    /// Starts what follows the first exchange of a sum in two: ends_together(). Waits for that exchange. All ranks
    /// call it at the same place, after they started the next sum.
    virtual void advance() {}
  };
  /// How a mean is rounded. On the CPU, values that are equal on all ranks stay as they are in the ranges of
  /// `settled`, which are in order: elsewhere the sum of n equal values, divided by n, may be rounded.
  struct Rounding {
    c10::ScalarType dtype;
    std::vector<Elements> settled = {};
    std::optional<kernels::CodeBits> bits = {};  // of each element on its way to another node; none: its own dtype
  };
  /// The mean over ranks of part rank() of `in`; in.numel() is a multiple of size(). `in` is sent in its own dtype.
  /// If not sums_in_parts(), the rounding's dtype is that of `in`.
  [[nodiscard]] std::unique_ptr<Mean> reduce_scatter(at::Tensor in, Rounding rounding, const Subject& subject);
  /// The mean of `in`, flat, which may be overwritten. Sums travel in the rounding's dtype.
  [[nodiscard]] std::unique_ptr<Mean> all_reduce(at::Tensor in, Rounding rounding, const Subject& subject);
  /// Whether ranks sum this dtype themselves. all_reduce() then ends with an exchange, so that all ranks must wait
  /// for it together.
  bool sums_in_parts(c10::ScalarType dtype) const;
  /// Whether reduce_scatter() ends with an exchange of its own, so that all ranks must wait for it together.
  bool ends_together(const Rounding& rounding) const { return rounding.bits && sums_inside_nodes(); }
  /// Copies rank 0's content to all ranks. Blocks.
  void broadcast(at::Tensor tensor, const Subject& subject);
  /// The content of each rank's small CPU tensor, in rank order: [ranks, numel]. Blocks.
  at::Tensor all_gather_small(const at::Tensor& mine, const Subject& subject);

  /// Exchanges words, and returns them in rank order. Words may differ, but the history of collectives may not:
  /// throws RankError on every rank if it does.
  using Words = std::array<std::int64_t, 4>;
  std::vector<Words> agree(const Words& mine, const Subject& subject);
  /// The same in two halves: other collectives may start in between. Dropping an agreement blocks nothing.
  struct Agreement;
  std::shared_ptr<Agreement> start_agreement(const Words& mine, const Subject& subject);
  std::vector<Words> finish(const std::shared_ptr<Agreement>& agreement);
  /// The text of each rank, in rank order. Blocks.
  std::vector<std::string> all_gather_text(const std::string& mine, const Subject& subject);
  /// The numbers of `mine` that every rank has, in the order of `mine`. Numbers are unique and not zero, and ranks
  /// with equal sets give them in the same order. Blocks; one small exchange if all have the same.
  std::vector<std::uint64_t> common(const std::vector<std::uint64_t>& mine, const Subject& subject);
  /// Throws an error on every rank that tells what each was doing.
  [[noreturn]] void differ(const std::string& what);

  Traffic traffic() const;

 private:
  class Staging;
  class Pending;
  class Parts;
  class Summing;
  class SummingParts;
  class SummedByBackend;
  class GatheringCodes;
  class SummingCodes;
  struct Connection {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group{Group()};
    Group kept = nullptr;      // null: [Note: whose group]
    bool sends_parts = false;  // [Note: parts]
    Neighbours* neighbours = nullptr;
    Neighbours::Channel channel = Neighbours::Channel::gathers;
  };
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Channel = Watchdog::Channel;
  /// A collective of this rank, as its watchdog counts them.
  struct Place {
    Channel channel;
    std::uint64_t number;
  };
  Place begin(Channel channel);
  std::int64_t agreed_number();
  struct Entered {
    std::uint64_t history;  // tells this collective's messages from others'
    Place place;
  };
  Entered enter(Channel channel, std::string_view kind, const Subject& subject, std::size_t bytes,
                bool always = false);
  std::uint64_t record(Channel channel, std::string_view kind, const Subject& subject, std::size_t bytes);
  /// Ranks first, first + step, …, which exchange parts. This rank is at `place` among them.
  struct Circle {
    int first, step, count, place;
    int operator[](int i) const { return first + i * step; }
  };
  Circle everyone() const { return {0, 1, size_, rank_}; }
  /// The ranks at this one's place in each node.
  Circle across() const { return {rank_ % node_size_, node_size_, size_ / node_size_, rank_ / node_size_}; }
  Circle node() const { return {rank_ - rank_ % node_size_, 1, node_size_, rank_ % node_size_}; }
  Works gather(const Connection& on, const Circle& circle, const at::Tensor& whole, const at::Tensor& mine,
               std::uint64_t history) const;
  Works scatter(const Connection& on, const Circle& circle, const at::Tensor& in, std::vector<at::Tensor>& parts,
                std::uint64_t history) const;
  std::int64_t compared(Channel channel) const;
  std::int64_t writes_so_far() const;
  void await_agreement();
  std::unique_lock<std::recursive_mutex> talk(const Connection& on);
  void count_control(std::size_t bytes);
  void count_reduced(std::size_t bytes);
  void count_scattered(const at::Tensor& in, const Rounding& rounding);
  std::unique_ptr<Work> gather_codes(std::byte* into, const std::byte* part, std::size_t part_bytes, Coding coding,
                                     std::uint64_t history, Place place);
  bool sums_inside_nodes() const;
  std::pair<at::Tensor, at::Tensor> tensors_for(c10::ArrayRef<std::int64_t> words);
  at::Tensor gather_words(const Connection& on, Place place, c10::ArrayRef<std::int64_t> words);
  std::size_t compare_sizes(const Subject& subject, std::size_t common, std::size_t bytes);
  at::Tensor as_tensor(std::byte* at, std::size_t bytes) const;
  template <class Kind, class Start>
  std::unique_ptr<Kind> start(Place place, Start&& start, std::vector<at::Tensor> kept, Staging staging);
  std::exception_ptr failure(const std::string& during, const std::exception& error);
  /// The error of a broken group.
  std::exception_ptr broken() const;
  std::vector<std::string> gather_padded(const Connection& on, std::string mine, std::size_t bytes);
  [[noreturn]] void differ_on(const Connection& on, const std::string& what);
  void close_connections();
  std::string last() const;
  std::string where_all_are();

  Group group() const { return alive(small_); }
  const Connection& gathers() const { return gathers_ ? *gathers_ : small_; }
  const Connection& checks() const { return checks_ ? *checks_ : small_; }
  const Connection& sums() const { return sums_ ? *sums_ : small_; }
  const Connection& gathers_among(Among among) const {
    return among == Among::node && of_node_ ? *of_node_ : gathers();
  }
  static Group alive(const Connection& connection);
  static Connection connect(const Group& group, bool keep);
  void meet_neighbours(std::size_t least_bytes);
  template <class Incoming, class OutgoingPart>
  Works send_parts(const Connection& on, const Circle& circle, std::uint64_t history, const Incoming& incoming,
                   const OutgoingPart& outgoing) const;

  LinkMeter meter_;
  Connection small_;
  std::optional<Connection> gathers_, sums_, checks_, of_node_;
  int size_, rank_;
  int node_size_ = size_;
  std::unique_ptr<Neighbours> neighbours_;
  c10::Device device_;
  c10::Device control_device_;  // of small tensors: the CPU if the group has a backend for it
  bool is_staged_ = false;      // the group has no backend for the device: use copies on the host
  CheckRanks check_;
  mutable std::mutex mutex_;
  std::recursive_mutex talking_;                  // of the thread that uses small_.
  std::uint64_t of_gathers_ = 0, of_others_ = 0;  // histories.
  std::uint64_t writes_ = 0;                      // hash of how often the program has written what is gathered.
  std::size_t checked_gathers_ = 0, checked_others_ = 0;  // numbers of collectives that enter() has seen
  std::uint64_t failures_ = 0;                            // hash of what fail() told; not 0 after the first
  std::string failed_;                                    // its latest text
  std::shared_ptr<Agreement> agreement_;                  // the latest
  std::string last_;                                      // text of the latest collective
  std::string broken_;
  std::shared_ptr<std::atomic<bool>> is_broken_ = std::make_shared<std::atomic<bool>>(false);  // works share it
  Traffic traffic_;
  mutable std::atomic<std::size_t> in_memory_ = 0;  // of traffic_
  std::atomic<bool> in_circle_ = false;             // ranks wait for each other
  Watchdog::Answer answer_ = nullptr;
  std::unique_ptr<Watchdog> watchdog_;  // null: without groups of their own. Ends first
};

}  // namespace zeropage
