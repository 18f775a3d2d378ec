// Brings whole tensors up to date after each rank has updated its own share of them (Layout::replicated).
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "zeropage/comm/collectives.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

using Storages = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

/// Gathers the other ranks' shares of tensors: one large tensor page by page in place, a few pages at once; or small
/// ones packed. All ranks make it of the same tensors.
class Refresh {
 public:
  Refresh(Collectives& ranks, std::vector<StorageSegment*> segments);
  /// Does the next thing, and perhaps waits for the network or the disk. False: it did nothing, because memory is
  /// short, and `waits_for_memory` is false; it holds none then. Throws like pin_page(), after which the next call
  /// tries again, and RankError, after which none can.
  [[nodiscard]] bool step(bool waits_for_memory);
  bool is_done() const { return part_ == Part::done; }
  void run() {
    while (!is_done()) (void)step(/*waits_for_memory=*/true);
  }

 private:
  struct Gather {
    PagePin page;
    std::unique_ptr<Ranks::Work> work;
  };
  enum class Part : std::uint8_t { pages, packing, packed, unpacking, done };

  PagePin pin(StorageSegment& segment, std::size_t page, bool waits_for_memory);
  bool gather_page(bool waits_for_memory);
  void finish_oldest();
  void gather_packed();
  bool copy_one(bool waits_for_memory, c10::function_ref<void(const at::Tensor& parts, std::int64_t at)> copy);

  Collectives& ranks_;
  const std::vector<StorageSegment*> segments_;
  Part part_ = Part::done;
  Subject subject_;       // as of now: the program may write the tensor when it has come
  std::size_t next_ = 0;  // page, or segment of the pack
  std::deque<Gather> under_way_;
  std::int64_t length_ = 0, at_ = 0;  // bytes of this rank's part of the pack, and those of them that were copied
  at::Tensor mine_, all_;
  std::unique_ptr<Ranks::Work> work_;
};

/// Divides tensors into refreshes, in order. The first ones are small, so that their tensors arrive soon.
std::vector<Storages> in_refreshes(Storages storages);
std::vector<StorageSegment*> segments_of(const Storages& storages);

/// Refreshes parameters on a thread of its own, in the order in which the program will probably use them, while the
/// program computes with those that have arrived. [Note: refreshing thread] A parameter under way has Pending content
/// (StorageSegment::will_come), so that whatever uses it waits for it. The thread never waits for memory: the program
/// may wait for a parameter while it holds some, and then goes on itself in the thread's place.
class Refresher {
 public:
  /// `ranks`: of its own, which nothing else uses.
  explicit Refresher(std::shared_ptr<Collectives> ranks);
  /// Does not wait for what is under way, unless it has to for the network.
  ~Refresher();
  Refresher(const Refresher&) = delete;
  Refresher& operator=(const Refresher&) = delete;

  /// All ranks start the same. No other content may be pending for them.
  void start(Storages storages);
  /// Waits until all have arrived, or one cannot; then nothing is on its way.
  void finish() noexcept;
  /// The bytes that this rank has sent. Waits are those of the program.
  Traffic traffic() const;

 private:
  class Queue;
  class Coming;
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace zeropage
