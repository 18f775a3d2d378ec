// Bytes on their way: a page's state changes when a transfer starts and when its result has been checked.
#include <chrono>

#include "zeropage/pager/pager.h"

namespace zeropage {

std::byte* Pager::address(const Run& run, std::size_t page) const {
  const Frame& frame = *run.pages[page].frame;
  return frame.memory.data() + (page - frame.first_page) * run.page_bytes;
}

Ticket Pager::start_read(Run& run, std::size_t page, std::byte* into) {
  const std::size_t bytes = round_up(run.bytes_of(page), kBlockBytes);
  stats_.read_bytes += bytes;
  if (run.below) return uploads_->read(*run.below, page, into, run.bytes_of(page));
  if (run.gathered()) return gathers_->read(run, page, into);
  return io_->submit({Direction::read, &swap_->file(), run.extent.offset() + page * run.page_bytes, into, bytes});
}

void Pager::start_write(Run& run, std::size_t page) {
  const std::size_t bytes = round_up(run.bytes_of(page), kBlockBytes);
  Page& p = run.pages[page];
  if (run.gathered()) {
    order_after(*p.frame);
    gathers_->write(run, page, address(run, page));
    p.state = Residency::clean;
    return;
  }
  p.transfer = run.below ? uploads_->write(*run.below, page, address(run, page), run.bytes_of(page),
                                           p.frame->last_mark ? p.frame->last_mark : p.frame->ready)
                         : io_->submit({Direction::write, &swap_->file(), run.extent.offset() + page * run.page_bytes,
                                        address(run, page), bytes});
  p.state = Residency::writing;
  stats_.written_bytes += bytes;
}

void Pager::wait_for(Ticket& ticket) {
  if (!ticket) return;
  if (ticket.done()) return ticket.wait();
  const auto start = std::chrono::steady_clock::now();
  struct Clock {
    PagerStats& stats;
    std::chrono::steady_clock::time_point start;
    ~Clock() {
      stats.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  } clock{stats_, start};
  ticket.wait();
}

/// Waits for a page's transfer, if it has one, and moves its state on. On failure the page is as before the transfer
/// began and the error passes on: a page that could not be written stays dirty in its frame; one that could not be
/// read is at home, without a frame.
void Pager::settle(Run& run, std::size_t index) {
  Page& page = run.pages[index];
  const Residency state = page.state;
  if (state == Residency::reading) return settle_reads(*page.frame);
  if (state != Residency::writing && state != Residency::rewritten) return;
  Ticket transfer = std::exchange(page.transfer, {});
  try {
    wait_for(transfer);
  } catch (...) {
    page.state = Residency::dirty;
    throw;
  }
  page.state = state == Residency::rewritten ? Residency::dirty : Residency::clean;
}

/// All pages of a frame are read together or not at all.
void Pager::settle_reads(Frame& frame) {
  Page* const pages = &frame.run->pages[frame.first_page];
  try {
    for (std::size_t i = 0; i < frame.pages; ++i) {
      Ticket transfer = std::exchange(pages[i].transfer, {});
      wait_for(transfer);
    }
  } catch (...) {
    abandon_reads(frame);
    if (frame.pins == 0) drop_frame(frame);  // else the last pin does
    throw;
  }
  for (std::size_t i = 0; i < frame.pages; ++i) pages[i].state = Residency::clean;
}

/// Its pages are at home again, and nothing is on its way.
void Pager::abandon_reads(Frame& frame) noexcept {
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    Page& page = frame.run->pages[i];
    if (page.frame != &frame) continue;
    Ticket ended = std::exchange(page.transfer, {});
    page.state = Residency::home;
    page.frame = nullptr;
  }
}

/// Settles all pages in [first, end), then throws the first error among them: a disk that fails is told of once, not
/// once a page.
void Pager::settle_all(Run& run, std::size_t first, std::size_t end) {
  std::exception_ptr error;
  for (std::size_t i = first; i < end; ++i) {
    try {
      settle(run, i);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void Pager::settle_for_death(Run& run) noexcept {
  for (Page& page : run.pages) {
    Ticket transfer = std::exchange(page.transfer, {});
    // Its destructor waits; what a dead tensor's write came to is of no interest.
  }
}

}  // namespace zeropage
