#include "zeropage/pager/homes/sharded_home.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/io/buffers.h"

namespace zeropage {
namespace {

/// The place of this rank's part of a page in the segment of its share.
struct Place {
  std::size_t page;    // of the share's segment.
  std::size_t offset;  // in that page.
  std::size_t bytes;
  bool all;  // the part fills that page
};

/// The bytes a rank sends for a part that it could not read: NaN in every format, and unlike any real content.
constexpr std::size_t kMarkBytes = 64;
const std::array<std::byte, kMarkBytes>& mark_of_failure() {
  static const auto mark = [] {
    std::array<std::byte, kMarkBytes> bytes;
    std::uint32_t word = 0x5eed;
    for (std::size_t i = 0; i < kMarkBytes; i += 2) {  // 16-bit words 0xff81 to 0xffff: NaN in 2, 4 and 8 bytes
      word = word * 1664525 + 1013904223;
      bytes[i] = static_cast<std::byte>(0x81 + (word >> 16) % 0x7f);
      bytes[i + 1] = std::byte{0xff};
    }
    return bytes;
  }();
  return mark;
}

void fill_with_mark(std::byte* at, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kMarkBytes) {
    std::memcpy(at + i, mark_of_failure().data(), std::min(kMarkBytes, bytes - i));
  }
}

bool begins_with_mark(const std::byte* at, std::size_t bytes) {
  return bytes >= kMarkBytes && std::memcmp(at, mark_of_failure().data(), kMarkBytes) == 0;
}

Place place_of(const Segment& share, std::size_t offset, std::size_t bytes) {
  const std::size_t page = offset / std::max<std::size_t>(share.page_bytes(), 1);
  return {page, offset - page * share.page_bytes(), bytes, bytes == share.bytes_of(page)};
}

}  // namespace

struct ShardedHome::Gather {
  const Run& run;
  std::size_t page;
  std::byte* into;
  std::size_t bytes;
  Done done;
  std::size_t part_bytes;    // for a large tensor, of one rank
  std::size_t packed_bytes;  // for small tensors, of all ranks
  std::size_t part_offset = 0;
  PagePin part = {};                             // for a large tensor
  Buffer before = nullptr;                       // instead, if a version of the share is open
  HomeRead read_before = {};                     // into it
  std::shared_ptr<std::byte> packed{}, parts{};  // for small ones: this rank's, all ranks'
  std::unique_ptr<Ranks::Work> work = nullptr;
  std::exception_ptr failure = nullptr;
  DeviceMemory::Event completed = nullptr;  // in the stream that completed it
};

SharesInUse::SharesInUse(Monitor& monitor, const Run& run) : monitor_(monitor), run_(run) {
  std::lock_guard lock(monitor_.mutex());
  shares_ = run.shares;
  packed_bytes_ = run.packed_bytes;
  for (std::size_t i = 0; i < shares_.size(); ++i) run.shares[i].users += shares_[i].segment != nullptr;
}

SharesInUse::~SharesInUse() {
  std::lock_guard lock(monitor_.mutex());
  for (std::size_t i = 0; i < shares_.size(); ++i) run_.shares[i].users -= shares_[i].segment != nullptr;
  monitor_.changed().notify_all();
}

ShardedHome::ShardedHome(Monitor& gathered, FrameCache& local, std::shared_ptr<Ranks> ranks,
                         const FrameMemory& memory)
    : gathered_(gathered), local_(local), ranks_(std::move(ranks)), memory_(memory) {}

ShardedHome::~ShardedHome() = default;

std::optional<Home::Outcome> ShardedHome::read(const Run& run, std::size_t page, std::byte* into, Priority,
                                               Done done) {
  std::lock_guard lock(mutex_);
  const SharesInUse shares(gathered_, run);
  auto gather = std::make_shared<Gather>(Gather{run, page, into, run.bytes_of(page), std::move(done),
                                                run.bytes_of(page) / ranks_->size(), shares.packed_bytes()});
  // Keeps an error until a thread waits for the read: every rank must launch the collectives that all asked for.
  try {
    std::vector<PinRequest> requests;
    for (const Share& share : shares) {
      if (share.segment) requests.push_back({share.segment, Access::read});
    }
    local_.announce(requests);
    if (!run.packed()) hold_part(*gather, shares.begin()->segment);
  } catch (...) {
    gather->failure = std::current_exception();
  }
  asked_for_.push_back(std::move(gather));
  if (ranks_->gathers_apart()) launch_all();
  return std::nullopt;
}

