#include "zeropage/checkpoint/snapshot.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <system_error>
#include <thread>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/checkpoint/segment_parts.h"

namespace zeropage {
namespace {

at::Tensor copy_of_bytes(StorageSegment& home) {
  const at::Tensor copy = at::empty(static_cast<std::int64_t>(home.bytes()), c10::kByte);
  auto* into = static_cast<std::byte*>(copy.mutable_data_ptr());
  for (std::size_t i = 0; i < home.pages(); ++i) {
    const PagePin page = pin_page(home, i, Access::read);
    const std::size_t bytes = home.bytes_of(i);
    bytes_at(into, bytes, c10::kCPU).copy_(bytes_at(page.data(), bytes, home.domain()->device));
    into += bytes;
  }
  return copy;
}

constexpr std::size_t kCopied = 16 * kKiB;  // tensors up to this size are copied
constexpr std::size_t kAhead = 3;           // pages
constexpr int kNice = 19;
constexpr auto kPatience = std::chrono::seconds(2);

/// Runs work on a thread that yields to the program's, and waits for it. Training's threads meet at barriers: if one
/// of them lacks a core for a moment, all lose that time. The caller keeps the usual priority, because it takes locks
/// that the program waits for.
void run_yielding(const std::function<void()>& work) {
  std::future<void> ended;
  try {
    ended = std::async(std::launch::async, [&] {
      (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
      work();
    });
  } catch (const std::system_error&) {  // no more threads
    return work();
  }
  ended.get();
}

}  // namespace

struct Snapshot::Entry {
  at::Tensor tensor;                  // to be saved; kept alive
  StorageSegment* segment = nullptr;  // null: it is not paged
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::vector<Part> parts;            // in order
  std::size_t page_bytes = 0;         // of every page except the last
  at::Tensor copy;                    // of the tensor's or segment's bytes; undefined: it is frozen
  FrozenSegment frozen;               // destroyed before the tensor
  bool waits = false;                 // for deferred updates
  std::shared_ptr<FrameCache> cache;  // of the tensor: kept alive for its Io, which writes
  std::vector<Piece> pieces;
};

struct Snapshot::Content {
  std::vector<Part> parts;
  std::size_t page_bytes = 0;
  at::Tensor copy;
  FrozenSegment frozen;
};

/// The snapshot's callback in a segment.
class Snapshot::Relay final : public Awaiter {
 public:
  explicit Relay(std::weak_ptr<Snapshot> snapshot) : snapshot_(std::move(snapshot)) {}
  void has_run(StorageSegment& segment, std::exception_ptr failure) noexcept override {
    if (const auto snapshot = snapshot_.lock()) snapshot->has_run(segment, std::move(failure));
  }

 private:
  const std::weak_ptr<Snapshot> snapshot_;
};

/// The files to write. Few are open at once, because each has buffers.
class Snapshot::Files {
 public:
  explicit Files(const std::vector<std::string>& paths) : paths_(paths) {}

  FileWriter& writer(std::size_t file, Io* io) {
    const auto open = std::ranges::find_if(open_, [&](const auto& one) { return one && one->index == file; });
    if (open != open_.end()) return std::rotate(open_.begin(), open, open + 1), open_.front()->writer;
    if (open_.back()) open_.back()->writer.flush();
    std::rotate(open_.begin(), open_.end() - 1, open_.end());
    open_.front() = nullptr;
    open_.front() = std::make_unique<Open>(file, paths_[file], io ? *io : own_io());
    return open_.front()->writer;
  }

  void finish() {
    for (auto& one : open_) {
      if (one) one->writer.flush();
      one = nullptr;
    }
    for (const std::string& path : paths_) File::open(path, /*writable=*/true).sync();
  }

 private:
  struct Open {
    Open(std::size_t i, const std::string& path, Io& io)
        : index(i), file(File::open(path, /*writable=*/true)), writer(io, file, Priority::background, run_yielding) {}
    const std::size_t index;
    const File file;
    FileWriter writer;
  };

