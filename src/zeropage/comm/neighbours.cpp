#include "zeropage/comm/neighbours.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "zeropage/base/no_paging_guard.h"
#include "zeropage/base/process.h"

namespace zeropage {
namespace {

constexpr std::uint64_t kProbe = 0x7a65726f70616765;
const std::uint64_t probe = kProbe;

/// Copies `bytes` at address `from` of a process. Returns 0 or the error's number.
int copy_from(pid_t process, std::uint64_t from, void* to, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const iovec here{static_cast<std::byte*>(to) + done, bytes - done};
    const iovec there{reinterpret_cast<void*>(from + done), bytes - done};
    const ssize_t copied = ::process_vm_readv(process, &here, 1, &there, 1, 0);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) return copied < 0 ? errno : EIO;
    done += static_cast<std::size_t>(copied);
  }
  return 0;
}

std::string linked(const char* path) {
  std::array<char, PATH_MAX> target{};
  const ssize_t length = ::readlink(path, target.data(), target.size());
  return length < 0 ? std::string("?") : std::string(target.data(), static_cast<std::size_t>(length));
}

/// Equal for processes that know each other by the same numbers. Processes with a network of their own count as hosts
/// of their own.
std::string host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}/{}", boot, linked("/proc/self/ns/pid"), linked("/proc/self/ns/net"));
}

}  // namespace

std::string Neighbours::introduction() {
  // Where Linux's Yama lets only ancestors look, as on Ubuntu, the process must say that others may.
  (void)::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return fmt::format("{} {} {}", host(), ::getpid(), reinterpret_cast<std::uintptr_t>(&probe));
}

bool Neighbours::same_host(const std::string& introduction) { return introduction.starts_with(host() + " "); }

pid_t Neighbours::process_of(const std::string& introduction) {
  std::istringstream words(introduction);
  std::string its_host;
  pid_t process = 0;
  std::uint64_t at = 0, found = 0;
  if (!(words >> its_host >> process >> at) || !same_host(introduction)) return 0;
  return copy_from(process, at, &found, sizeof found) == 0 && found == kProbe ? process : 0;
}

/// The message of an offer.
struct Neighbours::Offer {
  std::uint64_t at, bytes;
  std::uint64_t word_at, serial;  // the word holds the serial number as long as the offer is valid
};

class Neighbours::Exchange final : public c10d::Work {
 public:
  struct Incoming {
    Part part;
    at::Tensor message;  // an Offer
    c10::intrusive_ptr<c10d::Work> came;
    at::Tensor answer;  // 0, or the number of an error
    c10::intrusive_ptr<c10d::Work> answered = nullptr;
  };
  struct Outgoing {
    int rank;
    at::Tensor message;
    c10::intrusive_ptr<c10d::Work> sent;
    at::Tensor answer;
    c10::intrusive_ptr<c10d::Work> answered;
  };

  Exchange(Neighbours& owner, c10::weak_intrusive_ptr<c10d::ProcessGroup> group, int answer_tag)
      : owner_(owner), group_(std::move(group)), answer_tag_(answer_tag), word_(owner.take_word()) {}

  ~Exchange() override {
    std::atomic_ref(*word_).store(0);
    owner_.give_back(word_);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    {
      std::unique_lock lock(mutex_);
      const auto is_over = [&] { return is_read_ || failure_; };
      timeout == kNoTimeout ? (void)ended_.wait(lock, is_over) : (void)ended_.wait_for(lock, timeout, is_over);
      if (!is_over()) failure_ = std::make_exception_ptr(std::runtime_error("another rank offers nothing"));
    }
    try {
      if (failure_) std::rethrow_exception(failure_);
      for (const Incoming& part : incoming) part.answered->wait(timeout);
      for (const Outgoing& part : outgoing) {
        part.sent->wait(timeout);
        part.answered->wait(timeout);
        const auto error = static_cast<int>(*part.answer.const_data_ptr<std::int64_t>());
        if (error != 0) {
          throw std::runtime_error(fmt::format("rank {} could not read this rank's memory: {}", part.rank,
                                               std::generic_category().message(error)));
        }
      }
    } catch (...) {
      std::atomic_ref(*word_).store(0);  // others may read what comes to this memory next
      throw;
    }
    return true;
  }

  /// Copies each part once its offer has come. On the owner's thread.
  void read() {
    NoPagingGuard no_paging;
    try {
      for (Incoming& part : incoming) {
        if (!part.came->wait(kNoTimeout)) throw std::runtime_error("the space of this exchange was closed");
        const int error = copy(part);
        *part.answer.mutable_data_ptr<std::int64_t>() = error;
        std::vector<at::Tensor> answer{part.answer};
        const auto group = group_.lock();
        if (!group) throw std::runtime_error("the process group was destroyed");
        part.answered = group->send(answer, part.part.rank, answer_tag_);
        if (error != 0) {
          throw std::runtime_error(fmt::format("the memory of rank {} cannot be read: {}", part.part.rank,
                                               std::generic_category().message(error)));
        }
      }
      std::lock_guard lock(mutex_);
      is_read_ = true;
    } catch (...) {
      fail(std::current_exception());
    }
    ended_.notify_all();
  }

