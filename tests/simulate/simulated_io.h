// A disk in memory, in virtual time: slow, out of order, short, failing, as a profile says. A transfer moves half of
// its bytes at one time and half later, and ends later still. Memory that changes, or changes its owner, in between
// leaves a torn page.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "simulate/scheduler.h"
#include "zeropage/io/io.h"

namespace zeropage::simulate {

struct DiskProfile {
  int threads = 1;  // that end transfers
  Duration latency = std::chrono::microseconds(50);
  std::uint64_t slow_in = 0;  // one in so many takes 50 times as long; 0: none
  bool is_serial = false;     // transfers are served one after another
  // One in so many fails; 0: none.
  std::uint64_t refused_in = 0;  // start() throws
  std::uint64_t failed_in = 0;   // EIO, after none or half of the bytes
  std::uint64_t short_in = 0;
  std::uint64_t lost_write = 0;  // the n-th write is confirmed, and not done; 0: none
};

class SimulatedIo final : public Io {
 public:
  SimulatedIo(Threads& threads, Result& result, const DiskProfile& profile);
  ~SimulatedIo() override;

  void start(const Transfer& transfer, Priority priority, Completion completion) override;
  void expedite(std::span<const std::byte> memory) override;
  void wait_all() override;
  std::string_view name() const override { return "simulated"; }

  /// No transfer that starts from now on fails.
  void heal() { profile_.refused_in = profile_.failed_in = profile_.short_in = 0; }

 private:
  enum class Fault : std::uint8_t { none, error, half, lost };
  struct Request {
    Transfer transfer;
    Completion completion;
    Time due;
    Duration step;
    int stage = 0;  // parts that were moved
    Fault fault = Fault::none;
    bool is_in_hand = false;
  };
  using Sector = std::array<std::byte, kBlockBytes>;

  void serve();
  Request* take();
  void move(const Request& request, std::size_t begin, std::size_t end);
  void end(Request& request);
  Fault choose_fault(Direction direction);
  Duration choose_latency(Priority priority);

  Threads& threads_;
  Result& result_;
  DiskProfile profile_;
  std::uint64_t writes_ = 0;
  Time free_at_{};
  bool closing_ = false;
  std::vector<std::unique_ptr<Request>> requests_;
  std::map<std::pair<const File*, std::uint64_t>, Sector> sectors_;
  std::vector<int> servers_, waiters_;
};

}  // namespace zeropage::simulate