  /// For tensors that have no disk.
  Io& own_io() {
    if (!io_) io_ = make_io();
    return *io_;
  }

  const std::vector<std::string>& paths_;
  std::unique_ptr<Io> io_;
  std::array<std::unique_ptr<Open>, 2> open_;  // the latest used first
};

Snapshot::Snapshot() = default;
Snapshot::~Snapshot() = default;

std::shared_ptr<Snapshot> Snapshot::take(const std::vector<Item>& items) {
  c10::NoGradGuard no_grad;
  const TakesCheckpoint alone;
  const std::shared_ptr<Snapshot> snapshot(new Snapshot());
  for (const Item& item : items) snapshot->add(item);
  return snapshot;
}

void Snapshot::add(const Item& item) {
  Entry& entry = *entries_.emplace_back(std::make_unique<Entry>());
  entry.tensor = item.tensor.detach();
  entry.file = item.file;
  entry.offset = item.offset;
  if (!segment_of(entry.tensor)) {
    entry.copy =
        entry.tensor.resolve_conj().resolve_neg().contiguous().to(c10::kCPU, /*non_blocking=*/false, /*copy=*/true);
    for (std::uint64_t at = 0; at < entry.copy.nbytes(); at += kPieceBytes) {
      entry.parts.push_back({at, 0, at, std::min<std::size_t>(kPieceBytes, entry.copy.nbytes() - at)});
    }
    ready_.push_back(&entry);
    return;
  }
  const auto is_known = [&](const auto& other) { return other && other->segment == segment_of(entry.tensor); };
  if (!is_in_order(entry.tensor) || std::ranges::any_of(entries_, is_known)) {
    const at::Tensor other = entry.tensor;
    entry.tensor = in_between(other, other.scalar_type());
    entry.tensor.copy_(other);
  }
  StorageSegment& segment = *(entry.segment = segment_of(entry.tensor));
  segment.find_home();  // fails now if there is no room for the assembled tensor
  entry.cache = segment.at_home().cache();
  const c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const bool over_ranks = segment.domain()->partition.ranks != nullptr;
  const bool shares_page = !segment.at_home().cache()->can_freeze(segment.at_home());
  if (over_ranks || shares_page || entry.tensor.nbytes() <= kCopied) segment.complete();
  if (over_ranks && segment.is_partitioned()) segment.open_share(Access::read);
  if (!is_ours_to_write(segment)) {
    entries_.back() = nullptr;
    return;
  }
  std::unique_lock lock(mutex_);
  ++waiting_;
  entry.waits = true;
  lock.unlock();
  if (segment.await_deferred(std::make_shared<Relay>(weak_from_this()))) return;
  has_run(segment, nullptr);
  if (failure_) std::rethrow_exception(failure_);
}

/// Freezes an entry whose segment has no deferred updates left, or fails the snapshot. Does nothing on a repeated
/// call.
void Snapshot::has_run(const StorageSegment& segment, std::exception_ptr failure) noexcept {
  const auto is_it = [&](const auto& entry) { return entry && entry->segment == &segment && entry->waits; };
  std::unique_lock lock(mutex_);
  const auto found = std::ranges::find_if(entries_, is_it);
  if (found == entries_.end()) return;
  Entry& entry = **found;
  entry.waits = false;
  const at::Tensor tensor = entry.tensor;  // give_up() may take it meanwhile
  lock.unlock();
  Content content;
  try {
    if (!failure) content = freeze(*entry.segment, tensor);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (given_up_) return;
  if (failure && !failure_) failure_ = std::move(failure);
  --waiting_;
  entry.parts = std::move(content.parts);
  entry.page_bytes = content.page_bytes;
  entry.copy = std::move(content.copy);
  entry.frozen = std::move(content.frozen);
  try {
    ready_.push_back(&entry);
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  changed_.notify_all();
}

Snapshot::Content Snapshot::freeze(StorageSegment& segment, const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  StorageSegment& home = segment.at_home();
  Content content{parts_of(segment, home, item_bytes_of(tensor)), home.page_bytes(), {}, {}};
  if (!home.cache()->can_freeze(home) || home.bytes() <= kCopied) {
    content.copy = copy_of_bytes(home);
    return content;
  }
  while (true) {
    try {
      content.frozen = home.cache()->freeze(home);
      return content;
    } catch (const VersionOpen&) {
      segment.settle();
    }
  }
}

std::vector<std::vector<Piece>> Snapshot::write(const std::vector<std::string>& paths) try {
  const Unbooked on_a_thread_of_its_own;
  c10::NoGradGuard no_grad;
  Files files(paths);
  while (true) {
    if (Entry* const entry = take_ready()) {
      write_frames(*entry, files);
    } else if (!unwritten_.empty()) {
      Entry& next = *unwritten_.front();
      unwritten_.pop_front();
      write_homes(next, files);
    } else if (!wait_for_ready()) {
      break;
    }
  }
  files.finish();
  std::vector<std::vector<Piece>> pieces;
  for (const auto& entry : entries_) pieces.push_back(entry ? std::move(entry->pieces) : std::vector<Piece>());
  give_up();
  return pieces;
} catch (...) {
  give_up();
  throw;
}

Snapshot::Entry* Snapshot::take_ready() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (ready_.empty()) return nullptr;
  Entry* const entry = ready_.front();
  ready_.pop_front();
  return entry;
}

/// False: nothing is left to wait for.
bool Snapshot::wait_for_ready() {
  std::unique_lock lock(mutex_);
  if (ready_.empty() && waiting_ == 0) return false;
  // The program may never use the remaining tensors, or may wait for this thread. If so it seems, this thread runs
  // the deferred updates itself.
  is_patient_ = changed_.wait_for(lock, is_patient_ ? kPatience : kPatience / 1000,
                                  [&] { return !ready_.empty() || failure_; });
  lock.unlock();
  try {
    if (!is_patient_) complete(/*wait=*/false);
  } catch (const BudgetError&) {
    is_patient_ = true;  // the program holds the memory
  }
  return true;
}

void Snapshot::complete() { complete(/*wait=*/true); }

/// Without `wait`, handles one entry at most, and none while the program runs deferred updates itself.
void Snapshot::complete(bool wait) {
  for (const auto& entry : entries_) {
    at::Tensor tensor;  // give_up() of another thread may drop the entry's
    {
      const std::lock_guard lock(mutex_);
      if (!entry || !entry->waits) continue;
      tensor = entry->tensor;
    }
    const auto domain = entry->segment->domain();  // outlives the lock of its mutex
    std::unique_lock deferral(domain->deferral_mutex, std::defer_lock);
    if (wait) {
      deferral.lock();
    } else if (!deferral.try_lock()) {
      return;
    }
    entry->segment->complete();
    has_run(*entry->segment, nullptr);  // no effect if it was called already
    if (!wait) return;
  }
}

void Snapshot::write_part_of(Entry& entry, std::size_t page, const std::byte* data, Files& files) {
  FileWriter& writer = files.writer(entry.file, entry.cache ? entry.cache->io() : nullptr);
  for (auto part = std::ranges::lower_bound(entry.parts, page, {}, &Part::page);
       part != entry.parts.end() && part->page == page; ++part) {
    const std::uint32_t crc = writer.write(entry.offset + part->begin, {data + part->in_page, part->bytes});
    entry.pieces.push_back({part->begin, part->bytes, crc});
    written_ += part->bytes;
  }
}

/// Writes frames first, since operators cannot write those pages until they are copied.
void Snapshot::write_frames(Entry& entry, Files& files) {
  if (entry.copy.defined()) {
    const auto* data = static_cast<const std::byte*>(entry.copy.const_data_ptr());
    const std::size_t pages = entry.parts.empty() ? 0 : entry.parts.back().page + 1;
    for (std::size_t i = 0; i < pages; ++i) write_part_of(entry, i, data + i * entry.page_bytes, files);
    entry.copy.reset();
    entry.tensor.reset();
    return;
  }
  bool any_at_home = false;
  for (std::size_t i = 0; i < entry.frozen.pages(); ++i) {
    const Frozen::Place place = entry.frozen.place(i);
    if (place == Frozen::Place::nowhere) {
      const at::Tensor zeros = at::zeros(static_cast<std::int64_t>(entry.frozen.bytes_of(i)), c10::kByte);
      write_part_of(entry, i, static_cast<const std::byte*>(zeros.const_data_ptr()), files);
    } else if (place == Frozen::Place::home || !write_frame(entry, i, files)) {
      any_at_home = true;
    }
  }
  if (any_at_home) {
    unwritten_.push_back(&entry);
  } else {
    entry.frozen = {};
    entry.tensor.reset();
  }
}

/// False: the page was written home meanwhile.
bool Snapshot::write_frame(Entry& entry, std::size_t page, Files& files) {
  PagePin pin;
  while (!(pin = entry.frozen.try_pin(page))) {
    if (entry.frozen.place(page) == Frozen::Place::home) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until the page's loan ends
  }
  const std::size_t bytes = entry.frozen.bytes_of(page);
  const at::Tensor copy = at::empty(static_cast<std::int64_t>(bytes), c10::kByte);
  auto* const into = static_cast<std::byte*>(copy.mutable_data_ptr());
  // Until the copy ends, operators wait for the page. They do not wait for the file.
  if (!entry.frozen.begin_copy(page)) return false;
  if (entry.frozen.is_on_device()) {
    bytes_at(into, bytes, c10::kCPU).copy_(bytes_at(pin.data(), bytes, entry.tensor.device()));
  } else {
    std::memcpy(into, pin.data(), bytes);
  }
  entry.frozen.end_copy(page);
  pin = {};
  write_part_of(entry, page, into, files);
  return true;
}

/// Reads some pages ahead of the one being written.
void Snapshot::write_homes(Entry& entry, Files& files) {
  struct Ahead {
    std::size_t page;
    Buffer memory;  // outlives the read
    HomeRead read;
  };
  std::deque<Ahead> ahead;
  std::vector<Buffer> free;
  const auto write_oldest = [&] {
    Ahead oldest = std::move(ahead.front());
    ahead.pop_front();
    if (!oldest.read.wait()) throw AccessError("the frozen pages of a checkpoint on disk have changed");
    write_part_of(entry, oldest.page, oldest.memory.get(), files);
    free.push_back(std::move(oldest.memory));
  };
  for (std::size_t i = 0; i < entry.frozen.pages(); ++i) {
    if (entry.frozen.place(i) != Frozen::Place::home) continue;
    while (Entry* const ready = take_ready()) write_frames(*ready, files);
    if (ahead.size() == kAhead) write_oldest();
    Buffer memory =
        free.empty() ? make_buffer(round_up(entry.frozen.bytes_of(0), kBlockBytes)) : std::move(free.back());
    if (!free.empty()) free.pop_back();
    ahead.push_back({i, std::move(memory), {}});
    ahead.back().read = entry.frozen.read(i, ahead.back().memory.get());
  }
  while (!ahead.empty()) write_oldest();
  entry.frozen = {};
  entry.tensor.reset();
}

void Snapshot::give_up() noexcept {
  std::vector<std::unique_ptr<Entry>> entries;  // die without the lock: destructors may come here
  const std::lock_guard lock(mutex_);
  given_up_ = true;
  ready_.clear();
  unwritten_.clear();
  waiting_ = 0;
  for (auto& entry : entries_) {
    if (!entry) continue;
    // Another thread may be in has_run() with the entry.
    const auto& kept = entries.emplace_back(std::make_unique<Entry>());
    std::swap(kept->tensor, entry->tensor);
    std::swap(kept->copy, entry->copy);
    std::swap(kept->frozen, entry->frozen);
    entry->waits = false;
  }
}

}  // namespace zeropage
