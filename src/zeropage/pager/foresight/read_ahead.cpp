#include "zeropage/pager/foresight/read_ahead.h"

#include <algorithm>

#include "zeropage/base/units.h"
#include "zeropage/pager/cache/gate.h"

namespace zeropage {
namespace {

constexpr std::int64_t kUsesAhead = 24;  // in which changes() looks

constexpr std::size_t kMostAhead = 64 * kMiB;  // enough to keep a disk busy through one operator
constexpr std::size_t kIdle = 32 * kMiB;       // a home with fewer bytes in flight counts as idle
// Limits of would_be_late():
constexpr double kMargin = 1.5;
constexpr std::int64_t kMostUses = 512;
constexpr std::size_t kMostPages = 4096;
constexpr std::size_t kMostReads = 8;  // of a stream's member without progress

}  // namespace

/// [Note: how far ahead]
std::size_t ReadAhead::window() const {
  const std::size_t limit = memory_.budget().limit();
  const std::size_t missing = runs_.pageable_peak() > limit ? runs_.pageable_peak() - limit : 0;
  return std::min({kMostAhead, limit / 8, std::max(missing / 16, page_bytes_)});
}

/// [Note: in time]
bool ReadAhead::hurries() {
  if (frames_.is_gathered() || transfers_.reading_bytes() > kIdle) return false;  // time differs between ranks
  const std::uint64_t uses = timeline_.plan().uses();
  if (asked_at_ != uses || asked_of_ != group_) late_ = would_be_late();
  asked_at_ = uses, asked_of_ = group_;
  return late_;
}

bool ReadAhead::would_be_late() {
  const double rate = transfers_.read_rate();
  const auto next = timeline_.plan().coming(0);
  if (rate <= 0 || !next) return false;
  // No call may come before the next use begins.
  const double from = std::max(monitor_.worked_seconds() - timeline_.seconds(), next->seconds);
  const std::uint64_t uses = timeline_.plan().uses();
  const std::size_t limit = memory_.budget().limit();
  std::size_t missing = 0, looked_at = 0;  // bytes; pages
  ++scan_;
  const auto first = static_cast<std::int64_t>(std::max(group_, uses) - uses);
  for (std::int64_t k = first; k < first + kMostUses && looked_at < kMostPages; ++k) {
    const auto coming = timeline_.plan().coming(k);
    if (!coming || coming->time > timeline_.now() + limit || missing > limit) return false;
    Run* const run = runs_.at(coming->use.ordinal);
    if (!run || run->scan == scan_ || !may_bring(*run) || !reads(*run, coming->use.access)) continue;
    run->scan = scan_;
    looked_at += run->pages.size();
    for (std::size_t i = 0; i < run->pages.size(); ++i) {
      if (!run->pages[i].frame && run->pages[i].state == Residency::evicted) missing += run->bytes_of(i);
    }
    const double seconds = std::max(coming->seconds - from, 0.0);
    if (missing > 0 && kMargin * static_cast<double>(missing) > rate * seconds) return true;
  }
  return false;
}

void ReadAhead::restart() {
  group_ = 0;
  asked_of_ = ~std::uint64_t{0};
  members_.clear();
  kept_.clear();
  kept_bytes_ = 0;
  frames_.looked_ahead().reached = 0;
  frames_.looked_ahead().again = false;
}

void ReadAhead::run(Lock& lock) {
  if (running_ || monitor_.closed()) return;  // running: a read of ranks gave up the lock
  // A thread must get the error of a failed write before the cache starts another. Otherwise the cache would retry
  // the same write forever.
  if (transfers_.has_failed_write() && !frames_.is_gathered()) return;
  running_ = true;
  try {
    if (timeline_.plan().knows()) read_planned(lock);
    if (!streams_.empty() && !monitor_.closed()) read_streams(lock);
  } catch (...) {
    // The read starts again when it is demanded, and throws its error then.
  }
  running_ = false;
}

/// Starts the transfers that are due for the plan's next uses.
void ReadAhead::read_planned(Lock& lock) {
  const std::uint64_t uses = timeline_.plan().uses();
  while (!kept_.empty() && kept_.front().use < uses) {
    kept_bytes_ -= kept_.front().bytes;
    kept_.pop_front();
  }
  const std::size_t limit = memory_.budget().limit();
  const auto most = static_cast<std::int64_t>(window());
  bool all = false;  // all uses that come soon were looked at
  const auto latest = std::max(most, static_cast<std::int64_t>(most_ahead()));
  while (!monitor_.closed()) {
    const auto wanted = static_cast<std::int64_t>(frames_.ahead_bytes()) + std::max<std::int64_t>(kept_bytes_, 0);
    if (wanted >= most && (wanted >= latest || !hurries())) break;
    if (frames_.looked_ahead().again) restart();
    // Finishes the scan of the group that the program is in.
    if (group_ < timeline_.plan().latest_group()) group_ = timeline_.plan().latest_group(), members_.clear();
    auto next = target();
    all = !next || next->time > timeline_.now() + limit;
    if (all) break;
    // Within a group, times go up and down a little. A page read for one member must not leave for the next, or this
    // loop would not end.
    if (const auto reached = frames_.looked_ahead().reached) next->time = std::max(next->time, reached - 1);
    if (bring(*next, lock) == Result::blocked) break;
    frames_.looked_ahead().reached = next->time + 1;
    advance();
  }
  if (!all && !monitor_.closed() && runs_.pageable_peak() > limit)
    write_behind(static_cast<std::size_t>(most) / 2, lock);
}

void ReadAhead::open_stream(std::span<const PinRequest> requests) {
  std::vector<Streamed> stream;
  for (const PinRequest& request : requests) {
    Run& run = *request.segment->run();
    if (run.stream_lasts) close_stream(run);
    if (run.home && !run.shares_page() && !run.dead) stream.push_back({&run, request.access});
  }
  if (stream.empty()) return;
  streams_.push_back(std::move(stream));
  for (const Streamed& member : streams_.back()) {
    member.run->stream_lasts = true, member.run->lasting_page = 0;
    frames_.plan_anew(*member.run);
  }
}

void ReadAhead::close_stream(const Run& run) noexcept {
  for (auto& stream : streams_) {
    for (const Streamed& member : stream) {
      if (member.run == &run) member.run->stream_lasts = false;
    }
    std::erase_if(stream, [&](const Streamed& member) { return member.run == &run; });
  }
  std::erase_if(streams_, [](const auto& stream) { return stream.empty(); });
}

void ReadAhead::hurry_stream(const Run& run) noexcept {
  const auto has_run = [&](const auto& stream) {
    return std::ranges::any_of(stream, [&](const Streamed& member) { return member.run == &run; });
  };
  const auto found = std::ranges::find_if(streams_, has_run);
  if (found != streams_.end()) std::rotate(streams_.begin(), found, found + 1);
}

void ReadAhead::reach_in_stream(Run& run, std::size_t page, bool begun) noexcept {
  for (auto& stream : streams_) {
    for (Streamed& member : stream) {
      if (member.run != &run || page < run.lasting_page) continue;
      if (page > run.lasting_page) run.lasting_page = page, member.reads = 0, member.begun = false;
      member.begun |= begun;
    }
  }
}

/// [Note: lasting streams]
void ReadAhead::read_streams(Lock& lock) {
  std::size_t left = window();
  for (auto& stream : streams_) {
    // A window of all members needs a page of each, or two.
    std::size_t step = 0;
    for (const Streamed& member : stream) step += member.run->page_bytes;
    left = std::max(left, std::min(2 * step, memory_.budget().limit() / 4));
    if (read_stream(stream, left, lock) == Result::blocked) return;
  }
}

/// Reads pages of the stream that are used next, the members' in turns, and makes room for those without content.
/// `left`: bytes that may still be there unused.
ReadAhead::Result ReadAhead::read_stream(std::vector<Streamed>& stream, std::size_t& left, Lock& lock) {
  std::size_t steps = 1, first = ~std::size_t{0}, kept = 0;  // kept: bytes of frames that the walk makes
  for (const Streamed& member : stream) steps = std::max(steps, member.run->pages.size());
  for (const Streamed& member : stream) {
    const Run& run = *member.run;
    if (run.lasting_page < run.pages.size()) first = std::min(first, run.lasting_page * steps / run.pages.size());
  }
  for (std::size_t step = first; step < steps; ++step) {
    for (Streamed& member : stream) {
      Run& run = *member.run;
      const std::size_t pages = run.pages.size(), index = step * pages / steps;
      const bool is_new = step == first || index != (step - 1) * pages / steps;
      if (!is_new || index < run.lasting_page) continue;
      const Page& page = run.pages[index];
      // The walk may be in the middle of a page that it overwrites.
      const bool is_needed = reads(run, member.access) || (index == run.lasting_page && member.begun);
      const bool is_read = is_needed && page.state == Residency::evicted;
      if (!is_needed && index > run.lasting_page) continue;
      const std::size_t bytes = FrameMemory::bytes_of(run, index, 1);
      if (left < bytes) return Result::blocked;
      left -= bytes;
      const bool is_absent = page.state == Residency::evicted || page.state == Residency::zero;
      if (page.frame || !is_absent || !may_bring(run) || (!is_read && index > run.lasting_page)) continue;
      if (is_read) {
        if (transfers_.reading_bytes() > kIdle || !transfers_.ready_to_read(run, index)) return Result::blocked;
        // A read that fails begins again when it is demanded, and throws its error then.
        if (const auto group = timeline_.plan().latest_group(); member.group != group)
          member.group = group, member.reads = 0;
        if (member.reads > kMostReads + pages) return Result::blocked;
      }
      const AccessPlan::Time time = std::max<AccessPlan::Time>(timeline_.now(), frames_.looked_ahead().reached);
      const std::int64_t later = std::min<std::int64_t>(kept_bytes_, 0);  // as in read()
      if (make_room(static_cast<std::int64_t>(bytes + kept) - later, time, lock) == Result::blocked)
        return Result::blocked;
      if (!is_read) {
        kept += bytes;
        continue;
      }
      Frame* const frame = room_.try_make_frame(lock, run, index, 1, time);
      if (!frame) return Result::blocked;
      ++member.reads;
      transfers_.start_reads(lock, *frame, Priority::ahead);
      frames_.drop_pin(*frame);
    }
  }
  return Result::there;
}

bool ReadAhead::find_group() {
  const std::uint64_t uses = timeline_.plan().uses();
  steps_ = 1, step_ = 0, member_ = 0;
  for (auto k = static_cast<std::int64_t>(group_ - uses);; ++k) {
    const auto coming = timeline_.plan().coming(k);
    if (!coming || (!members_.empty() && (coming->use.begins || members_.size() == 64))) break;
    const Run* run = runs_.at(coming->use.ordinal);
    const std::size_t pages = run && !coming->use.whole ? run->pages.size() : 1;
    steps_ = std::max(steps_, pages);
    const std::size_t bytes = runs_.bytes_at(coming->use.ordinal);
    if (members_.empty()) begin_ = coming->time;
    end_ = coming->time + bytes;
    members_.push_back({coming->use, pages, bytes});
  }
  return !members_.empty();
}

/// The pages of all members take turns, so that all members end together.
std::optional<ReadAhead::Target> ReadAhead::target() {
  while (true) {
    if (members_.empty() && !find_group()) return std::nullopt;
    const Member& member = members_[member_];
    const std::size_t page = step_ * member.pages / steps_;
    const bool is_new = step_ == 0 || page != (step_ - 1) * member.pages / steps_;
    const Run* run = runs_.at(member.use.ordinal);
    if (is_new && (!run || page < run->pages.size())) {
      const std::size_t pages = member.use.whole && run ? run->pages.size() : 1;
      return Target{&member, page, pages, AccessPlan::time_of_page(begin_, end_, page, member.pages)};
    }
    advance();
  }
}

void ReadAhead::advance() {
  if (++member_ < members_.size()) return;
  member_ = 0;
  if (++step_ < steps_) return;
  // Members that die then free their room for later uses.
  std::int64_t dying = 0;
  for (const Member& member : members_) dying += member.use.last ? static_cast<std::int64_t>(member.bytes) : 0;
  if (dying > 0) keep_room(-dying);
  group_ += members_.size();
  members_.clear();
}

/// Whether its pages can be read now, and would still be current at their use.
bool ReadAhead::may_bring(const Run& run) const {
  return obstacle(run, Intent::prefetch) == Obstacle::none && !is_about_to_change(run);
}

/// Whether such a use needs the home content.
bool ReadAhead::reads(const Run& run, Access access) { return access != Access::overwrite || run.shares_page(); }

std::vector<Run*> ReadAhead::changes() const {
  std::vector<Run*> found;
  std::size_t bytes = 0;
  for (std::int64_t k = 0; k < kUsesAhead && bytes <= 2 * window(); ++k) {
    const auto coming = timeline_.plan().coming(k);
    if (!coming) break;
    Run* const run = runs_.at(coming->use.ordinal);
    if (run && run->expects_change) found.push_back(run);
    if (k > 0) bytes += runs_.bytes_at(coming->use.ordinal);  // the first is the next operator's own
  }
  return found;
}

/// Whether its content is about to change elsewhere, so that it would be gathered or uploaded again.
bool ReadAhead::is_about_to_change(const Run& run) const {
  if (run.expects_change) return true;
  if (!run.only) return false;
  return frames_.is_gathered() ? run.only->will_change() : run.only->will_change_below();
}

ReadAhead::Result ReadAhead::bring(const Target& target, Lock& lock) {
  const AccessPlan::Use use = target.member->use;
  Run* const run = runs_.at(use.ordinal);
  if (!run) {  // it will be created
    const std::size_t bytes = runs_.bytes_at(use.ordinal);
    if (make_room(bytes, target.time, lock) == Result::blocked) return Result::blocked;
    keep_room(bytes);
    return Result::there;
  }
  if (run->expects_change) return Result::blocked;  // changes() comes before
  if (!may_bring(*run)) return Result::there;
  const bool is_now = group_ < timeline_.plan().uses();
  if (is_now && (use.whole || target.first_page < run->stream_page)) return Result::there;  // already taken
  const auto first = run->pages.begin() + static_cast<std::ptrdiff_t>(target.first_page);
  const auto last = first + static_cast<std::ptrdiff_t>(target.pages);
  if (std::any_of(first, last, [](const Page& page) { return page.frame != nullptr; })) {
    if (target.pages == 1) return Result::there;
    // Some pages are in memory: read the others one by one.
    for (std::size_t i = 0; i < target.pages; ++i) {
      const Page& page = run->pages[target.first_page + i];
      if (page.frame || page.state != Residency::evicted || use.access == Access::overwrite) continue;
      if (read(*run, target.first_page + i, 1, target.time, lock) == Result::blocked) return Result::blocked;
    }
    return Result::there;
  }
  if (reads(*run, use.access) &&
      std::all_of(first, last, [](const Page& page) { return page.state == Residency::evicted; })) {
    return read(*run, target.first_page, target.pages, target.time, lock);
  }
  const std::size_t bytes = FrameMemory::bytes_of(*run, target.first_page, target.pages);
  if (make_room(bytes, target.time, lock) == Result::blocked) return Result::blocked;
  keep_room(bytes);
  return Result::there;
}

/// Keeps room until the group that is looked at has passed.
void ReadAhead::keep_room(std::int64_t bytes) {
  kept_.push_back({group_ + members_.size() - 1, bytes});
  kept_bytes_ += bytes;
}

ReadAhead::Result ReadAhead::read(Run& run, std::size_t first_page, std::size_t pages, AccessPlan::Time time,
                                  Lock& lock) {
  if (monitor_.closed()) return Result::blocked;
  for (std::size_t i = first_page; i < first_page + pages; ++i) {
    if (!transfers_.ready_to_read(run, i)) return Result::blocked;
  }
  // A read that starts now cannot use room that will be free later.
  const std::int64_t later = std::min<std::int64_t>(kept_bytes_, 0);
  if (make_room(FrameMemory::bytes_of(run, first_page, pages) - later, time, lock) == Result::blocked) {
    return Result::blocked;
  }
  Frame* const frame = room_.try_make_frame(lock, run, first_page, pages, time);
  if (!frame) return Result::blocked;
  frames_.set_ahead(*frame, time);
  transfers_.start_reads(lock, *frame, Priority::ahead);
  frames_.drop_pin(*frame);
  return Result::there;
}

/// Reads are waiting for the window: writes their victims home now, so that these can leave at once.
void ReadAhead::write_behind(std::size_t most, Lock& lock) {
  const std::size_t failed_before = transfers_.failed_writes();
  const auto free = [&] { return memory_.free_for(page_bytes_) + transfers_.writing_bytes(); };
  while (free() < most) {
    Frame* const victim = frames_.victims().first(2);
    if (!victim || victim->next_use <= frames_.looked_ahead().reached) return;
    const std::size_t lacking = most - free();
    const auto clean = [](const Frame& frame) { return !Frames::is_dirty(frame); };
    if (frames_.victims().bytes_before(*victim, timeline_.now(), lacking, clean) >= lacking) return;
    if (!transfers_.write_back(lock, *victim, Priority::behind) || transfers_.failed_writes() != failed_before)
      return;
  }
}

/// Frees `bytes` in addition to the kept room: evicts clean frames that are used later, and writes dirty ones.
ReadAhead::Result ReadAhead::make_room(std::size_t bytes, AccessPlan::Time time, Lock& lock) {
  const std::size_t failed_before = transfers_.failed_writes();
  const auto lacking = [&] {
    return static_cast<std::int64_t>(bytes + room_.demanded_bytes()) + kept_bytes_ -
           static_cast<std::int64_t>(memory_.free_for(page_bytes_));
  };
  while (lacking() > 0) {
    Frame* const victim = frames_.victims().best(timeline_.now(), time);
    if (!victim) return Result::blocked;
    if (!Frames::is_dirty(*victim)) {
      frames_.evict(*victim);
      continue;
    }
    // Enough writes are in flight to make the room, or to keep a disk busy.
    const auto writing = static_cast<std::int64_t>(transfers_.writing_bytes());
    if (writing >= std::max(lacking(), static_cast<std::int64_t>(window())) ||
        !transfers_.write_back(lock, *victim, Priority::behind) || transfers_.failed_writes() != failed_before)
      return Result::blocked;
  }
  return Result::there;
}

}  // namespace zeropage
