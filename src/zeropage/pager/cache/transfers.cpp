#include "zeropage/pager/cache/transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// How long background writes and reads ahead pause after a failed write.
constexpr std::chrono::seconds kRest{1};

thread_local int takes_checkpoint = 0;

}  // namespace

TakesCheckpoint::TakesCheckpoint() { ++takes_checkpoint; }
TakesCheckpoint::~TakesCheckpoint() { --takes_checkpoint; }

/// On the thread on which a transfer ended. It allocates nothing, since no thread could hear of the failure.
template <class Book>
void Transfers::on_end(Book book) {
  monitor_.run_at_end([this, book = std::move(book)](Lock& lock) {
    book();
    go_on_(lock);
  });
}

void Transfers::start_reads(Lock& lock, Frame& frame, Priority priority) {
  Run& run = *frame.run;
  std::vector<std::size_t> pages;
  try {
    pages.reserve(frame.pages);  // before any page's state changes
  } catch (const std::bad_alloc&) {
    frame.failure = std::current_exception();
    return detach_missing(frame);
  }
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    Page& page = run.pages[i];
    if (page.state != Residency::evicted || (page.frame && page.frame != &frame)) continue;
    page.frame = &frame;
    page.state = Residency::reading;
    ++frame.transfers, ++run.transfers;
    pages.push_back(i);
  }
  const bool blocks = home_->blocks() && (priority == Priority::demanded || frames_.is_gathered());
  ++frame.starting;
  for (const std::size_t i : pages) {
    const std::size_t bytes = round_up(run.bytes_of(i), kBlockBytes);
    read_bytes_ += bytes;
    reading_bytes_ += bytes;
    pace_.begin_read(bytes);
    if (Trace::is_on()) trace(/*begins=*/true, /*reads=*/true, run, i);
    std::byte* const into = frame.memory.data() + (i - frame.first_page) * run.page_bytes;
    auto done = [this, &run, &frame, i](Home::Outcome outcome) {
      on_end([this, &run, &frame, i, outcome = std::move(outcome)] { read_ended(run, frame, i, outcome); });
    };
    std::optional<Home::Outcome> outcome;
    try {
      if (frame.failure) std::rethrow_exception(frame.failure);
      monitor_.check_usable();  // after close() nothing starts: no thread would wait for it
      std::optional<Unlocked> unlocked;
      if (blocks) unlocked.emplace(lock);
      outcome = home_->read(run, i, into, priority, std::move(done));
    } catch (...) {
      outcome = Home::Outcome{std::current_exception(), nullptr};
    }
    if (outcome) read_ended(run, frame, i, std::move(*outcome));
  }
  --frame.starting;
  if (blocks) monitor_.changed().notify_all();
}

/// After reads into a frame could not start: pages without content no longer point to it.
void Transfers::detach_missing(Frame& frame) noexcept {
  bool has_pages = false;
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    Page& page = frame.run->pages[i];
    if (page.frame == &frame && page.state == Residency::evicted) page.frame = nullptr;
    has_pages = has_pages || page.frame == &frame;
  }
  if (!has_pages) frame.run = nullptr;  // a run that dies finds its frames by its pages
}

/// All pages of a frame are read together or not at all.
void Transfers::read_ended(Run& run, Frame& frame, std::size_t page, Home::Outcome outcome) {
  reading_bytes_ -= round_up(run.bytes_of(page), kBlockBytes);
  pace_.end_read(round_up(run.bytes_of(page), kBlockBytes));
  if (Trace::is_on()) trace(/*begins=*/false, /*reads=*/true, run, page);
  if (outcome.error && !frame.failure) frame.failure = outcome.error;
  if (outcome.ready) frame.ready = outcome.ready;
  if (--frame.transfers == 0) {
    bool has_pages = false;
    for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
      Page& p = run.pages[i];
      if (p.frame != &frame) continue;
      if (p.state == Residency::reading) {
        p.state = frame.failure ? Residency::evicted : Residency::clean;
        if (frame.failure) p.frame = nullptr;
      }
      has_pages = has_pages || p.frame;
    }
    if (!has_pages) frame.run = nullptr;         // a run that dies finds its frames by its pages
    if (frame.pins == 0) frames_.settle(frame);  // else the last pin does
  }
  transfer_ended(run);
}

