#include "zeropage/pager/homes/sharded_home.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/io/buffers.h"
#include "zeropage/pager/lower_segment.h"

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
  std::size_t packed_bytes;      // for small tensors, of all ranks
  std::uint64_t program_writes;  // when it was asked for
  Among among = Among::all;
  Coding coding = Coding::none;                      // of a gather among all
  std::shared_ptr<Segment> secondary = nullptr;      // of a gather among a node's ranks
  std::optional<std::uint64_t> secondary_changes{};  // when it was asked for; none: the page is not kept
  std::size_t part_bytes = 0;                        // for a large tensor, or among a node's ranks: of one rank
  std::size_t part_offset = 0;
  PagePin part = {};                             // for a large tensor
  Buffer before = nullptr;                       // instead, if a version of the share is open
  HomeRead read_before = {};                     // into it
  std::shared_ptr<std::byte> packed{}, parts{};  // for small ones: this rank's, all ranks'
  std::unique_ptr<Ranks::Work> work = nullptr;
  std::exception_ptr failure = nullptr;
  DeviceMemory::Event completed = nullptr;  // in the stream that completed it
};

static Subject subject_of(const auto& gather) {
  return {name_of(gather.run.role), gather.run.number, gather.page, gather.program_writes};
}

/// The bytes of the page's content.
static std::size_t content_of(const auto& gather) { return gather.run.packed() ? gather.packed_bytes : gather.bytes; }

static Coding coding_of(const auto& gather) { return gather.among == Among::all ? gather.coding : Coding::none; }

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
  auto gather = std::make_shared<Gather>(
      Gather{run, page, into, run.bytes_of(page), std::move(done), shares.packed_bytes(), run.program_writes.load()});
  choose_ranks(*gather);
  // Keeps an error until a thread waits for the read: every rank must launch the collectives that all asked for.
  try {
    std::vector<PinRequest> requests;
    if (gather->among == Among::node) {
      if (gather->secondary) requests.push_back({gather->secondary.get(), Access::read});
    } else {
      for (const Share& share : shares) {
        if (share.segment) requests.push_back({share.segment, Access::read});
      }
    }
    local_.announce(requests);
    if (gather->among == Among::node) {
      hold_secondary_part(*gather);
    } else if (!run.packed()) {
      hold_part(*gather, shares.begin()->segment);
    }
  } catch (...) {
    gather->failure = std::current_exception();
  }
  asked_for_.push_back(std::move(gather));
  if (ranks_->gathers_apart()) launch_all();
  return std::nullopt;
}

/// The node's ranks, if they have kept the page, else all.
void ShardedHome::choose_ranks(Gather& gather) {
  const std::lock_guard lock(gathered_.mutex());
  const SecondaryPartition* const secondary = gather.run.secondary.get();
  gather.coding = gather.run.coding;
  if (secondary && secondary->has_page[gather.page]) {
    gather.among = Among::node;
    gather.secondary = secondary->share;
    gather.part_bytes = secondary_part(content_of(gather), static_cast<std::size_t>(ranks_->node_size()));
    return;
  }
  gather.part_bytes = gather.bytes / ranks_->size();
  // Another thread may have added a tensor to the page: then the page is not kept.
  if (secondary && gather.run.packed_bytes == gather.packed_bytes) gather.secondary_changes = secondary->changes;
}

