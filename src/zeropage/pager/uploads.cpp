#include "zeropage/pager/uploads.h"

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_state.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

struct Uploads::Passage : Ticket::State {
  using Ticket::State::State;

  const Segment* below = nullptr;
  PagePin host_page;
  DeviceMemory::Mark mark;
  std::exception_ptr failure;  // of the host page's own read

  void finish() {
    host_page = {};
    bytes_done = transfer.bytes;
    requests_left = 0;
  }
};

struct Uploads::Landing {
  const Segment* below;
  DeviceMemory::Mark mark;
  PagePin host_page;
};

Uploads::Uploads(Pager& host, DeviceMemory& device) : host_(host), device_(device) {}

Uploads::~Uploads() {
  for (Landing& landing : in_flight_) device_.wait(landing.mark);
}

Ticket Uploads::read(Segment& below, std::size_t page, std::byte* into, std::size_t bytes) {
  auto passage = pin(below, page, Access::read, into, bytes);
  asked_for_.push_back(passage);
  return Ticket(this, std::move(passage));
}

Ticket Uploads::write(Segment& below, std::size_t page, const std::byte* from, std::size_t bytes,
                      const DeviceMemory::Mark& after) {
  auto passage = pin(below, page, Access::overwrite, nullptr, bytes);
  passage->host_page.wait();
  passage->mark = device_.download(passage->host_page.data(), from, bytes, after);
  leaving_.push_back(passage);
  return Ticket(this, std::move(passage));
}

std::shared_ptr<Uploads::Passage> Uploads::pin(Segment& below, std::size_t page, Access access, std::byte* buffer,
                                               std::size_t bytes) {
  let_go_of_landed();
  const Direction direction = access == Access::read ? Direction::read : Direction::write;
  auto passage = std::make_shared<Passage>(Transfer{direction, nullptr, page, buffer, bytes});
  passage->below = &below;
  while (true) {
    try {
      passage->host_page = host_.pin_page(below, page, access);
      return passage;
    } catch (const BudgetError&) {
      if (!let_go_of_oldest()) throw;
    }
  }
}

void Uploads::upload(Passage& passage) {
  PagePin page = std::move(passage.host_page);
  try {
    page.wait();
    const Transfer& t = passage.transfer;
    passage.mark = device_.upload(t.buffer, page.data(), t.bytes);
    in_flight_.push_back({passage.below, passage.mark, std::move(page)});
  } catch (...) {
    passage.failure = std::current_exception();
  }
}

void Uploads::let_go_of_landed() {
  const auto is_over = [](const auto& passage) { return passage.expired(); };
  while (!leaving_.empty() && is_over(leaving_.front())) leaving_.pop_front();
  while (!asked_for_.empty() && is_over(asked_for_.front())) asked_for_.pop_front();
  while (!in_flight_.empty() && device_.done(in_flight_.front().mark)) in_flight_.pop_front();
}

void Uploads::finish(const Segment& below) {
  for (auto landing = in_flight_.begin(); landing != in_flight_.end();) {
    if (landing->below == &below) {
      device_.wait(landing->mark);
      landing = in_flight_.erase(landing);
    } else {
      ++landing;
    }
  }
}

void Uploads::land(Passage& passage) {
  device_.wait(passage.mark);
  passage.finish();
}

/// Frees a host page that only a transfer holds. False if there is none.
bool Uploads::let_go_of_oldest() {
  while (!leaving_.empty()) {
    const auto oldest = leaving_.front().lock();
    leaving_.pop_front();
    if (!oldest || !oldest->host_page) continue;
    land(*oldest);
    return true;
  }
  while (in_flight_.empty() && !asked_for_.empty()) {
    const auto oldest = asked_for_.front().lock();
    asked_for_.pop_front();
    if (oldest && oldest->host_page) upload(*oldest);
  }
  if (in_flight_.empty()) return false;
  device_.wait(in_flight_.front().mark);
  in_flight_.pop_front();
  return true;
}

void Uploads::wait(Ticket::State& state) {
  auto& passage = static_cast<Passage&>(state);
  if (passage.requests_left == 0) return;
  if (passage.transfer.direction == Direction::write) {
    return land(passage);
  }
  if (passage.host_page) upload(passage);
  device_.order(passage.mark);
  passage.finish();
  if (passage.failure) std::rethrow_exception(passage.failure);
}

bool Uploads::done(const Ticket::State& state) {
  const auto& passage = static_cast<const Passage&>(state);
  return passage.requests_left == 0 || (passage.mark && device_.done(passage.mark));
}

}  // namespace zeropage