bool Transfers::write_back(Lock& lock, Frame& frame, Priority priority) {
  Run& run = *frame.run;
  std::vector<std::size_t> pages;
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    if (run.pages[i].state != Residency::dirty || run.pages[i].frame != &frame) continue;
    if (Frames::state_before_overwrite(frame, i) != Residency::clean) continue;
    if (priority != Priority::demanded && !home_->ready_to_write(run, i)) break;
    pages.push_back(i);
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (try_reserve_slot(run, pages[i])) continue;
    if (priority == Priority::demanded) return grow_for(lock, frame, run.bytes_of(pages[i])), true;
    pages.resize(i);
  }
  if (pages.empty()) return false;
  const bool is_held = frame.pins > 0;
  frames_.add_pin(frame);  // keeps the frame while the lock is given up
  for (const std::size_t i : pages) {
    // If only the run uses the slot by now, the page is written in place.
    if (!run.has_version && is_sole_and_writable(run.pages[i].home)) run.pages[i].target = nullptr;
    // The holder of a pin may be about to write it.
    run.pages[i].state = is_held ? Residency::rewritten : Residency::writing;
    ++frame.transfers, ++run.transfers;
    const std::size_t bytes = round_up(run.bytes_of(i), kBlockBytes);
    written_bytes_ += bytes;
    writing_bytes_ += bytes;
    pace_.begin_write(bytes);
    if (Trace::is_on()) trace(/*begins=*/true, /*reads=*/false, run, i);
  }
  const bool blocks = home_->blocks() && (priority == Priority::demanded || frames_.is_gathered());
  bool has_started = true;
  for (const std::size_t i : pages) {
    auto done = [this, &run, i](Home::Outcome outcome) {
      on_end([this, &run, i, outcome = std::move(outcome)] { write_ended(run, i, outcome); });
    };
    std::byte* const from = frame.memory.data() + (i - frame.first_page) * run.page_bytes;
    const auto after = frame.last_used ? frame.last_used : frame.ready;
    std::optional<Home::Outcome> outcome;
    bool has_failed = true;
    try {
      monitor_.check_usable();
      {
        std::optional<Unlocked> unlocked;
        if (blocks) unlocked.emplace(lock);
        outcome = home_->write(run, i, from, after, priority, std::move(done));
      }
      // ShardedHome has asked this thread's stream to copy from the frame.
      if (frames_.is_gathered()) memory_.mark_used(frame);
    } catch (const BudgetError&) {
      // A write in the background has not started, and starts again later.
      outcome = Home::Outcome{std::current_exception(), nullptr};
      has_failed = priority == Priority::demanded;
      has_started = has_failed;
    } catch (...) {
      outcome = Home::Outcome{std::current_exception(), nullptr};
    }
    if (outcome) write_ended(run, i, *outcome, has_failed);
  }
  if (blocks && monitor_.closed()) {  // close() has not seen what started meanwhile
    const Unlocked unlocked(lock);
    finish();
  }
  frames_.drop_pin(frame);
  if (!blocks) return has_started;
  monitor_.changed().notify_all();  // a thread that found nothing to wait for can now wait
  monitor_.check_usable();
  return true;
}

void Transfers::finish() noexcept {
  for (bool ends = home_ != nullptr; ends;) {
    try {
      ends = home_->tidy(/*wait=*/true);
    } catch (...) {  // the transfer has ended with this error
    }
  }
}

