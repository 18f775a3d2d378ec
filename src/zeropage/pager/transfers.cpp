// Bytes on their way. A page's state changes when a transfer starts and when its result has been checked; a transfer
// that ends books its outcome itself and lets the next ones start.
#include <chrono>

#include "zeropage/base/errors.h"
#include "zeropage/pager/waiting.h"

namespace zeropage {

/// Starts bringing the frame's pages that are evicted and have no other frame. The caller holds a pin on it. If one
/// cannot start, the frame has failed, and the thread that waits for it throws the error.
void FrameCache::start_reads(Lock& lock, Frame& frame, Priority priority) {
  Run& run = *frame.run;
  std::vector<std::size_t> pages;
  pages.reserve(frame.pages);  // before any page's state changes
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    Page& page = run.pages[i];
    if (page.state != Residency::evicted || (page.frame && page.frame != &frame)) continue;
    page.frame = &frame;
    page.state = Residency::reading;
    ++frame.transfers, ++run.transfers;
    pages.push_back(i);
  }
  const bool blocks = home_->blocks() && (priority == Priority::demanded || ranks_);
  ++frame.starting;
  for (const std::size_t i : pages) {
    const std::size_t bytes = round_up(run.bytes_of(i), kBlockBytes);
    stats_.read_bytes += bytes;
    reading_bytes_ += bytes;
    std::byte* const into = frame.memory.data() + (i - frame.first_page) * run.page_bytes;
    auto done = [this, &run, &frame, i](Home::Outcome outcome) {
      on_end([&] { read_ended(run, frame, i, std::move(outcome)); });
    };
    std::optional<Home::Outcome> outcome;
    try {
      if (frame.failure) std::rethrow_exception(frame.failure);
      check_usable();  // after close() nothing starts: nobody would wait for it
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

/// All pages of a frame are read together or not at all.
void FrameCache::read_ended(Run& run, Frame& frame, std::size_t page, Home::Outcome outcome) {
  reading_bytes_ -= round_up(run.bytes_of(page), kBlockBytes);
  if (outcome.error && !frame.failure) frame.failure = outcome.error;
  if (outcome.ready) frame.ready = outcome.ready;
  if (--frame.transfers == 0) {
    for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
      Page& p = run.pages[i];
      if (p.frame != &frame || p.state != Residency::reading) continue;
      p.state = frame.failure ? Residency::evicted : Residency::clean;
      if (frame.failure) p.frame = nullptr;
    }
    if (frame.pins == 0) frames_.settle(frame);  // else the last pin does
  }
  transfer_ended(run);
}

/// Starts writing home what of the frame is newer there. False if that would block; nothing has started then, or all
/// that could.
bool FrameCache::write_back(Lock& lock, Frame& frame, Priority priority) {
  Run& run = *frame.run;
  std::vector<std::size_t> pages;
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    if (run.pages[i].state != Residency::dirty || run.pages[i].frame != &frame) continue;
    if (priority != Priority::demanded && !home_->ready_to_write(run, i)) break;
    pages.push_back(i);
  }
  if (pages.empty()) return false;
  if (ranks_) memory_.order_after(frame);
  frames_.add_pin(frame);  // the frame stays while the lock is given up
  for (const std::size_t i : pages) {
    run.pages[i].state = Residency::writing;
    ++frame.transfers, ++run.transfers;
    const std::size_t bytes = round_up(run.bytes_of(i), kBlockBytes);
    stats_.written_bytes += bytes;
    writing_bytes_ += bytes;
  }
  const bool blocks = home_->blocks() && (priority == Priority::demanded || ranks_);
  for (const std::size_t i : pages) {
    auto done = [this, &run, i](Home::Outcome outcome) { on_end([&] { write_ended(run, i, outcome); }); };
    std::byte* const from = frame.memory.data() + (i - frame.first_page) * run.page_bytes;
    const auto after = frame.last_used ? frame.last_used : frame.ready;
    std::optional<Home::Outcome> outcome;
    try {
      check_usable();
      std::optional<Unlocked> unlocked;
      if (blocks) unlocked.emplace(lock);
      outcome = home_->write(run, i, from, after, priority, std::move(done));
    } catch (...) {
      outcome = Home::Outcome{std::current_exception(), nullptr};
    }
    if (outcome) write_ended(run, i, *outcome);
  }
  frames_.drop_pin(frame);
  if (blocks) monitor_.changed().notify_all();  // a thread that found nothing to wait for now does
  return true;
}

void FrameCache::write_ended(Run& run, std::size_t index, const Home::Outcome& outcome) {
  Page& page = run.pages[index];
  writing_bytes_ -= round_up(run.bytes_of(index), kBlockBytes);
  if (outcome.error) {
    page.state = Residency::dirty;
    ++failed_writes_;
    if (!run.dead) failed_write_ = outcome.error;
  } else {
    page.state = page.state == Residency::rewritten ? Residency::dirty : Residency::clean;
  }
  Frame& frame = *page.frame;
  if (--frame.transfers == 0 && frame.pins == 0) frames_.settle(frame);
  transfer_ended(run);
}

/// If a write failed since there were `before` of them, and no thread has been told.
void FrameCache::throw_failed_write(std::size_t before) {
  if (failed_writes_ != before && failed_write_) std::rethrow_exception(std::exchange(failed_write_, nullptr));
}

void FrameCache::transfer_ended(Run& run) {
  if (--run.transfers == 0 && run.dead) runs_.remove(run);
  monitor_.changed().notify_all();
}

/// On the thread on which a transfer ended.
void FrameCache::on_end(std::function<void()> book) {
  {
    Lock lock(monitor_.mutex());
    book();
    if (!ranks_) ahead_.run(*this, lock);
  }
  std::lock_guard lock(progress_mutex_);
  if (FrameCache* const upper = upper_) upper->progress();
}

void FrameCache::progress() {
  Lock lock(monitor_.mutex());
  if (!ranks_) ahead_.run(*this, lock);
}

/// Returns when nothing is being read into the frame, which may be gone then unless the caller has a pin on it.
void FrameCache::wait_for_reads(Lock& lock, Frame& frame) {
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
  wait_until(lock, [&] { return frame.starting == 0; });  // the home must know of a transfer that is to be hurried
  for (std::size_t page = first_read(); page < frame.first_page + frame.pages; ++page) {
    if (!is_read(page)) continue;
    const Waiting waiting(monitor_.waited_seconds());
    std::byte* const at = frame.memory.data() + (page - frame.first_page) * run->page_bytes;
    const Unlocked unlocked(lock);
    home_->hurry(*run, page, at);
  }
  check_usable();
  wait_until(lock, [&] { return first_read() == frame.first_page + frame.pages; });
}

}  // namespace zeropage
