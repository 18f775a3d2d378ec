// Grants of memory to operators. An operator asks once for all that it will pin. It waits, while it holds nothing,
// until its bytes fit next to the pins and claims of others. Nothing that it pins then waits for another thread, and
// no two threads can wait for each other.
//
// Requests are granted in the order in which they came. A thread that holds memory and needs more asks out of turn:
// the others may wait for it alone. If every thread that could release memory waits here too, the request fails.
// Lasting pins, such as those of zeropage.pinned(), belong to threads that do other things meanwhile. A request waits
// for them no longer than `longest_wait`.
//
// Contract: under the cache's lock, which it gives up while it waits.
#pragma once

#include <functional>
#include <list>
#include <vector>

#include "zeropage/pager/cache/frames.h"
#include "zeropage/pager/upper_cache.h"

namespace zeropage {

class Grants {
 public:
  using Lock = Monitor::Lock;

  Grants(Monitor& monitor, Budgets& budgets, const FrameMemory& memory, Frames& frames, UpperCache& upper,
         std::chrono::milliseconds longest_wait)
      : monitor_(monitor),
        budgets_(budgets),
        memory_(memory),
        frames_(frames),
        upper_(upper),
        longest_wait_(longest_wait) {}

  /// The bytes that a request will pin in addition to the present pins.
  struct Need {
    std::size_t bytes = 0;  // of frames
    std::size_t held = 0;   // The part that operators hold whole, which device_memory limits.
    std::size_t extra = 0;  // The part that the operator pins later.
  };

  /// Bytes kept until the thread has pinned them. Move-only; constructed and destroyed under the lock, on one thread.
  class Claim {
   public:
    Claim() = default;
    Claim(Claim&& other) noexcept { *this = std::move(other); }
    Claim& operator=(Claim&& other) noexcept {
      std::swap(grants_, other.grants_);
      std::swap(bytes_, other.bytes_);
      std::swap(held_, other.held_);
      return *this;
    }
    ~Claim() {
      if (grants_) grants_->end(bytes_, held_);
    }
    std::size_t bytes() const { return bytes_; }
    std::size_t held() const { return held_; }
    /// The caller ends it by end_claim().
    void leave() { grants_ = nullptr; }

   private:
    friend class Grants;
    Claim(Grants& grants, std::size_t bytes, std::size_t held) : grants_(&grants), bytes_(bytes), held_(held) {}
    Grants* grants_ = nullptr;
    std::size_t bytes_ = 0, held_ = 0;
  };

  /// Returns when `need()` fits, with a claim on it beyond what the thread has claimed already. `need` is called
  /// under the lock, again after each wait, and may throw. Throws BudgetError if it can never be granted.
  [[nodiscard]] Claim wait_for(Lock& lock, const std::function<Need()>& need);
  /// Whether it fits now, and is this thread's turn.
  bool fits(const Need& need) const;
  /// For frames that keep free memory apart: returns true when another thread has dropped a pin, or a frame could
  /// leave; false if that is not to be expected.
  bool wait_for_others(Lock& lock);
  /// Whether a cache of gathered tensors frees memory here after a refusal.
  bool is_below_ranks() const { return upper_.serves() && !upper_.connected(); }
  /// While it lives, the thread waits until `may_go`, and lets go of nothing before. Under the lock.
  class Stuck {
   public:
    Stuck(Grants& grants, const std::function<bool()>& may_go);
    ~Stuck();
    Stuck(const Stuck&) = delete;
    Stuck& operator=(const Stuck&) = delete;

   private:
    friend class Grants;
    Grants& grants_;
    const std::uint64_t thread_ = this_thread_number();
    const std::function<bool()>& may_go_;  // The thread may not have woken since.
  };
  /// Ends transfers of the cache above, which pin pages here and may have finished without a signal.
  bool tidy_above(Lock& lock);

 private:
  struct Ticket {
    std::uint64_t thread;
    bool holds;            // pins or a claim
    bool blocked = false;  // by lasting pins alone: later tickets need not wait for it
  };

  void end(std::size_t bytes, std::size_t held) noexcept;
  bool wait_for_brief_pins(Lock& lock);
  void sleep_until(Lock& lock, Clock::time_point until);
  std::size_t beyond_claim(const Need& need) const;
  bool fits_beside_others(const Need& need) const;
  bool can_never_fit(const Need& need) const;
  Need wait_in_turn(Lock& lock, const std::function<Need()>& need);
  std::size_t unspent() const;
  bool is_waiting(std::uint64_t thread) const;
  bool is_first(const Ticket& ticket) const;
  bool some_will_let_go(std::uint64_t but) const;
  bool some_hold_lastingly(std::uint64_t but) const;
  [[noreturn]] void refuse(const Need& need) const;

  Monitor& monitor_;
  Budgets& budgets_;
  const FrameMemory& memory_;
  Frames& frames_;
  UpperCache& upper_;
  const std::chrono::milliseconds longest_wait_;
  std::list<Ticket> waiting_;        // in the order in which they are granted
  std::vector<const Stuck*> stuck_;  // threads that wait elsewhere for others' memory
};

}  // namespace zeropage
