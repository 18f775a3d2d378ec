// Io over io_uring: one ring, a deep queue, registered buffers; requests that complete in parts are submitted again
// for their rest. What does not fit the queue waits in a list and follows as requests complete.
#include "zeropage/io/transfer_state.h"

#ifdef ZEROPAGE_HAS_LIBURING
#include <fmt/format.h>
#include <liburing.h>
#include <sys/uio.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

constexpr unsigned kDepth = 64;
constexpr unsigned kRegisteredBuffers = 4096;  // slots for regions; an arena announces 64 MiB at a time

class Ring final : public Io {
 public:
  static std::unique_ptr<Io> make(std::string& why) {
    auto ring = std::unique_ptr<Ring>(new Ring);
    const int result = ::io_uring_queue_init(kDepth, &ring->ring_, 0);
    if (result < 0) {
      why = fmt::format("not allowed here ({})", std::strerror(-result));
      return nullptr;
    }
    ring->open_ = true;
    ring->can_register_ = ::io_uring_register_buffers_sparse(&ring->ring_, kRegisteredBuffers) == 0;
    for (unsigned i = 0; i < kDepth; ++i) ring->free_slots_.push_back(i);
    return ring;
  }

  ~Ring() override {
    if (!open_) return;
    wait_all();
    ::io_uring_queue_exit(&ring_);
  }

  Ticket submit(const Transfer& transfer) override {
    auto state = std::make_shared<Ticket::State>(transfer);
    std::lock_guard lock(mutex_);
    cut_into_requests(state, [&](Request request) { waiting_.push_back(std::move(request)); });
    reap();
    start_waiting();
    return Ticket(this, std::move(state));
  }

  void wait_all() override {
    std::lock_guard lock(mutex_);
    while (in_flight() > 0 || !waiting_.empty()) wait_for_one();
  }

  void register_memory(std::span<std::byte> memory) override {
    std::lock_guard lock(mutex_);
    if (!can_register_ || regions_.size() == kRegisteredBuffers) return;
    iovec range{memory.data(), memory.size()};
    __u64 tag = 0;
    // Refused when the process may not lock so much memory: transfers then pin their buffers one by one.
    can_register_ = ::io_uring_register_buffers_update_tag(&ring_, regions_.size(), &range, &tag, 1) == 1;
    if (can_register_) regions_.push_back(memory);
  }

  std::string_view name() const override { return "io_uring"; }

 protected:
  void wait(Ticket::State& state) override {
    std::lock_guard lock(mutex_);
    reap();
    while (!done(state)) wait_for_one();
  }

  bool done(const Ticket::State& state) override { return state.requests_left.load(std::memory_order_acquire) == 0; }

 private:
  Ring() = default;

  std::size_t in_flight() const { return kDepth - free_slots_.size(); }

  /// Index of the registered region that holds the request whole, or -1.
  int region_of(const Request& request) const {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      const auto& region = regions_[i];
      if (request.buffer >= region.data() && request.buffer + request.bytes <= region.data() + region.size()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void prepare(io_uring_sqe* sqe, const Request& request) const {
    const Transfer& t = request.state->transfer;
    const int file = t.file->descriptor(), region = region_of(request);
    const auto bytes = static_cast<unsigned>(request.bytes);
    if (t.direction == Direction::read) {
      region < 0 ? ::io_uring_prep_read(sqe, file, request.buffer, bytes, request.offset)
                 : ::io_uring_prep_read_fixed(sqe, file, request.buffer, bytes, request.offset, region);
    } else {
      region < 0 ? ::io_uring_prep_write(sqe, file, request.buffer, bytes, request.offset)
                 : ::io_uring_prep_write_fixed(sqe, file, request.buffer, bytes, request.offset, region);
    }
  }

  void start_waiting() {
    unsigned prepared = 0;
    while (!waiting_.empty() && !free_slots_.empty()) {
      io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
      if (!sqe) break;
      const unsigned slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = std::move(waiting_.front());
      waiting_.pop_front();
      prepare(sqe, slots_[slot]);
      ::io_uring_sqe_set_data64(sqe, slot);
      ++prepared;
    }
    if (prepared) submit_prepared();
  }

  void submit_prepared() {
    while (::io_uring_sq_ready(&ring_) > 0) {
      const int result = ::io_uring_submit(&ring_);
      if (result >= 0 || result == -EINTR) continue;
      if (result != -EAGAIN && result != -EBUSY) {
        throw DiskError(fmt::format("io_uring refuses requests: {}; set io to \"threads\"", std::strerror(-result)));
      }
      reap();  // the kernel is short of room: let completions free some
    }
  }

  void complete(io_uring_cqe* cqe) {
    const auto slot = static_cast<unsigned>(::io_uring_cqe_get_data64(cqe));
    const int result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    Request request = std::move(slots_[slot]);
    free_slots_.push_back(slot);
    if (advance(request, result)) waiting_.push_front(std::move(request));
  }

  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (::io_uring_peek_cqe(&ring_, &cqe) == 0) complete(cqe);
  }

  void wait_for_one() {
    start_waiting();
    io_uring_cqe* cqe = nullptr;
    const int result = ::io_uring_wait_cqe(&ring_, &cqe);
    if (result == -EINTR || result == -EAGAIN) return;
    if (result < 0) {
      throw DiskError(fmt::format("io_uring cannot wait: {}; set io to \"threads\"", std::strerror(-result)));
    }
    complete(cqe);
    reap();
    start_waiting();
  }

  std::mutex mutex_;
  io_uring ring_{};
  bool open_ = false;
  bool can_register_ = false;
  std::vector<std::span<std::byte>> regions_;
  std::vector<unsigned> free_slots_;
  Request slots_[kDepth];
  std::deque<Request> waiting_;
};

}  // namespace

std::unique_ptr<Io> make_ring(std::string& why) { return Ring::make(why); }

}  // namespace zeropage

#else

namespace zeropage {

std::unique_ptr<Io> make_ring(std::string& why) {
  why = "not built in (liburing was missing)";
  return nullptr;
}

}  // namespace zeropage

#endif
