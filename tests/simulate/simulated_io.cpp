#include "simulate/simulated_io.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "zeropage/base/errors.h"

namespace zeropage::simulate {
namespace {

constexpr std::byte kNeverWritten{0xDB};

}  // namespace

SimulatedIo::SimulatedIo(Threads& threads, Result& result, const DiskProfile& profile)
    : threads_(threads), result_(result), profile_(profile) {
  for (int i = 0; i < profile.threads; ++i) {
    servers_.push_back(threads_.spawn(fmt::format("disk {}", i), [this] { serve(); }));
  }
}

SimulatedIo::~SimulatedIo() {
  closing_ = true;
  for (const int server : servers_) threads_.unpark(server);
  for (const int server : servers_) threads_.join(server);
}

SimulatedIo::Fault SimulatedIo::choose_fault(Direction direction) {
  Random& random = threads_.random();
  if (direction == Direction::write && ++writes_ == profile_.lost_write) return Fault::lost;
  const bool fails = one_in(random, profile_.failed_in);
  const bool is_short = one_in(random, profile_.short_in);
  if (!fails && !is_short) return Fault::none;
  ++result_.faults_injected;
  return is_short || one_in(random, 2) ? Fault::half : Fault::error;
}

Duration SimulatedIo::choose_latency(Priority priority) {
  Random& random = threads_.random();
  Duration latency =
      profile_.latency / 4 + Duration(below(random, static_cast<std::uint64_t>(profile_.latency.count())));
  if (one_in(random, profile_.slow_in)) latency *= 50;
  return priority == Priority::demanded ? latency : latency * (1 + static_cast<int>(priority));
}

void SimulatedIo::start(const Transfer& transfer, Priority priority, Completion completion) {
  threads_.yield('i');
  if (one_in(threads_.random(), profile_.refused_in)) {
    ++result_.faults_injected;
    throw DiskError("the simulated disk takes no transfer", EAGAIN);
  }
  auto request = std::make_unique<Request>();
  request->transfer = transfer;
  request->completion = std::move(completion);
  request->step = choose_latency(priority) / 2;
  const Time begin = profile_.is_serial ? std::max(free_at_, threads_.now()) : threads_.now();
  request->due = begin + request->step;
  if (profile_.is_serial) free_at_ = begin + 2 * request->step;
  request->fault = choose_fault(transfer.direction);
  requests_.push_back(std::move(request));
  ++result_.transfers;
  for (const int server : servers_) threads_.unpark(server);
}

void SimulatedIo::expedite(std::span<const std::byte> memory) {
  threads_.yield('x');
  for (const auto& request : requests_) {
    const std::byte* const at = request->transfer.buffer;
    if (at < memory.data() || at >= memory.data() + memory.size()) continue;
    request->step = std::min(request->step, profile_.latency / 4);
    request->due = std::min(request->due, threads_.now() + request->step);
  }
  for (const int server : servers_) threads_.unpark(server);
}

void SimulatedIo::wait_all() {
  while (!requests_.empty()) {
    waiters_.push_back(threads_.self());
    threads_.park(std::nullopt);
    std::erase(waiters_, threads_.self());
  }
}

/// One of the requests that are due.
SimulatedIo::Request* SimulatedIo::take() {
  std::vector<Request*> due;
  for (const auto& request : requests_) {
    if (!request->is_in_hand && request->due <= threads_.now()) due.push_back(request.get());
  }
  return due.empty() ? nullptr : due[below(threads_.random(), due.size())];
}

void SimulatedIo::serve() {
  while (true) {
    Request* const request = take();
    if (!request) {
      if (closing_ && requests_.empty()) return;
      std::optional<Time> next;
      for (const auto& other : requests_) {
        if (!other->is_in_hand && (!next || other->due < *next)) next = other->due;
      }
      threads_.park(next);
      continue;
    }
    request->is_in_hand = true;
    const std::size_t bytes = request->transfer.bytes, half = bytes / 2;
    const bool moves_first = request->fault == Fault::none || request->fault == Fault::half;
    if (request->stage == 0 && moves_first) move(*request, 0, half);
    if (request->stage == 1 && request->fault == Fault::none) move(*request, half, bytes);
    if (++request->stage == 3) {
      end(*request);
    } else {
      request->due = threads_.now() + request->step;
      request->is_in_hand = false;
    }
    threads_.yield('d');
  }
}

void SimulatedIo::end(Request& request) {
  std::exception_ptr error;
  const Transfer& transfer = request.transfer;
  if (request.fault == Fault::error || request.fault == Fault::half) {
    error = std::make_exception_ptr(DiskError(
        fmt::format("a simulated {} of {} bytes at {} failed",
                    transfer.direction == Direction::read ? "read" : "write", transfer.bytes, transfer.offset),
        EIO));
  }
  const Completion completion = std::move(request.completion);
  completion(error);
  std::erase_if(requests_, [&](const auto& other) { return other.get() == &request; });
  for (const int waiter : waiters_) threads_.unpark(waiter);
  for (const int server : servers_) threads_.unpark(server);
}

void SimulatedIo::move(const Request& request, std::size_t begin, std::size_t end) {
  const Transfer& transfer = request.transfer;
  for (std::size_t at = begin; at < end;) {
    const std::uint64_t position = transfer.offset + at;
    const std::size_t within = position % kBlockBytes, bytes = std::min(end - at, kBlockBytes - within);
    auto [sector, is_new] = sectors_.try_emplace({transfer.file, position / kBlockBytes});
    if (is_new) sector->second.fill(kNeverWritten);
    std::byte* const stored = sector->second.data() + within;
    transfer.direction == Direction::read ? std::memcpy(transfer.buffer + at, stored, bytes)
                                          : std::memcpy(stored, transfer.buffer + at, bytes);
    at += bytes;
  }
}

}  // namespace zeropage::simulate