void ShardedHome::hold_part(Gather& gather, Segment* share) {
  if (!share) {  // it died here, and may live on other ranks
    gather.packed = ranks_->scratch(gather.part_bytes);
    return;
  }
  const Place place = place_of(*share, gather.page * (gather.run.page_bytes / ranks_->size()), gather.part_bytes);
  gather.part_offset = place.offset;
  while (true) {
    // The other ranks may have no version open. All send what the parameter is until the step.
    gather.before = nullptr;
    if (local_.has_version(*share)) {
      const std::size_t begin = round_down(place.offset, kBlockBytes);
      const std::size_t bytes = round_up(place.offset + gather.part_bytes, kBlockBytes) - begin;
      gather.before = make_buffer(bytes);
      gather.part_offset = place.offset - begin;
      gather.read_before = local_.read_before_version(*share, place.page, begin, bytes, gather.before.get());
      if (gather.read_before) return;
      gather.before = nullptr, gather.part_offset = place.offset;
    }
    try {
      gather.part = pin_part(*share, place.page);
      return;
    } catch (const VersionOpen&) {  // opened since
    }
  }
}

/// Pins a page of a share. If this rank is short of memory, completes the oldest gathers to free what they hold. The
/// cache learns of their end when it waits for them, as on the other ranks.
PagePin ShardedHome::pin_part(Segment& share, std::size_t page) {
  while (true) {
    try {
      return local_.pin_page(share, page, Access::read);
    } catch (const BudgetError&) {
      const auto holds = [](const auto& gather) { return gather->work != nullptr; };
      auto oldest = std::find_if(in_flight_.begin(), in_flight_.end(), holds);
      if (oldest == in_flight_.end()) {
        if (asked_for_.empty() || launching_) throw;
        launch_all();
        continue;
      }
      complete(**oldest);
    }
  }
}

/// Launches the gathers that all ranks asked for, including those for which this rank has no data: other ranks wait.
void ShardedHome::launch_all() {
  struct Launching {
    bool& flag;
    explicit Launching(bool& f) : flag(f) { flag = true; }
    ~Launching() { flag = false; }
  } launching(launching_);
  while (!asked_for_.empty()) {
    const auto next = std::move(asked_for_.front());
    asked_for_.pop_front();
    try {
      launch(*next);
    } catch (...) {
      if (!next->failure) next->failure = std::current_exception();
    }
    in_flight_.push_back(next);
  }
}

void ShardedHome::launch(Gather& g) {
  const Subject subject{name_of(g.run.role), g.run.number, g.page};
  const auto aside = memory_.device() ? memory_.device()->aside() : nullptr;
  // Orders this stream, which may not be the frame maker's, after the memory's earlier uses.
  if (memory_.device()) memory_.device()->reuse({g.into, g.run.bytes_of(g.page)});
  if (g.run.packed()) {
    g.packed = ranks_->scratch(g.packed_bytes / ranks_->size());
    g.parts = ranks_->scratch(g.packed_bytes);
    try {
      if (g.failure) std::rethrow_exception(g.failure);
      pack(g);
    } catch (...) {
      g.failure = std::current_exception();
      send_mark(g, g.packed_bytes / ranks_->size());
    }
    g.work = ranks_->all_gather(g.parts.get(), g.packed.get(), g.packed_bytes / ranks_->size(), subject);
    return;
  }
  try {
    if (g.part) g.part.wait(), g.part.wait_for_uses();
    if (g.read_before) (void)g.read_before.wait();
  } catch (...) {
    g.failure = std::current_exception();
  }
  if (g.failure) {
    g.part = {}, g.before = nullptr, g.packed = ranks_->scratch(g.part_bytes);
    send_mark(g, g.part_bytes);
  }
  const std::byte* const part = g.packed ? g.packed.get() : (g.part ? g.part.data() : g.before.get()) + g.part_offset;
  g.work = ranks_->all_gather(g.into, part, g.part_bytes, subject);
}

