#include "zeropage/comm/neighbours.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "zeropage/base/process.h"

namespace zeropage {
namespace {

using namespace std::chrono_literals;
using Time = std::chrono::steady_clock;
constexpr Time::time_point kNever = Time::time_point::max();

constexpr std::uint64_t kOffers = 64;  // that one rank may have open to another in a channel
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

void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds most) {
  const timespec limit{most.count() / 1000, most.count() % 1000 * 1'000'000};
  // Shared between processes. Returns for any reason: the caller looks again.
  (void)::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(const std::atomic<std::uint32_t>& word) {
  (void)::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

constexpr int kOtherOffer = EPROTO;  // what is offered is not what this rank expects

std::string text_of(int error) {
  return error == kOtherOffer ? "it offers something else" : std::generic_category().message(error);
}

}  // namespace

struct Neighbours::Offer {
  std::atomic<std::uint64_t> number;  // of the exchange; 0: not valid
  std::uint64_t tag, at, bytes;
};

/// In memory that all ranks of the host map; written by its owner alone.
struct Neighbours::Board {
  std::atomic<std::uint32_t> bell;     // rings at every change
  std::atomic<std::uint32_t> is_over;  // closed or failed

  /// The last of another rank's offers that this rank has read, and an error's number or 0.
  struct Answer {
    std::atomic<std::uint64_t> number;
    std::atomic<std::uint64_t> error;
  };
  // Then, for each channel and rank: an answer, and kOffers offers.
};

namespace {

constexpr std::size_t kHeader = 64;
constexpr std::size_t kAnswerBytes = 16, kOfferBytes = 32;

}  // namespace

std::size_t Neighbours::board_bytes() const {
  return kHeader + kChannels * static_cast<std::size_t>(ranks_) * (kAnswerBytes + kOffers * kOfferBytes);
}

struct Neighbours::Peer {
  Peer(pid_t process, int watch, Board* board, std::size_t bytes)
      : process(process), watch(watch), board(board), bytes(bytes) {}
  ~Peer() {
    ::munmap(board, bytes);
    if (watch >= 0) ::close(watch);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  bool has_ended() const {
    pollfd ended{watch, POLLIN, 0};
    return watch >= 0 && ::poll(&ended, 1, 0) > 0;
  }

  pid_t process;
  int watch;  // readable once the process has ended; -1: the system cannot tell
  Board* board;
  std::size_t bytes;
  std::array<std::uint64_t, kChannels> started = {};  // exchanges with it
};

namespace {

std::byte* place_in(void* board, std::size_t channel, int ranks, int other) {
  const std::size_t each = kAnswerBytes + kOffers * kOfferBytes;
  const std::size_t index = channel * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(other);
  return static_cast<std::byte*>(board) + kHeader + index * each;
}

}  // namespace

Neighbours::Offer& Neighbours::offer_at(Board& board, Channel channel, int reader, std::uint64_t number) const {
  std::byte* const place = place_in(&board, static_cast<std::size_t>(channel), ranks_, reader);
  return *reinterpret_cast<Offer*>(place + kAnswerBytes + number % kOffers * kOfferBytes);
}

/// One exchange.
class Neighbours::Running final : public Exchange {
 public:
  struct In {
    Incoming part;
    std::uint64_t number;
  };
  struct Out {
    Outgoing part;
    std::uint64_t number;
  };

  Running(const Neighbours& owner, Channel channel, std::uint64_t tag)
      : owner_(owner), channel_(channel), tag_(tag) {}

  void wait(std::chrono::milliseconds most) override {
    if (owner_.generation_ != process_generation()) {  // the board is the parent's too
      throw std::runtime_error("a forked child cannot wait for its parent's exchanges");
    }
    // The thread that reads has no limit of its own: ranks may be far apart as long as nobody waits.
    const Time::time_point limit = Time::now() + (most > 0ms ? std::min(most, owner_.timeout_) : owner_.timeout_);
    try {
      {
        std::unique_lock lock(mutex_);
        const auto is_over = [&] { return is_read_ || failure_; };
        if (!ended_.wait_until(lock, limit, is_over)) {
          throw std::runtime_error(fmt::format("rank {} does not answer", awaited_.load()));
        }
        if (failure_) throw std::runtime_error(*failure_);
      }
      for (const Out& out : outgoing) await_reader(out, limit);
    } catch (const std::exception& error) {
      withdraw(error.what());
      throw;
    }
  }

  /// Copies each part once it is offered. On the channel's thread.
  void read() {
    try {
      for (const In& in : incoming) {
        const Offer& offer = await_offer(in);
        const int error = copy(in, offer);
        answer(in, error);
        if (error != 0) {
          throw std::runtime_error(
              fmt::format("the memory of rank {} cannot be read: {}", in.part.rank, text_of(error)));
        }
      }
      std::lock_guard lock(mutex_);
      is_read_ = true;
      ended_.notify_all();
    } catch (const std::exception& error) {
      owner_.fail();
      fail(error.what());
    }
  }

  /// Until the other rank has read the offer whose place this one takes.
  void await_place(const Out& out) const {
    if (out.number > kOffers) await_reader({out.part, out.number - kOffers}, Time::now() + owner_.timeout_);
  }

  void fail(const std::string& failure) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = failure;
    ended_.notify_all();
  }

  std::vector<In> incoming;
  std::vector<Out> outgoing;

 private:
  Peer& peer(int rank) const { return *owner_.peers_[static_cast<std::size_t>(rank)]; }

  /// Until `there` is true of the other rank's board.
  template <class There>
  void await(int rank, Time::time_point limit, There&& there) const {
    const Peer& other = peer(rank);
    while (true) {
      const std::uint32_t seen = other.board->bell.load(std::memory_order_acquire);
      if (there()) return;
      if (other.board->is_over.load(std::memory_order_acquire)) {
        throw std::runtime_error(fmt::format("rank {} has failed or closed its space", rank));
      }
      if (owner_.board_->is_over.load(std::memory_order_acquire)) {
        throw std::runtime_error("an earlier exchange has failed, or the space was closed");
      }
      if (other.has_ended()) throw std::runtime_error(fmt::format("the process of rank {} has ended", rank));
      if (Time::now() >= limit) throw std::runtime_error(fmt::format("rank {} does not answer", rank));
      wait_for_change(other.board->bell, seen, 50ms);
    }
  }

  const Offer& await_offer(const In& in) {
    awaited_ = in.part.rank;
    const Offer& offer = owner_.offer_at(*peer(in.part.rank).board, channel_, owner_.rank_, in.number);
    await(in.part.rank, kNever, [&] { return offer.number.load(std::memory_order_acquire) == in.number; });
    return offer;
  }

  int copy(const In& in, const Offer& offer) {
    std::lock_guard lock(mutex_);
    if (failure_) return ECANCELED;  // wait() has given up, and the memory may be another's
    if (offer.tag != tag_ || offer.bytes != in.part.bytes) return kOtherOffer;
    const int error = copy_from(peer(in.part.rank).process, offer.at, in.part.into, in.part.bytes);
    if (error != 0) return error;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return offer.number.load(std::memory_order_acquire) == in.number ? 0 : ECANCELED;
  }

  void answer(const In& in, int error) const {
    auto* const place = reinterpret_cast<Board::Answer*>(
        place_in(owner_.board_, static_cast<std::size_t>(channel_), owner_.ranks_, in.part.rank));
    if (error != 0) place->error.store(static_cast<std::uint64_t>(error), std::memory_order_release);
    place->number.store(in.number, std::memory_order_release);
    owner_.ring();
  }

  void await_reader(const Out& out, Time::time_point limit) const {
    const auto* const place = reinterpret_cast<const Board::Answer*>(
        place_in(peer(out.part.rank).board, static_cast<std::size_t>(channel_), owner_.ranks_, owner_.rank_));
    await(out.part.rank, limit, [&] { return place->number.load(std::memory_order_acquire) >= out.number; });
    if (const auto error = static_cast<int>(place->error.load(std::memory_order_acquire)); error != 0) {
      throw std::runtime_error(
          fmt::format("rank {} could not read this rank's memory: {}", out.part.rank, text_of(error)));
    }
  }

  /// The memory may soon hold something else, so nobody may read it. The thread may not write here either.
  void withdraw(const std::string& why) {
    owner_.fail();
    fail(why);
    for (const Out& out : outgoing) {
      Offer& offer = owner_.offer_at(*owner_.board_, channel_, out.part.rank, out.number);
      std::uint64_t number = out.number;
      offer.number.compare_exchange_strong(number, 0);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before whatever is written there next
  }

  const Neighbours& owner_;
  const Channel channel_;
  const std::uint64_t tag_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_read_ = false;
  std::optional<std::string> failure_;  // a text, since each thread throws its own exception
  std::atomic<int> awaited_ = -1;       // the rank whose offer the thread waits for
};

/// The thread that reads for the exchanges of one channel, in their order.
class Neighbours::Reader {
 public:
  Reader() : thread_([this] { run(); }) {}
  ~Reader() {
    {
      std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    came_.notify_all();
    thread_.join();
    for (const auto& exchange : queue_) {
      exchange->fail("the space of this exchange was closed");
    }
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void push(std::shared_ptr<Running> exchange) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(exchange));
    }
    came_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      came_.wait(lock, [&] { return is_closing_ || !queue_.empty(); });
      if (is_closing_) return;
      const std::shared_ptr<Running> exchange = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      exchange->read();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::shared_ptr<Running>> queue_;
  bool is_closing_ = false;
  std::thread thread_;  // the last member: it uses the others
};

Neighbours::Neighbours(int rank, int ranks, std::size_t least_bytes, std::chrono::milliseconds timeout)
    : rank_(rank),
      ranks_(ranks),
      least_bytes_(std::max<std::size_t>(least_bytes, 1)),
      timeout_(timeout),
      generation_(process_generation()),
      peers_(static_cast<std::size_t>(ranks)) {
  static_assert(sizeof(Board) <= kHeader && sizeof(Board::Answer) == kAnswerBytes && sizeof(Offer) == kOfferBytes);
  const auto fails = [](const char* what) { throw std::system_error(errno, std::generic_category(), what); };
  file_ = ::memfd_create("zeropage-board", MFD_CLOEXEC);
  if (file_ < 0) fails("memfd_create");
  void* memory = MAP_FAILED;
  if (::ftruncate(file_, static_cast<off_t>(board_bytes())) == 0) {
    memory = ::mmap(nullptr, board_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    ::close(file_);
    errno = error;
    fails("a board for other ranks");
  }
  board_ = static_cast<Board*>(memory);  // zeros
}

Neighbours::~Neighbours() {
  if (generation_ != process_generation()) {  // a forked child has no such threads
    for (auto& reader : readers_) (void)reader.release();
  } else {
    fail();
    for (auto& reader : readers_) reader = nullptr;
  }
  peers_.clear();
  ::munmap(board_, board_bytes());
  ::close(file_);
}

/// Other ranks look again.
void Neighbours::ring() const {
  board_->bell.fetch_add(1, std::memory_order_release);
  wake_all(board_->bell);
}

/// No exchange can succeed any more, here or on ranks that wait for this one.
void Neighbours::fail() const {
  board_->is_over.store(1, std::memory_order_release);
  ring();
}

std::string Neighbours::introduction() const {
  // Linux's Yama, as on Ubuntu, lets only ancestors look. The process must say that others may.
  (void)::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return fmt::format("{} {} {} {}", host(), ::getpid(), reinterpret_cast<std::uintptr_t>(&probe), file_);
}

Neighbours::Met Neighbours::meet(int rank, const std::string& introduction) {
  std::istringstream words(introduction);
  std::string its_host;
  pid_t process = 0;
  std::uint64_t at = 0, found = 0;
  int file = -1;
  if (!(words >> its_host >> process >> at >> file) || its_host != host()) return Met::elsewhere;
  if (copy_from(process, at, &found, sizeof found) != 0 || found != kProbe) return Met::unreadable;
  const int board = ::open(fmt::format("/proc/{}/fd/{}", process, file).c_str(), O_RDWR | O_CLOEXEC);
  if (board < 0) return Met::unreadable;
  void* const memory = ::mmap(nullptr, board_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, board, 0);
  ::close(board);
  if (memory == MAP_FAILED) return Met::unreadable;
  const auto watch = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
  peers_[static_cast<std::size_t>(rank)] =
      std::make_unique<Peer>(process, watch, static_cast<Board*>(memory), board_bytes());
  return Met::here;
}

void Neighbours::part_from(int rank) { peers_[static_cast<std::size_t>(rank)] = nullptr; }

int Neighbours::count() const {
  return static_cast<int>(std::ranges::count_if(peers_, [](const auto& peer) { return peer != nullptr; }));
}

bool Neighbours::takes(int rank, std::size_t bytes) const {
  return peers_[static_cast<std::size_t>(rank)] && bytes >= least_bytes_;
}

std::shared_ptr<Neighbours::Exchange> Neighbours::exchange(Channel channel, std::uint64_t tag,
                                                           std::vector<Incoming> incoming,
                                                           std::vector<Outgoing> outgoing) {
  const auto index = static_cast<std::size_t>(channel);
  const std::lock_guard lock(starting_[index]);
  const auto made = std::make_shared<Running>(*this, channel, tag);
  // Both ranks of a pair send and receive in each exchange, so one number serves for both.
  for (const Outgoing& part : outgoing) {
    const std::uint64_t number = ++peers_[static_cast<std::size_t>(part.rank)]->started[index];
    made->outgoing.push_back({part, number});
  }
  for (const Incoming& part : incoming) {
    made->incoming.push_back({part, peers_[static_cast<std::size_t>(part.rank)]->started[index]});
  }
  // Whatever can throw comes before the first offer: nobody would withdraw it.
  if (!readers_[index]) readers_[index] = std::make_unique<Reader>();
  for (const Running::Out& out : made->outgoing) made->await_place(out);
  for (const Running::Out& out : made->outgoing) {
    Offer& offer = offer_at(*board_, channel, out.part.rank, out.number);
    offer.tag = tag;
    offer.at = reinterpret_cast<std::uintptr_t>(out.part.from);
    offer.bytes = out.part.bytes;
    offer.number.store(out.number, std::memory_order_release);
  }
  ring();
  readers_[index]->push(made);
  return made;
}

}  // namespace zeropage
