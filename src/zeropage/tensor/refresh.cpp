#include "zeropage/tensor/refresh.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/base/process.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

constexpr std::size_t kGathersAhead = 2;
constexpr std::size_t kFirstBytes = kMiB, kMostBytes = 16 * kMiB;  // of tensors between which small ones are packed

std::size_t item_bytes(const StorageSegment& segment) { return segment.bytes() / segment.stripes().padded(); }

std::int64_t part_bytes(const StorageSegment& segment) {
  return static_cast<std::int64_t>(segment.stripes().part(0) * item_bytes(segment));
}

at::TensorOptions bytes_on(const StorageSegment& segment) {
  return at::TensorOptions().dtype(at::kByte).device(segment.domain()->device);
}

/// Rows of bytes. On the CPU without PyTorch, whose threads are the program's.
void copy_rows(at::Tensor into, const at::Tensor& from) {
  if (!into.is_cpu()) {
    into.copy_(from);
    return;
  }
  for (std::int64_t i = 0; i < into.size(0); ++i) {
    std::memcpy(into[i].mutable_data_ptr(), from[i].const_data_ptr(), into.size(1));
  }
}

}  // namespace

Refresh::Refresh(Collectives& ranks, std::vector<StorageSegment*> segments)
    : ranks_(ranks), segments_(std::move(segments)) {
  if (segments_.empty()) return;
  const StorageSegment& first = *segments_[0];
  const bool is_large = first.pages() > 1;
  TORCH_INTERNAL_ASSERT(!is_large || segments_.size() == 1);
  part_ = is_large ? Part::pages : Part::packing;
  subject_ = {name_of(first.role()), first.number(), 0};
  for (const StorageSegment* segment : segments_) {
    subject_.writes = is_large ? segment->program_writes() : 31 * subject_.writes + segment->program_writes();
    length_ += part_bytes(*segment);
  }
}

bool Refresh::step(bool waits_for_memory) {
  const NoPagingGuard no_paging;  // also in a scope
  switch (part_) {
    case Part::pages:
      return gather_page(waits_for_memory);
    case Part::packing:
      if (next_ == segments_.size()) {
        gather_packed();
        return true;
      }
      if (!mine_.defined()) {
        const auto options = bytes_on(*segments_[0]);
        mine_ = at::empty({1, length_}, options), all_ = at::empty({ranks_.size(), length_}, options);
      }
      return copy_one(waits_for_memory, [&](const at::Tensor& parts, std::int64_t at) {
        copy_rows(mine_.narrow(1, at, parts.size(1)), parts.narrow(0, ranks_.rank(), 1));
      });
    case Part::packed:
      work_->wait();
      work_ = nullptr;
      part_ = Part::unpacking, next_ = 0, at_ = 0;
      return true;
    case Part::unpacking:
      if (next_ == segments_.size()) {
        part_ = Part::done;
        return true;
      }
      return copy_one(waits_for_memory, [&](const at::Tensor& parts, std::int64_t at) {
        copy_rows(parts, all_.narrow(1, at, parts.size(1)));
      });
    case Part::done:
      break;
  }
  return true;
}

/// Holds nothing if it returns no pin or waits: what is under way ends first.
PagePin Refresh::pin(StorageSegment& segment, std::size_t page, bool waits_for_memory) {
  PagePin pin = segment.cache()->try_bring_page(segment, page, Access::write);
  if (pin || !under_way_.empty() || !waits_for_memory) return pin;
  return segment.cache()->pin_page(segment, page, Access::write);
}

bool Refresh::gather_page(bool waits_for_memory) {
  StorageSegment& segment = *segments_[0];
  const Stripes& stripes = segment.stripes();
  if (next_ == stripes.pages() && under_way_.empty()) {
    part_ = Part::done;
    return true;
  }
  if (next_ == stripes.pages() || under_way_.size() == kGathersAhead) {
    finish_oldest();
    return true;
  }
  Gather gather{pin(segment, next_, waits_for_memory), nullptr};
  if (!gather.page) {
    if (under_way_.empty()) return false;
    finish_oldest();
    return true;
  }
  gather.page.wait();
  const std::size_t bytes = stripes.part(next_) * item_bytes(segment);
  std::byte* const data = gather.page.data();
  Subject subject = subject_;
  subject.page = next_;
  gather.work = ranks_.all_gather(data, data + stripes.rank() * bytes, bytes, subject, {});
  under_way_.push_back(std::move(gather));
  ++next_;
  return true;
}