/// Packs this rank's parts of all tensors of the page. Dead tensors keep their slots: ranks need not agree on when
/// they died.
void ShardedHome::pack(Gather& g) {
  for (const Share& share : SharesInUse(gathered_, g.run)) {
    if (!share.segment || share.offset >= g.packed_bytes) continue;
    PagePin part = pin_part(*share.segment, 0);
    part.wait(), part.wait_for_uses();
    memory_.copy(g.packed.get() + share.offset / ranks_->size(), part.data(), share.part_bytes);
  }
}

void ShardedHome::deal_out(Gather& g) {
  const std::size_t ranks = ranks_->size(), bytes = g.packed_bytes / ranks;
  if (memory_.device()) memory_.device()->reuse({g.into, g.run.bytes});
  memory_.clear(g.into, g.run.bytes);
  for (const Share& share : SharesInUse(gathered_, g.run)) {
    if (share.offset >= g.packed_bytes) continue;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      memory_.copy(g.into + share.offset + rank * share.part_bytes,
                   g.parts.get() + rank * bytes + share.offset / ranks, share.part_bytes);
    }
  }
}

/// Sends a mark instead of data. All ranks must know of the failure, or they would compute with wrong bytes.
void ShardedHome::send_mark(Gather& g, std::size_t bytes) {
  // If the host cannot read the gathered bytes, ranks learn of the failure when they next compare their calls.
  memory_.device() ? ranks_->fail("could not read its part of a gathered tensor")
                   : fill_with_mark(g.packed.get(), bytes);
}

/// Throws if another rank could not read its part.
void ShardedHome::check_parts(const Gather& g) const {
  if (memory_.device()) return;
  const std::byte* const parts = g.run.packed() ? g.parts.get() : g.into;
  const std::size_t bytes = g.run.packed() ? g.packed_bytes / ranks_->size() : g.part_bytes;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    if (!begins_with_mark(parts + rank * bytes, bytes)) continue;
    throw RankError(fmt::format("rank {} could not read its part of {} {}, page {}; its own error says why", rank,
                                name_of(g.run.role), g.run.number, g.page));
  }
}

/// Waits for the collective and releases its buffers and pin.
void ShardedHome::complete(Gather& g) {
  try {
    if (g.work) g.work->wait();
    if (g.work && !g.failure) check_parts(g);
    if (!g.failure && g.run.packed()) deal_out(g);
    g.completed = memory_.record();
  } catch (...) {
    if (!g.failure) g.failure = std::current_exception();
  }
  g.work.reset();
  g.part = {}, g.before = nullptr;
  g.packed.reset(), g.parts.reset();
}

void ShardedHome::hurry(const Run& run, std::size_t page, std::span<std::byte>) {
  std::lock_guard lock(mutex_);
  launch_all();
  const auto wanted = std::find_if(in_flight_.begin(), in_flight_.end(),
                                   [&](const auto& g) { return &g->run == &run && g->page == page; });
  if (wanted == in_flight_.end()) return;
  const auto gather = std::move(*wanted);
  in_flight_.erase(wanted);
  if (gather->work || gather->part || gather->before) complete(*gather);
  DeviceMemory::Event ready;
  try {
    // For lack of memory it may have been completed aside, while another one was launched.
    if (memory_.device()) memory_.device()->stream_wait(gather->completed);
    if (!gather->failure) ready = memory_.record();
  } catch (...) {
    gather->failure = std::current_exception();
  }
  std::exchange(gather->done, nullptr)({gather->failure, ready});
}

std::optional<Home::Outcome> ShardedHome::write(const Run& run, std::size_t page, const std::byte* from,
                                                const DeviceMemory::Event& after, Priority, Done) {
  if (memory_.device()) memory_.device()->stream_wait(after);
  const std::size_t ranks = ranks_->size(), rank = ranks_->rank();
  for (const Share& share : SharesInUse(gathered_, run)) {
    if (!share.segment) continue;
    const std::size_t bytes = run.packed() ? share.part_bytes : run.bytes_of(page) / ranks;
    const Place place = place_of(*share.segment, run.packed() ? 0 : page * (run.page_bytes / ranks), bytes);
    PagePin part = local_.pin_page(*share.segment, place.page, place.all ? Access::overwrite : Access::write);
    part.wait();
    part.fill(from + share.offset + rank * bytes, bytes, place.offset);
  }
  return Outcome{};
}

}  // namespace zeropage
