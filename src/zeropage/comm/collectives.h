// Collectives of one group of ranks through c10d, counted, and checked: ranks that are no longer at the same operator
// get one error that says where each is, instead of a hang or another tensor's bytes.
//
// [Note: together] Each collective is folded into a running hash of its kind, subject and size. While checking, which
// is always for the first ones and then now and then, ranks compare hashes before they move data; gradients compare
// them at every bucket. Where ranks differ without a check, the group's own timeout ends the wait, and each rank
// leaves a note in the group's store of where it was, so that the error can still say it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <exception>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "zeropage/comm/ranks.h"

namespace zeropage {

enum class CheckRanks : std::uint8_t { automatic, always, never };

/// Bytes that this rank sent, by what for. A ring or an all-to-all sends the same.
struct Traffic {
  std::size_t gathered = 0;     // all-gathers: (N-1) times its part
  std::size_t reduced = 0;      // reduce-scatters: (N-1) parts; all-reduces: twice that
  std::size_t broadcast = 0;    // at the start: what is not paged, from rank 0
  std::size_t control = 0;      // checks, agreements, norms
  std::size_t collectives = 0;  // those that moved data

  Traffic& operator+=(const Traffic& other) {
    gathered += other.gathered, reduced += other.reduced, broadcast += other.broadcast, control += other.control;
    collectives += other.collectives;
    return *this;
  }
};

class Collectives final : public Ranks {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  /// [Note: whose group] A group of Python's is torch.distributed's own: destroy_process_group() must end its
  /// threads, as in a program without us, for they must not outlive the interpreter. So `keep` is false there, and
  /// collectives after its end throw RankError.
  Collectives(const Group& group, c10::Device device, CheckRanks check, bool keep);

  int size() const override { return size_; }
  int rank() const override { return rank_; }
  std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part, std::size_t part_bytes,
                                   const Subject& subject) override;
  void fail(std::string_view why) override;
  std::shared_ptr<std::byte> scratch(std::size_t bytes) override;

  /// `out` becomes the mean over ranks of part rank() of `in`; in.numel() is size() * out.numel(). On the CPU it is
  /// summed in rank order, 16-bit values in float32, and rounded once. Both are kept until the work was waited for.
  [[nodiscard]] std::unique_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in, const Subject& subject);
  /// `mean` becomes the mean over ranks, in the same order.
  [[nodiscard]] std::unique_ptr<Work> all_reduce(at::Tensor mean, const Subject& subject);
  /// Whether all_reduce() of such values ends with an exchange, so that all ranks must wait for it together.
  bool sums_in_parts(c10::ScalarType dtype) const;
  /// Rank 0's content everywhere, at once.
  void broadcast(at::Tensor tensor, const Subject& subject);
  /// What each rank's small CPU tensor holds, in rank order: [ranks, numel]. At once.
  at::Tensor all_gather_small(const at::Tensor& mine, const Subject& subject);

  /// Words that ranks tell each other, in rank order. Words differ, the history of collectives must not: throws
  /// RankError on every rank if it does.
  using Words = std::array<std::int64_t, 4>;
  std::vector<Words> agree(const Words& mine, const Subject& subject);
  /// What each rank says, in rank order. At once.
  std::vector<std::string> all_gather_text(const std::string& mine, const Subject& subject);
  /// Those of `mine` that every rank has, in the order of `mine`. Numbers are not zero, each occurs once, and ranks
  /// that have the same give them in the same order. At once; one small exchange if all have the same.
  std::vector<std::uint64_t> common(const std::vector<std::uint64_t>& mine, const Subject& subject);
  /// Throws on every rank, saying what each was doing.
  [[noreturn]] void differ(const std::string& what);

  Traffic traffic() const;

 private:
  class Staging;
  class Pending;
  class Summing;
  class SummingParts;
  class Scaling;
  void enter(std::string_view kind, const Subject& subject, std::size_t bytes);
  void record(std::string_view kind, const Subject& subject, std::size_t bytes);
  at::Tensor gather_words(c10::ArrayRef<std::int64_t> words);
  at::Tensor as_tensor(std::byte* at, std::size_t bytes) const;
  template <class Kind, class Start>
  std::unique_ptr<Work> start(Start&& start, std::vector<at::Tensor> kept, Staging staging);
  std::exception_ptr failure(const std::string& during, const std::exception& error);
  std::vector<std::string> gather_padded(std::string mine, std::size_t bytes);
  std::string where_all_are();

  Group group() const;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  Group kept_;  // null: [Note: whose group]
  int size_, rank_;
  c10::Device device_;
  c10::Device control_device_;  // of small tensors: the CPU where the group has a backend for it
  bool is_staged_ = false;      // the group has none for the device: all pass through the host
  CheckRanks check_;
  mutable std::mutex mutex_;
  std::uint64_t history_ = 0;
  std::string last_;  // the latest collective, in words
  std::string broken_;
  Traffic traffic_;
};

}  // namespace zeropage
