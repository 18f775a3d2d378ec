#include "zeropage/pager/gathers.h"

#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_state.h"
#include "zeropage/pager/pager.h"

namespace zeropage {
namespace {

/// Where this rank's part of a page lies in the segment of its share.
struct Place {
  std::size_t page;    // of the share's segment
  std::size_t offset;  // in it
  std::size_t bytes;
  bool all;  // the part is all of that page
};

Place place_of(const Segment& share, std::size_t offset, std::size_t bytes) {
  const std::size_t page = offset / std::max<std::size_t>(share.page_bytes(), 1);
  return {page, offset - page * share.page_bytes(), bytes, bytes == share.bytes_of(page)};
}

}  // namespace

struct Gathers::Gathering : Ticket::State {
  Gathering(const Run& r, std::size_t p, std::byte* into, int ranks)
      : State(Transfer{Direction::read, nullptr, p, into, r.bytes_of(p)}),
        run(r),
        page(p),
        part_bytes(r.bytes_of(p) / ranks),
        packed_bytes(r.packed_bytes) {}

  const Run& run;
  std::size_t page;
  std::size_t part_bytes;
  std::size_t packed_bytes;                  // of small tensors, by all ranks
  PagePin part;                              // of a large tensor
  std::shared_ptr<std::byte> packed, parts;  // of small ones: ours, everyone's
  std::unique_ptr<Ranks::Work> work;
  std::exception_ptr failure;
  bool launched = false;
};

Gathers::Gathers(Pager& local, std::shared_ptr<Ranks> ranks, DeviceMemory* device)
    : local_(local), ranks_(std::move(ranks)), device_(device) {}

Gathers::~Gathers() = default;

void Gathers::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  device_ ? device_->copy(to, from, bytes) : void(std::memcpy(to, from, bytes));
}

Ticket Gathers::read(const Run& run, std::size_t page, std::byte* into) {
  auto gathering = std::make_shared<Gathering>(run, page, into, ranks_->size());
  if (run.packed()) {
    for (const Share& share : run.shares) {
      if (share.segment) local_.prefetch_page(*share.segment, 0);
    }
  } else {
    hold_part(*gathering);
  }
  asked_for_.push_back(gathering);
  return Ticket(this, std::move(gathering));
}

void Gathers::hold_part(Gathering& gathering) {
  Segment& share = *gathering.run.shares[0].segment;
  const Place place =
      place_of(share, gathering.page * (gathering.run.page_bytes / ranks_->size()), gathering.part_bytes);
  while (true) {
    try {
      gathering.part = local_.pin_page(share, place.page, Access::read);
      return;
    } catch (const BudgetError&) {
      if (!finish_oldest()) throw;
    }
  }
}

void Gathers::launch_all() {
  while (!asked_for_.empty()) {
    const auto next = asked_for_.front().lock();
    asked_for_.pop_front();
    if (!next) continue;
    next->launched = true;
    try {
      launch(*next);
      in_flight_.push_back(next);
    } catch (...) {
      next->failure = std::current_exception();
    }
  }
}

void Gathers::launch(Gathering& g) {
  const Subject subject{name_of(g.run.role), g.run.number, g.page};
  if (g.run.packed()) {
    pack(g);
    const std::size_t bytes = g.packed_bytes / ranks_->size();
    g.work = ranks_->all_gather(g.parts.get(), g.packed.get(), bytes, subject);
    return;
  }
  g.part.wait();
  const Segment& share = *g.run.shares[0].segment;
  const Place place = place_of(share, g.page * (g.run.page_bytes / ranks_->size()), g.part_bytes);
  g.work = ranks_->all_gather(g.transfer.buffer, g.part.data() + place.offset, g.part_bytes, subject);
}

/// Lays this rank's parts of all tensors of the page together. Those that died keep their place, so that when they
/// died, which ranks need not agree on, changes nothing.
void Gathers::pack(Gathering& g) {
  const std::size_t bytes = g.packed_bytes / ranks_->size();
  g.packed = ranks_->scratch(bytes);
  g.parts = ranks_->scratch(g.packed_bytes);
  for (const Share& share : g.run.shares) {
    if (!share.segment || share.offset >= g.packed_bytes) continue;
    PagePin part = local_.pin_page(*share.segment, 0, Access::read);
    part.wait();
    copy(g.packed.get() + share.offset / ranks_->size(), part.data(), share.part_bytes);
  }
}

void Gathers::deal_out(Gathering& g) {
  const std::size_t ranks = ranks_->size(), bytes = g.packed_bytes / ranks;
  std::byte* const into = g.transfer.buffer;
  device_ ? device_->clear(into, g.run.bytes) : void(std::memset(into, 0, g.run.bytes));
  for (const Share& share : g.run.shares) {
    if (share.offset >= g.packed_bytes) continue;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      copy(into + share.offset + rank * share.part_bytes, g.parts.get() + rank * bytes + share.offset / ranks,
           share.part_bytes);
    }
  }
}

void Gathers::finish(Gathering& g) {
  if (g.requests_left == 0) return;
  if (!g.launched) launch_all();
  try {
    if (!g.failure && g.work) g.work->wait();
    if (!g.failure && g.run.packed()) deal_out(g);
  } catch (...) {
    g.failure = std::current_exception();
  }
  g.work.reset();
  g.part = {};
  g.packed.reset(), g.parts.reset();
  g.bytes_done = g.transfer.bytes;
  g.requests_left = 0;
}

/// Frees a page of a share that only a gather holds. False if there is none.
bool Gathers::finish_oldest() {
  launch_all();
  while (!in_flight_.empty()) {
    const auto oldest = in_flight_.front().lock();
    in_flight_.pop_front();
    if (!oldest || oldest->requests_left == 0) continue;
    finish(*oldest);
    return true;
  }
  return false;
}

void Gathers::wait(Ticket::State& state) {
  auto& gathering = static_cast<Gathering&>(state);
  finish(gathering);
  const auto is_over = [](const std::shared_ptr<Gathering>& g) { return !g || g->requests_left == 0; };
  while (!in_flight_.empty() && is_over(in_flight_.front().lock())) in_flight_.pop_front();
  if (auto failure = std::exchange(gathering.failure, nullptr)) std::rethrow_exception(failure);
}

bool Gathers::done(const Ticket::State& state) { return state.requests_left == 0; }

void Gathers::write(const Run& run, std::size_t page, const std::byte* from) {
  const std::size_t ranks = ranks_->size(), rank = ranks_->rank();
  for (const Share& share : run.shares) {
    if (!share.segment) continue;
    const std::size_t bytes = run.packed() ? share.part_bytes : run.bytes_of(page) / ranks;
    const Place place = place_of(*share.segment, run.packed() ? 0 : page * (run.page_bytes / ranks), bytes);
    PagePin part = local_.pin_page(*share.segment, place.page, place.all ? Access::overwrite : Access::write);
    part.wait();
    part.fill(from + share.offset + rank * bytes, bytes, place.offset);
  }
}

}  // namespace zeropage