void ShardedHome::hold_secondary_part(Gather& gather) {
  if (gather.secondary) {
    gather.part = pin_part(*gather.secondary, gather.page);
  } else {  // its tensors died here, and may live on other ranks
    gather.packed = ranks_->scratch(gather.part_bytes);
  }
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
PagePin ShardedHome::pin_part(Segment& share, std::size_t page, Access access) {
  while (true) {
    try {
      return local_.pin_page(share, page, access);
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
  const auto aside = memory_.device() ? memory_.device()->aside() : nullptr;
  // Orders this stream, which may not be the frame maker's, after the memory's earlier uses.
  if (memory_.device()) memory_.device()->reuse({g.into, g.run.bytes_of(g.page)});
  if (g.run.packed() && g.among == Among::all) return launch_packed(g);
  try {
    if (g.part) g.part.wait(), g.part.wait_for_uses();
    if (g.read_before) (void)g.read_before.wait();
  } catch (...) {
    g.failure = std::current_exception();
  }
  const bool is_coded = coding_of(g) != Coding::none;
  if (g.failure) {
    g.part = {}, g.before = nullptr;
    if (is_coded) {
      g.packed = nullptr;  // its absence tells all ranks
    } else {
      g.packed = ranks_->scratch(g.part_bytes);
      send_mark(g, g.part_bytes);
    }
  }
  if (g.run.packed()) g.parts = ranks_->scratch(g.part_bytes * ranks_->node_size());
  const std::byte* const part = g.packed   ? g.packed.get()
                                : g.part   ? g.part.data() + g.part_offset
                                : g.before ? g.before.get() + g.part_offset
                                           : nullptr;
  g.work = ranks_->all_gather(g.parts ? g.parts.get() : g.into, part, g.part_bytes, subject_of(g),
                              {g.among, coding_of(g)});
}

/// Launches a gather of small tensors over all ranks.
void ShardedHome::launch_packed(Gather& g) {
  g.part_bytes = g.packed_bytes / ranks_->size();
  g.packed = ranks_->scratch(g.part_bytes);
  g.parts = ranks_->scratch(g.packed_bytes);
  try {
    if (g.failure) std::rethrow_exception(g.failure);
    pack(g);
  } catch (...) {
    g.failure = std::current_exception();
    send_mark(g, g.part_bytes);
  }
  g.work = ranks_->all_gather(g.parts.get(), g.packed.get(), g.part_bytes, subject_of(g), {});
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

/// Writes what came into the frame.
void ShardedHome::deal_out(Gather& g) {
  const std::size_t ranks = ranks_->size(), bytes = g.packed_bytes / ranks;
  if (memory_.device()) memory_.device()->reuse({g.into, g.run.bytes});
  memory_.clear(g.into, g.run.bytes);
  if (g.among == Among::node) return memory_.copy(g.into, g.parts.get(), g.packed_bytes);
  for (const Share& share : SharesInUse(gathered_, g.run)) {
    if (share.offset >= g.packed_bytes) continue;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      memory_.copy(g.into + share.offset + rank * share.part_bytes,
                   g.parts.get() + rank * bytes + share.offset / ranks, share.part_bytes);
    }
  }
}

/// Keeps this rank's part of a page that came from all ranks, for the next gathers.
void ShardedHome::keep_secondary_part(Gather& g) {
  const auto ranks = static_cast<std::size_t>(ranks_->node_size()),
             rank = static_cast<std::size_t>(ranks_->rank_among(Among::node));
  const std::size_t content = content_of(g), part = secondary_part(content, ranks);
  const std::size_t begin = std::min(rank * part, content), bytes = std::min(part, content - begin);
  try {
    if (const auto share = secondary_share_of(g.run)) {
      PagePin kept = pin_part(*share, g.page, Access::overwrite);
      kept.wait();
      if (bytes > 0) kept.fill(g.into + begin, bytes, 0);
    }
  } catch (...) {
    ranks_->fail("could not keep its part of a gathered tensor (secondary_partition)");
    throw;
  }
  const std::lock_guard lock(gathered_.mutex());
  SecondaryPartition& secondary = *g.run.secondary;
  if (secondary.changes == g.secondary_changes) secondary.has_page[g.page] = true;
}

/// The run's second share, made if there is none. Null if its tensors have died here.
std::shared_ptr<Segment> ShardedHome::secondary_share_of(const Run& run) {
  const auto find = [&]() -> std::pair<std::shared_ptr<Segment>, bool> {
    const std::lock_guard lock(gathered_.mutex());
    return {run.secondary->share, run.tensors > 0};
  };
  const auto [known, is_alive] = find();
  if (known || !is_alive) return known;
  const auto ranks = static_cast<std::size_t>(ranks_->node_size());
  auto made = std::make_shared<LowerSegment>();
  SegmentSpec spec{
      .bytes = secondary_part(run.bytes, ranks), .row_bytes = 0, .role = run.role, .tier = run.secondary->tier};
  spec.page_bytes = round_up(secondary_part(run.page_bytes, ranks), kBlockBytes);
  spec.alone = true;
  local_.bind(*made, spec);
  const std::lock_guard lock(gathered_.mutex());
  if (run.tensors > 0) run.secondary->share = made;
  return made;
}

/// Sends a mark instead of data. All ranks must know of the failure, or they would compute with wrong bytes.
void ShardedHome::send_mark(Gather& g, std::size_t bytes) {
  if (!memory_.device()) fill_with_mark(g.packed.get(), bytes);
  // If the host cannot read the gathered bytes, or the node alone gathers, ranks learn of the failure when they next
  // compare their calls.
  if (memory_.device() || g.among == Among::node) ranks_->fail("could not read its part of a gathered tensor");
}

/// Throws if another rank could not read its part.
void ShardedHome::check_parts(const Gather& g) const {
  if (memory_.device() || coding_of(g) != Coding::none) return;
  const std::byte* const parts = g.run.packed() ? g.parts.get() : g.into;
  const int first = g.among == Among::all ? 0 : ranks_->rank() - ranks_->rank_among(g.among);
  for (int i = 0; i < ranks_->size_among(g.among); ++i) {
    if (!begins_with_mark(parts + i * g.part_bytes, g.part_bytes)) continue;
    throw RankError(fmt::format("rank {} could not read its part of {} {}, page {}; its own error says why",
                                first + i, name_of(g.run.role), g.run.number, g.page));
  }
}

/// Waits for the collective and releases its buffers and pin.
void ShardedHome::complete(Gather& g) {
  try {
    if (g.work) g.work->wait();
    if (g.work && !g.failure) check_parts(g);
    release_part(g);  // what follows may need memory, and look for gathers that hold some
    if (!g.failure && g.run.packed()) deal_out(g);
    if (!g.failure && g.secondary_changes) keep_secondary_part(g);
    g.completed = memory_.record();
  } catch (...) {
    if (!g.failure) g.failure = std::current_exception();
  }
  release_part(g);
  g.parts.reset();
}

void ShardedHome::release_part(Gather& g) {
  g.work.reset();
  g.part = {}, g.before = nullptr;
  g.packed.reset(), g.secondary.reset();
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
  {
    const std::lock_guard inside(gathered_.mutex());
    run.outdate_secondary();
  }
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