  void fail(std::exception_ptr failure) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    ended_.notify_all();
  }

  /// Ends the wait for offers.
  void abort() override {
    for (const Incoming& part : incoming) part.came->abort();
  }

  Offer offer(const at::Tensor& memory, std::uint64_t serial) const {
    std::atomic_ref(*word_).store(serial);
    return {reinterpret_cast<std::uintptr_t>(memory.const_data_ptr()), memory.nbytes(),
            reinterpret_cast<std::uintptr_t>(word_), serial};
  }

  std::vector<Incoming> incoming;
  std::vector<Outgoing> outgoing;

 private:
  int copy(const Incoming& part) {
    const auto& offer = *static_cast<const Offer*>(part.message.const_data_ptr());
    const pid_t process = owner_.processes_[static_cast<std::size_t>(part.part.rank)];
    const at::Tensor& into = part.part.memory;
    std::lock_guard lock(mutex_);
    if (failure_) return ECANCELED;  // wait() has given up, and the memory may be another's
    if (offer.bytes != into.nbytes()) return EMSGSIZE;
    if (const int error = copy_from(process, offer.at, into.mutable_data_ptr(), into.nbytes())) return error;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::uint64_t serial = 0;
    if (const int error = copy_from(process, offer.word_at, &serial, sizeof serial)) return error;
    return serial == offer.serial ? 0 : ECANCELED;
  }

  Neighbours& owner_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;  // [Note: whose group] in comm/collectives.h
  int answer_tag_;
  std::uint64_t* word_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_read_ = false;
  std::exception_ptr failure_;
};

Neighbours::Neighbours(std::vector<pid_t> processes, std::size_t least_bytes)
    : processes_(std::move(processes)),
      least_bytes_(least_bytes),
      generation_(process_generation()),
      thread_([this] { read(); }) {}

Neighbours::~Neighbours() {
  if (generation_ != process_generation()) {  // a forked child, which has no such thread
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
    if (current_) current_->abort();
  }
  came_.notify_all();
  thread_.join();
}

void Neighbours::read() {
  std::unique_lock lock(mutex_);
  while (true) {
    came_.wait(lock, [&] { return is_closing_ || !queue_.empty(); });
    if (is_closing_) break;
    ExchangePtr exchange = current_ = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    exchange->read();
    lock.lock();
    current_ = nullptr;
    lock.unlock();
    exchange = nullptr;  // its end takes the lock
    lock.lock();
  }
  const auto left = std::exchange(queue_, {});
  lock.unlock();
  for (const ExchangePtr& exchange : left) {
    exchange->fail(std::make_exception_ptr(std::runtime_error("the space of this exchange was closed")));
  }
}

c10::intrusive_ptr<c10d::Work> Neighbours::exchange(c10d::ProcessGroup& group, int offer_tag, int answer_tag,
                                                    std::vector<Part> incoming, const std::vector<Part>& outgoing) {
  auto made = c10::make_intrusive<Exchange>(
      *this, c10::weak_intrusive_ptr(c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group)), answer_tag);
  const auto message = [] { return at::empty({sizeof(Offer) / sizeof(std::int64_t)}, at::kLong); };
  const auto number = [] { return at::empty({1}, at::kLong); };
  const auto receive = [&](const at::Tensor& into, int rank, int tag) {
    std::vector<at::Tensor> tensors{into};
    return group.recv(tensors, rank, tag);
  };
  for (Part& part : incoming) {
    const int rank = part.rank;
    const at::Tensor offer = message();
    made->incoming.push_back({std::move(part), offer, receive(offer, rank, offer_tag), number()});
  }
  const std::uint64_t serial = [&] {
    std::lock_guard lock(mutex_);
    return ++serial_;
  }();
  for (const Part& part : outgoing) {
    const at::Tensor answer = number();
    auto answered = receive(answer, part.rank, answer_tag);
    std::vector<at::Tensor> offer{message()};
    *static_cast<Offer*>(offer[0].mutable_data_ptr()) = made->offer(part.memory, serial);
    auto sent = group.send(offer, part.rank, offer_tag);
    made->outgoing.push_back({part.rank, offer[0], std::move(sent), answer, std::move(answered)});
  }
  std::lock_guard lock(mutex_);
  queue_.push_back(made);
  came_.notify_all();
  return made;
}

std::uint64_t* Neighbours::take_word() {
  std::lock_guard lock(mutex_);
  if (free_words_.empty()) return &words_.emplace_back(0);
  std::uint64_t* const word = free_words_.back();
  free_words_.pop_back();
  return word;
}

void Neighbours::give_back(std::uint64_t* word) {
  std::lock_guard lock(mutex_);
  free_words_.push_back(word);
}

}  // namespace zeropage
