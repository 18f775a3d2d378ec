// Pins of single pages: how rules stream a tensor.
//
// Contract: a pin is granted as soon as there is memory; the read may still be in flight. A page to be overwritten
// has no content in its frame. The thread that pins it has claimed it, and other threads wait until that thread
// writes it or unpins it. Until PagePin::wait(), and if its writer throws, the page keeps its home content.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "zeropage/pager/cache/gate.h"
#include "zeropage/pager/cache/grants.h"
#include "zeropage/pager/foresight/read_ahead.h"

namespace zeropage {

class PagePins;

/// A page that another cache has lent, until the pin ends.
class PageLoan {
 public:
  PageLoan() = default;
  virtual ~PageLoan() = default;
  PageLoan(const PageLoan&) = delete;
  PageLoan& operator=(const PageLoan&) = delete;
  bool waited_for = false;  // the page may have been written
};

/// One page pinned for a rule. Its read may still be in flight: call wait() before touching data().
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
    std::swap(is_brief_, other.is_brief_);
    std::swap(thread_, other.thread_);
    std::swap(loan_, other.loan_);
    std::swap(exceptions_, other.exceptions_);
    std::swap(written_, other.written_);
    return *this;
  }
  ~PagePin();

  /// Returns when the bytes have been read or, for an overwrite, when they may be written. Until then a page to be
  /// overwritten keeps its content. Throws DiskError if the read failed.
  void wait();
  /// The same without waiting; false if it would have to wait.
  [[nodiscard]] bool try_wait();
  /// On a device: orders the calling thread's stream after all operators that have used the page.
  void wait_for_uses();
  /// The segment's bytes of this page; in device memory if the device has its own.
  std::byte* data() const { return data_; }
  /// Hints that the page is not used again soon, if the plan does not know.
  void will_not_reuse() { will_not_reuse_ = true; }
  /// Keeps the caller's bytes of a page pinned to be overwritten. Without this call, the page gets its earlier
  /// content back if an exception ends the pin.
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
  bool is_brief_ = false;     // its holder waits for nothing
  std::uint64_t thread_ = 0;  // the thread that took it
  std::unique_ptr<PageLoan> loan_;
  int exceptions_ = 0;  // uncaught when it was taken
  bool written_ = false;
};

class PagePins {
 public:
  PagePins(Monitor& monitor, FrameMemory& memory, Budgets& budgets, Timeline& timeline, Frames& frames,
           Transfers& transfers, Grants& grants, Room& room, ReadAhead& ahead)
      : monitor_(monitor),
        memory_(memory),
        budgets_(budgets),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        grants_(grants),
        room_(room),
        ahead_(ahead) {}

  // See FrameCache.
  void announce(std::span<const PinRequest> requests);
  void open_stream(std::span<const PinRequest> requests);
  void hurry_stream(const Segment& segment);
  void close_stream(std::span<const PinRequest> requests) noexcept;
  void reach_in_stream(const Segment& segment, std::size_t page, bool begun) noexcept;
  [[nodiscard]] Grants::Claim claim(Monitor::Lock& lock, std::span<const PinRequest> requests);
  [[nodiscard]] PagePin pin(Segment& segment, std::size_t index, Access access);
  struct Trying {
    bool is_brief = false;  // the caller waits for nothing until the pin ends
    bool brings = false;    // also a page that must be read
  };
  [[nodiscard]] PagePin try_pin(Segment& segment, std::size_t index, Access access, Trying trying);
  /// Pins that met a page without a frame.
  std::size_t faults() const { return faults_; }

 private:
  friend class PagePin;
  using Lock = Monitor::Lock;

  class Taken;
  Taken try_take_frame(Lock& lock, Run& run, std::size_t index, Access access);
  static Grants::Need need_of(const Run& run, std::size_t index);
  void note_page(Run& run, std::size_t index);
  PagePin wrap(Taken& taken, Segment& segment, std::size_t index, Access access);
  void bring_claimed(Lock& lock, Run& run, std::size_t index);
  void let_go(PagePin& pin, bool failed) noexcept;
  void written(PagePin& pin);
  void wait(PagePin& pin);
  bool try_wait(PagePin& pin);
  void begin_use(PagePin& pin);
  static void give_back_unused(Frame& frame, const Page& page);
  void wait_for_uses(const PagePin& pin);

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  Grants& grants_;
  Room& room_;
  ReadAhead& ahead_;
  std::size_t faults_ = 0;
};

}  // namespace zeropage
