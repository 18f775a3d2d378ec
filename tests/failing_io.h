// A disk that fails on demand, behind the seam: transfers run one by one, when they are waited for.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <deque>
#include <functional>

#include "zeropage/io/transfer_state.h"

namespace zeropage {

class FailingIo final : public Io {
 public:
  /// Called for each request before it runs; a result other than 1 is reported instead: -errno, or 0 for end of file.
  std::function<long(const Transfer&)> outcome = [](const Transfer&) { return 1L; };
  int reads = 0, writes = 0;

  Ticket submit(const Transfer& transfer) override {
    auto state = std::make_shared<Ticket::State>(transfer);
    (transfer.direction == Direction::read ? reads : writes) += 1;
    cut_into_requests(state, [&](Request request) { waiting_.push_back(std::move(request)); });
    return Ticket(this, std::move(state));
  }
  void wait_all() override {
    while (!waiting_.empty()) run_one();
  }
  std::string_view name() const override { return "failing"; }

 protected:
  void wait(Ticket::State& state) override {
    while (!done(state)) run_one();
  }
  bool done(const Ticket::State& state) override { return state.requests_left == 0; }

 private:
  void run_one() {
    Request request = std::move(waiting_.front());
    waiting_.pop_front();
    const Transfer& t = request.state->transfer;
    long result = outcome(t);
    if (result == 1) {
      const int file = t.file->descriptor();
      const auto offset = static_cast<off_t>(request.offset);
      result = t.direction == Direction::read ? ::pread(file, request.buffer, request.bytes, offset)
                                              : ::pwrite(file, request.buffer, request.bytes, offset);
    }
    if (advance(request, result)) waiting_.push_front(std::move(request));
  }

  std::deque<Request> waiting_;
};

}  // namespace zeropage