/// `has_failed`: an error of the outcome is one of the write. Else the write has not started.
void Transfers::write_ended(Run& run, std::size_t index, const Home::Outcome& outcome, bool has_failed) {
  Page& page = run.pages[index];
  writing_bytes_ -= round_up(run.bytes_of(index), kBlockBytes);
  pace_.end_write(round_up(run.bytes_of(index), kBlockBytes));
  if (Trace::is_on()) trace(/*begins=*/false, /*reads=*/false, run, index);
  if (outcome.error) {
    page.state = Residency::dirty;
    if (run.frozen) run.frozen->pages[index].older_on_its_way = false;
    failed_writes_ += has_failed;
    if (!run.dead && has_failed) {
      failed_write_ = outcome.error;
      failed_at_ = Clock::now();
      runs_.note_write(page, /*failed=*/true);
    }
  } else {
    runs_.note_write(page, /*failed=*/false);
    page.state = page.state == Residency::rewritten ? Residency::dirty : Residency::clean;
    if (page.target && !page.is_new) page.home = std::exchange(page.target, nullptr);
    if (run.frozen && run.frozen->pages[index].place == Frozen::Place::frame) {
      Frozen::Page& frozen = run.frozen->pages[index];
      if (!std::exchange(frozen.older_on_its_way, false)) frozen = {Frozen::Place::home, page.home};
    }
  }
  Frame& frame = *page.frame;
  if (--frame.transfers == 0 && frame.pins == 0) frames_.settle(frame);
  transfer_ended(run);
}

/// False if the disk must grow first.
bool Transfers::try_reserve_slot(Run& run, std::size_t page) {
  if (run.has_slot_to_write(page)) return true;
  run.pages[page].target = home_->try_allocate(run.bytes_of(page));
  return run.pages[page].target != nullptr;
}

/// The same for a frame that is to be written, which stays meanwhile.
void Transfers::grow_for(Lock& lock, Frame& frame, std::size_t bytes) {
  struct Kept {
    Transfers& transfers;
    Frame& frame;
    Run& run;
    Kept(Transfers& t, Frame& f) : transfers(t), frame(f), run(*f.run) {
      transfers.frames_.add_pin(frame);
      ++run.transfers;  // its tensors may die
    }
    ~Kept() {
      transfers.frames_.drop_pin(frame);
      transfers.transfer_ended(run);
    }
  } kept(*this, frame);
  grow(lock, bytes);
}

void Transfers::grow(Lock& lock, std::size_t bytes) {
  std::exception_ptr full;
  const std::size_t thawed = thawed_;
  {
    const Inside inside(monitor_);
    const Unlocked unlocked(lock);
    try {
      home_->grow(bytes);
    } catch (const DiskError&) {
      full = std::current_exception();
    }
  }
  monitor_.check_usable();
  if (full && thawed_ == thawed) wait_for_a_checkpoint(lock, std::move(full));
}

/// Returns when a checkpoint has released slots. Throws the error if none is in progress, or if this thread is the
/// one that must write it.
void Transfers::wait_for_a_checkpoint(Lock& lock, std::exception_ptr full) {
  if (frozen_ == 0) std::rethrow_exception(full);
  if (takes_checkpoint > 0) {
    throw DiskError("the disk has no room for both a checkpoint and training's writes; make room, or save with wait",
                    ENOSPC);
  }
  const std::size_t before = thawed_;
  wait_until(lock, [&] { return thawed_ != before || frozen_ == 0; }, Cause::checkpoint);
}

void Transfers::make_writable(Lock& lock, Run& run, std::size_t index) {
  const Page& page = run.pages[index];
  const auto can_go_home = [&] {
    return run.is_on_disk && page.state == Residency::dirty && page.frame && !page.frame->permanent &&
           run.frozen->pages[index].place == Frozen::Place::frame;
  };
  while (run.is_owed(index)) {
    const std::size_t failed_before = failed_writes_;
    if (can_go_home() && write_back(lock, *page.frame, Priority::demanded)) throw_failed_write(failed_before);
    wait_until(lock, [&] { return !run.is_owed(index) || can_go_home(); }, Cause::checkpoint);
    throw_failed_write(failed_before);
  }
  while (!try_reserve_slot(run, index)) grow(lock, run.bytes_of(index));
}

