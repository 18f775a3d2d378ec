// Memory: who pays for it, and what leaves when it is short.
//
// A frame is had in three steps: a reservation against the budget, which moves colder frames out until it fits; a
// block of the arena, for which the coldest window of neighbours leaves if no hole is large enough; and a place in
// the lists.
#include <fmt/format.h>

#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

Frame* Pager::make_frame(Run& run, std::size_t first_page, std::size_t pages, Pool pool, bool permanent) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < pages; ++i) bytes += run.bytes_of(first_page + i);
  bytes = round_up(bytes, kBlockBytes);
  Reservation charge = reserve(pool, bytes);
  Block memory = allocate(bytes, permanent ? FreeList::Side::top : FreeList::Side::bottom);
  return place_frame(run, first_page, pages, pool, std::move(charge), std::move(memory), permanent);
}

Frame* Pager::place_frame(Run& run, std::size_t first_page, std::size_t pages, Pool pool, Reservation charge,
                          Block memory, bool permanent) {
  auto frame = std::make_unique<Frame>();
  frame->charge = std::move(charge);
  frame->memory = std::move(memory);
  if (memory_) memory_->reuse();
  frame->run = &run;
  frame->first_page = first_page;
  frame->pages = pages;
  frame->pool = pool;
  frame->permanent = permanent;
  frame->pins = 1;
  policy_->add(*frame);
  Frame* made = frame.get();
  frames_.emplace(made->memory.data(), std::move(frame));
  return made;
}

/// Forgets a frame; its pages must not need it.
void Pager::drop_frame(Frame& frame) {
  for (std::size_t i = 0; frame.run && i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame) page.frame = nullptr;
  }
  policy_->remove(frame);
  if (memory_) memory_->retire(frame.last_mark ? frame.last_mark : frame.ready);
  frames_.erase(frame.memory.data());
}

void Pager::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  memory_ ? memory_->copy(to, from, bytes) : void(std::memcpy(to, from, bytes));
}

void Pager::clear(std::byte* at, std::size_t bytes) {
  memory_ ? memory_->clear(at, bytes) : void(std::memset(at, 0, bytes));
}

// [Note: streams and frames] in store/device_memory.h.

void Pager::mark_ready(Frame& frame) {
  if (memory_) frame.ready = memory_->now();
}

void Pager::order_after(Frame& frame) {
  if (!memory_ || !frame.ready) return;
  memory_->done(frame.ready) ? frame.ready.reset() : memory_->order(frame.ready);
}

void Pager::mark_used(Frame& frame) {
  if (!memory_) return;
  memory_->order(frame.last_mark);  // of another thread's stream, perhaps
  frame.last_mark = memory_->now();
}

Reservation Pager::reserve(Pool pool, std::size_t bytes) {
  Budget& from = paying(pool);
  while (true) {
    if (auto charge = from.try_reserve(bytes)) return charge;
    if (bytes > from.limit() || !make_room(pool)) {
      throw BudgetError(fmt::format("{} = {} cannot hold {} more: {} of it are homes or in use at once; raise {}",
                                    from.name(), format_bytes(from.limit()), format_bytes(bytes),
                                    format_bytes(from.used()), from.name()));
    }
  }
}

/// Takes one frame out of `pool`'s budget: a device frame becomes the host's to pay for if the host has room, colder
/// host frames making it. False if nothing can leave.
bool Pager::make_room(Pool pool) {
  Frame* victim = policy_->victim(pool);
  if (!victim) return false;
  if (pool == Pool::device) {
    const std::size_t bytes = victim->charge.bytes();
    Reservation charge = host_.try_reserve(bytes);
    while (!charge && bytes <= host_.limit()) {
      Frame* colder = policy_->victim(Pool::host);
      if (!colder) break;
      evict_frame(*colder);
      charge = host_.try_reserve(bytes);
    }
    if (charge) {
      move_to_pool(*victim, std::move(charge), Pool::host);
      clean_coldest();
      return true;
    }
  }
  evict_frame(*victim);
  return true;
}

void Pager::move_to_pool(Frame& frame, Reservation charge, Pool pool) {
  policy_->remove(frame);
  frame.charge = std::move(charge);
  frame.pool = pool;
  policy_->add(frame);
}

