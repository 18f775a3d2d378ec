// Pins of single pages: how rules stream a tensor.
//
// Contract: a pin is given as soon as there is memory; the read may still be under way. A page that is to be
// overwritten has no content in its frame: the thread that pins it has claimed it, and other threads wait until that
// thread writes it or lets go of it. Until PagePin::wait(), and if what writes it throws, the page is what it is at
// home.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "zeropage/pager/read_ahead.h"

namespace zeropage {

class PagePins;

/// What another cache has lent together with a page, until the pin goes.
class PageLoan {
 public:
  PageLoan() = default;
  virtual ~PageLoan() = default;
  PageLoan(const PageLoan&) = delete;
  PageLoan& operator=(const PageLoan&) = delete;
  bool waited_for = false;  // the page may have been written
};

/// One page held in memory for a rule. Its read may still be under way: wait() before touching data().
class PagePin {
 public:
  PagePin() = default;
  PagePin(PagePin&& other) noexcept { *this = std::move(other); }
  PagePin& operator=(PagePin&& other) noexcept {
    std::swap(pins_, other.pins_);
    std::swap(run_, other.run_);
    std::swap(page_, other.page_);
    std::swap(frame_, other.frame_);
    std::swap(data_, other.data_);
    std::swap(access_, other.access_);
    std::swap(will_not_reuse_, other.will_not_reuse_);
    std::swap(thread_, other.thread_);
    std::swap(loan_, other.loan_);
    std::swap(exceptions_, other.exceptions_);
    std::swap(written_, other.written_);
    return *this;
  }
  ~PagePin();

  /// Returns when the bytes are there, or, of a page that is overwritten, when they may be written. Until then a page
  /// for overwriting keeps its content. Throws DiskError if they could not be read.
  void wait();
  /// On a device: the calling thread's stream goes on after all operators that have used the page.
  void wait_for_uses();
  /// The segment's bytes of this page: on the device, if it has memory of its own.
  std::byte* data() const { return data_; }
  /// The page is not used again soon. A hint, for where the plan does not know.
  void will_not_reuse() { will_not_reuse_ = true; }
  /// Keeps what the caller has written of a page for overwriting. Without this call, the page has its earlier content
  /// if an exception ends the pin.
  void written();
  /// Copies into the page from memory of the same kind.
  void fill(const std::byte* from, std::size_t bytes, std::size_t offset = 0);
  /// `loan` ends after the pin.
  void keep(std::unique_ptr<PageLoan> loan) { loan_ = std::move(loan); }
  explicit operator bool() const { return frame_ != nullptr; }

 private:
  friend class PagePins;
  PagePins* pins_ = nullptr;
  Run* run_ = nullptr;
  std::size_t page_ = 0;
  Frame* frame_ = nullptr;
  std::byte* data_ = nullptr;
  Access access_ = Access::read;
  bool will_not_reuse_ = false;
  std::uint64_t thread_ = 0;  // that took it
  std::unique_ptr<PageLoan> loan_;
  int exceptions_ = 0;  // under way when it was taken
  bool written_ = false;
};

class PagePins {
 public:
  PagePins(Monitor& monitor, FrameMemory& memory, Budgets& budgets, Timeline& timeline, Frames& frames,
           Transfers& transfers, Room& room, ReadAhead& ahead)
      : monitor_(monitor),
        memory_(memory),
        budgets_(budgets),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        room_(room),
        ahead_(ahead) {}

  // As FrameCache says of them.
  void announce(std::span<const PinRequest> requests);
  [[nodiscard]] PagePin pin(Segment& segment, std::size_t index, Access access);
  [[nodiscard]] PagePin try_pin(Segment& segment, std::size_t index, Access access);
  /// Pages that pins met with no frame.
  std::size_t faults() const { return faults_; }

 private:
  friend class PagePin;
  using Lock = Monitor::Lock;

  PagePin take_pin(Frame& frame, Segment& segment, std::size_t index, Access access);
  void bring_claimed(Lock& lock, Run& run, std::size_t index);
  void let_go(PagePin& pin, bool failed) noexcept;
  void written(PagePin& pin);
  void wait(PagePin& pin);
  void wait_for_uses(const PagePin& pin);

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  Room& room_;
  ReadAhead& ahead_;
  std::size_t faults_ = 0;
};

}  // namespace zeropage