void Refresh::finish_oldest() {
  under_way_.front().work->wait();
  under_way_.pop_front();
}

void Refresh::gather_packed() {
  work_ = ranks_.all_gather(static_cast<std::byte*>(all_.mutable_data_ptr()),
                            static_cast<const std::byte*>(mine_.const_data_ptr()), length_, subject_, {});
  part_ = Part::packed;
}

/// Calls `copy` with every rank's part of the next storage, [ranks, bytes], and its offset in the pack.
bool Refresh::copy_one(bool waits_for_memory, c10::function_ref<void(const at::Tensor&, std::int64_t)> copy) {
  StorageSegment& segment = *segments_[next_];
  PagePin page = pin(segment, 0, waits_for_memory);
  if (!page) return false;
  page.wait();
  const std::int64_t bytes = part_bytes(segment);
  copy(at::from_blob(
           page.data(), {ranks_.size(), bytes}, [](void*) {}, bytes_on(segment), segment.domain()->device),
       at_);
  at_ += bytes, ++next_;
  return true;
}

std::vector<StorageSegment*> segments_of(const Storages& storages) {
  std::vector<StorageSegment*> segments;
  for (const auto& storage : storages) segments.push_back(segment_of(*storage));
  return segments;
}

std::vector<Storages> in_refreshes(Storages storages) {
  std::vector<Storages> refreshes;
  std::size_t limit = kFirstBytes;
  for (std::size_t begin = 0; begin < storages.size();) {
    Storages small, large;
    for (std::size_t bytes = 0; begin < storages.size() && bytes < limit; ++begin) {
      const StorageSegment& segment = *segment_of(*storages[begin]);
      bytes += segment.bytes();
      (segment.pages() > 1 ? large : small).push_back(std::move(storages[begin]));
    }
    limit = std::min(2 * limit, kMostBytes);
    if (!small.empty()) refreshes.push_back(std::move(small));
    for (auto& storage : large) refreshes.push_back({std::move(storage)});
  }
  return refreshes;
}

/// The refreshes that are left, with numbers from 1 on. The thread keeps it alive.
class Refresher::Queue {
 public:
  explicit Queue(std::shared_ptr<Collectives> ranks) : ranks_(std::move(ranks)) {}

  std::uint64_t add(const Storages& storages) {
    auto left = std::unique_ptr<Left>(new Left{storages, Refresh(*ranks_, segments_of(storages))});
    const std::lock_guard lock(mutex_);
    left_.push_back(std::move(left));
    changed_.notify_all();
    return ++added_;
  }

  /// Returns when refresh `number` and those before it are done. Goes on in the thread's place while memory is short.
  void bring(std::uint64_t number) {
    if (is_in_child()) throw AccessError("a parameter was on its way from other ranks when this process was forked");
    std::vector<Storages> dropped;  // outlives the lock
    const Clock::time_point begin = Clock::now();
    std::unique_lock lock(mutex_);
    dropped.swap(dropped_);
    while (done_ < number && !error_) {
      if (is_busy_ || !is_stuck_) {
        changed_.wait(lock);
      } else {
        step(lock, /*waits_for_memory=*/true);
      }
    }
    waited_ += Clock::now() - begin;
    if (done_ < number) std::rethrow_exception(error_);
  }

