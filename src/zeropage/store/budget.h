// A tier's budget and the charges against it. Reservations never exceed the limit.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

namespace zeropage {

class Budget;

/// A charge of some bytes; its destructor returns them.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  inline ~Reservation();
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return budget_ != nullptr; }

 private:
  friend class Budget;
  Reservation(Budget* budget, std::size_t bytes) : budget_(budget), bytes_(bytes) {}
  Budget* budget_ = nullptr;
  std::size_t bytes_ = 0;
};

class Budget {
 public:
  /// `name` is the setting that errors tell the user to raise.
  Budget(std::string name, std::size_t limit) : name_(std::move(name)), limit_(limit) {}

  /// Returns an empty reservation if it would exceed the limit.
  [[nodiscard]] Reservation try_reserve(std::size_t bytes) {
    if (forgets_one_in > 0 && ++asked_ % forgets_one_in == 0) [[unlikely]]
      return Reservation(this, 0);
    std::size_t used = used_.load();
    do {
      if (bytes > limit_ || used > limit_ - bytes) return {};
    } while (!used_.compare_exchange_weak(used, used + bytes));
    std::size_t peak = peak_.load();
    while (peak < used + bytes && !peak_.compare_exchange_weak(peak, used + bytes)) {
    }
    return Reservation(this, bytes);
  }

  /// A fault for tests to find: one in so many reservations charges nothing; 0: none.
  inline static std::size_t forgets_one_in = 0;

  const std::string& name() const { return name_; }
  std::size_t limit() const { return limit_; }
  std::size_t used() const { return used_.load(); }
  std::size_t peak() const { return peak_.load(); }

 private:
  friend class Reservation;
  std::string name_;
  std::size_t limit_;
  std::atomic<std::size_t> used_{0}, peak_{0};
  std::size_t asked_ = 0;  // only counted while forgets_one_in is set
};

Reservation::~Reservation() {
  if (budget_) budget_->used_.fetch_sub(bytes_);
}

}  // namespace zeropage