Block Pager::allocate(std::size_t bytes, FreeList::Side side) {
  while (true) {
    if (auto block = arena_->try_allocate(bytes, side)) return std::move(*block);
    if (!evict_window(bytes)) {
      throw BudgetError(fmt::format("no {} of memory lie together between what is in use; raise device_memory",
                                    format_bytes(bytes)));
    }
  }
}

/// Whether a frame can be given up without waiting for a transfer.
bool Pager::leaves_at_once(const Frame& frame) {
  if (frame.pins > 0 || frame.permanent || !frame.run) return false;
  const auto first = frame.run->pages.begin() + static_cast<std::ptrdiff_t>(frame.first_page);
  return std::all_of(first, first + static_cast<std::ptrdiff_t>(frame.pages), [](const Page& page) {
    return page.state == Residency::clean || (page.state == Residency::writing && page.transfer.done());
  });
}

/// Evicts the neighbours, in address order, that together with the holes between them make `bytes`, such that the
/// warmest of them is as cold as can be. `clean_only`: of those that leave at once. False if others leave no such
/// window.
bool Pager::evict_window(std::size_t bytes, bool clean_only) {
  struct Candidate {
    std::byte* begin;
    std::byte* end;
    Frame* frame;  // null: a hole
  };
  std::vector<Candidate> line;
  std::byte* at = arena_->base();
  for (auto& [data, frame] : frames_) {
    if (data > at) line.push_back({at, data, nullptr});
    at = data + frame->memory.bytes();
    line.push_back({data, at, frame.get()});
  }
  if (std::byte* end = arena_->base() + arena_->capacity(); end > at) line.push_back({at, end, nullptr});

  std::uint64_t best_warmth = ~std::uint64_t{0};
  std::size_t best_first = 0, best_last = 0;
  for (std::size_t first = 0; first < line.size(); ++first) {
    std::uint64_t warmth = 0;
    for (std::size_t last = first; last < line.size(); ++last) {
      if (Frame* frame = line[last].frame) {
        if (frame->pins > 0 || frame->permanent || (clean_only && !leaves_at_once(*frame))) break;
        warmth = std::max(warmth, frame->last_use);
      }
      if (warmth >= best_warmth) break;
      if (line[last].end - line[first].begin >= static_cast<std::ptrdiff_t>(bytes)) {
        best_warmth = warmth, best_first = first, best_last = last + 1;
        break;
      }
    }
  }
  if (best_last == 0) return false;
  for (std::size_t i = best_first; i < best_last; ++i) {
    if (line[i].frame) evict_frame(*line[i].frame);
  }
  return true;
}

/// Writes what is dirty home, waits, and gives the memory back. Throws DiskError with the frame still valid.
void Pager::evict_frame(Frame& frame) {
  if (!frame.run) return drop_frame(frame);
  Run& run = *frame.run;
  const std::size_t end = frame.first_page + frame.pages;
  for (std::size_t i = frame.first_page; i < end; ++i) {
    // A page that is only being read needs no waiting for its content, only for the disk to leave its frame alone.
    if (run.pages[i].state == Residency::reading) {
      Ticket ended = std::exchange(run.pages[i].transfer, {});
      run.pages[i].state = Residency::clean;
    }
  }
  settle_all(run, frame.first_page, end);  // older writes first: two of one page must not race
  for (std::size_t i = frame.first_page; i < end; ++i) {
    if (run.pages[i].state == Residency::dirty) start_write(run, i);
  }
  settle_all(run, frame.first_page, end);
  for (std::size_t i = frame.first_page; i < end; ++i) run.pages[i].state = Residency::home;
  drop_frame(frame);
  ++stats_.evictions;
}

/// Starts writing home what of the frame is newer there.
void Pager::clean(Frame& frame) {
  for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
    if (frame.run->pages[i].state == Residency::dirty) start_write(*frame.run, i);
  }
}

/// Write-behind: once the host's cache is half full, its coldest quarter is kept on its way to the disk, so that what
/// leaves next need not be waited for.
void Pager::clean_coldest() {
  if (!is_short(host_)) return;
  std::size_t seen = 0;
  policy_->from_coldest(Pool::host, [&](Frame& frame) {
    if (frame.pins == 0 && !frame.permanent) clean(frame);
    return (seen += frame.memory.bytes()) < host_.limit() / 4;
  });
}

}  // namespace zeropage