bool Transfers::try_make_writable(Run& run, std::size_t page) {
  return !run.is_owed(page) && try_reserve_slot(run, page);
}

bool Transfers::has_failed_write() const {
  return failed_write_ && runs_.failed_pages() > 0 && Clock::now() < failed_at_ + kRest;
}

void Transfers::throw_failed_write() {
  const auto failed = std::exchange(failed_write_, nullptr);
  if (failed && runs_.failed_pages() > 0) std::rethrow_exception(failed);
}

void Transfers::throw_failed_write(std::size_t before) {
  if (failed_writes_ != before) throw_failed_write();
}

void Transfers::transfer_ended(Run& run) {
  if (--run.transfers == 0 && run.dead) runs_.remove(run);
  monitor_.changed().notify_all();
}

/// Also records the bytes in memory, which each transfer changes.
void Transfers::trace(bool begins, bool reads, const Run& run, std::size_t page) const noexcept try {
  const std::string_view lane = frames_.is_gathered() ? "all-gather"
                                : memory_.device()    ? (reads ? "upload" : "download")
                                                      : (reads ? "disk read" : "disk write");
  const auto id = reinterpret_cast<std::uintptr_t>(&run.pages[page]);
  if (!begins) return Trace::end(lane, id);
  const std::size_t bytes = round_up(run.bytes_of(page), kBlockBytes);
  Trace::begin(lane, id,
               fmt::format("\"bytes\": {}, \"run\": \"{:#x}\", \"page\": {}", bytes,
                           reinterpret_cast<std::uintptr_t>(&run), page));
  Trace::counter(frames_.is_gathered() ? "gathered"
                 : memory_.device()    ? "device_memory"
                                       : "memory",
                 memory_.budget().used());
} catch (const std::bad_alloc&) {  // an event is lost
}

void Transfers::hurry_writes(Lock& lock, const Run& run) {
  if (home_->blocks()) return;  // a device's downloads start at once

  std::vector<std::pair<std::size_t, std::span<std::byte>>> written;  // by page
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    const Page& page = run.pages[i];
    const bool is_written = page.state == Residency::writing || page.state == Residency::rewritten;
    if (!is_written) continue;
    written.emplace_back(i, std::span(FrameMemory::address(run, i), round_up(run.bytes_of(i), kBlockBytes)));
  }
  if (written.empty()) return;
  const Waiting waiting(monitor_, Cause::content);
  const Unlocked unlocked(lock);
  for (const auto& [page, memory] : written) home_->hurry(run, page, memory);
}

void Transfers::wait_for_reads(Lock& lock, Frame& frame) {
  Run* const run = frame.run;
  const auto is_read = [&](std::size_t page) {  // the run may die meanwhile, the frame does not
    return frame.run && run->pages[page].frame == &frame && run->pages[page].state == Residency::reading;
  };
  const auto first_read = [&] {
    std::size_t page = frame.first_page;
    while (page < frame.first_page + frame.pages && !is_read(page)) ++page;
    return page;
  };
  if (!Frames::is_reading(frame)) return;
  struct Pin {
    Frames& frames;
    Frame& frame;
    Pin(Frames& fs, Frame& f) : frames(fs), frame(f) { frames.add_pin(frame); }
    ~Pin() { frames.drop_pin(frame); }
  } pin{frames_, frame};
  // The home must know of a transfer before hurry() can speed it up.
  wait_until(lock, [&] { return frame.starting == 0; }, Cause::content);
  for (std::size_t page = first_read(); page < frame.first_page + frame.pages; ++page) {
    if (!is_read(page)) continue;
    const Waiting waiting(monitor_, Cause::content);
    std::byte* const at = frame.memory.data() + (page - frame.first_page) * run->page_bytes;
    const std::span<std::byte> into(at, round_up(run->bytes_of(page), kBlockBytes));
    const Unlocked unlocked(lock);
    home_->hurry(*run, page, into);
  }
  monitor_.check_usable();
  wait_until(lock, [&] { return first_read() == frame.first_page + frame.pages; }, Cause::content);
}

}  // namespace zeropage