  /// Works until stop().
  void work() {
    const Unbooked unbooked;  // the program waits for none of it
    std::unique_lock lock(mutex_);
    while (!stops_) {
      if (left_.empty() || error_ || is_busy_ || needs_program_) {
        changed_.wait(lock);
        continue;
      }
      try {
        step(lock, /*waits_for_memory=*/false);
      } catch (const std::exception&) {  // the program tries it again, and tells
        is_stuck_ = needs_program_ = true;
        changed_.notify_all();
      }
      if (is_stuck_ && !needs_program_) changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    changed_.notify_all();
  }

  /// Lets go of what cannot come any more.
  void clear() {
    if (is_in_child()) return;
    std::deque<std::unique_ptr<Left>> left;  // outlive the lock
    std::vector<Storages> dropped;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !is_busy_; });
    left.swap(left_);
    dropped.swap(dropped_);
    if (done_ < added_ && !error_) {
      error_ = std::make_exception_ptr(RankError("the space ended before its parameters came from other ranks"));
    }
  }
  bool is_in_child() const { return process_ != process_generation(); }

  std::uint64_t added() const {
    const std::lock_guard lock(mutex_);
    return added_;
  }
  Traffic traffic() const {
    Traffic traffic = ranks_->traffic();
    const std::lock_guard lock(mutex_);
    traffic.received.waited_seconds = std::chrono::duration<double>(waited_).count();
    return traffic;
  }

 private:
  struct Left {
    Storages kept;
    Refresh refresh;  // ends first: it may have pages pinned
  };

  /// A step of the oldest refresh, without the lock. A RankError stays.
  void step(std::unique_lock<std::mutex>& lock, bool waits_for_memory) {
    Refresh& refresh = left_.front()->refresh;
    is_busy_ = true;
    Storages done;
    struct Idle {
      Queue& queue;
      std::unique_lock<std::mutex>& lock;
      ~Idle() {
        if (!lock.owns_lock()) lock.lock();
        queue.is_busy_ = false;
        queue.changed_.notify_all();
      }
    };
    {
      const Idle idle{*this, lock};
      lock.unlock();
      bool moved = false;
      try {
        moved = refresh.step(waits_for_memory);
      } catch (const RankError&) {
        lock.lock();
        error_ = std::current_exception();
        throw;
      }
      lock.lock();
      is_stuck_ = !moved;
      needs_program_ = false;
      if (refresh.is_done()) {
        done = std::move(left_.front()->kept);
        left_.pop_front();
        ++done_;
      }
    }
    // A tensor must not die on the thread: its destructor may wait for a lock that the program holds while it waits.
    std::erase_if(done, [](const auto& storage) { return storage.use_count() > 1; });
    if (!done.empty()) dropped_.push_back(std::move(done));
  }

  const std::shared_ptr<Collectives> ranks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const std::uint64_t process_ = process_generation();
  std::deque<std::unique_ptr<Left>> left_;
  std::vector<Storages> dropped_;  // whose last owner was the thread; the program lets go of them
  std::uint64_t added_ = 0, done_ = 0;
  bool is_busy_ = false;        // a thread is in a step
  bool is_stuck_ = false;       // the last step of the thread found no memory, or failed
  bool needs_program_ = false;  // it failed
  bool stops_ = false;
  std::exception_ptr error_;  // of the network: nothing comes any more
  Clock::duration waited_{};
};

/// Tensors on their way.
class Refresher::Coming final : public Pending {
 public:
  Coming(std::shared_ptr<Queue> queue, std::uint64_t number) : queue_(std::move(queue)), number_(number) {}
  void complete() override {
    const Booking booking(Spent::gather);
    queue_->bring(number_);
  }
  bool add_to(StorageSegment&, const StorageSegment&) override { return false; }

 private:
  const std::shared_ptr<Queue> queue_;
  const std::uint64_t number_;
};

Refresher::Refresher(std::shared_ptr<Collectives> ranks)
    : queue_(std::make_shared<Queue>(std::move(ranks))), thread_([queue = queue_] { queue->work(); }) {}

Refresher::~Refresher() {
  queue_->stop();
  if (!thread_.joinable()) return;
  // A forked child has no such thread.
  queue_->is_in_child() || thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

void Refresher::start(Storages storages) {
  for (const Storages& together : in_refreshes(std::move(storages))) {
    const auto segments = segments_of(together);
    const auto coming = std::make_shared<Coming>(queue_, queue_->add(together));
    for (StorageSegment* segment : segments) segment->will_come(coming);
  }
}

void Refresher::finish() noexcept {
  try {
    queue_->bring(queue_->added());
  } catch (const std::exception&) {  // nothing waits for it any more
  }
  queue_->clear();
}

Traffic Refresher::traffic() const { return queue_->traffic(); }

}  // namespace zeropage
