// A modelled machine: a disk, a link to a device and links between ranks, of given speeds, in virtual time ([Note:
// virtual time] in base/clock.h). A space on it stores and computes nothing, but decides and waits as it would on
// such a machine. Free of torch.
//
// Each part is a server that handles requests one after another, in order. A request takes its bytes at the speed of
// its kind, and its result arrives `latency` later. A disk's order is TransferQueue's, as on a real one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "zeropage/base/clock.h"
#include "zeropage/io/io.h"
#include "zeropage/store/device_memory.h"

namespace zeropage {

/// Speeds in bytes a second, latencies in seconds. For one rank: its share of what the ranks of a machine share.
struct MachineSpeeds {
  double disk_read = 3e9, disk_write = 3e9, disk_latency = 100e-6;
  std::size_t disk_bytes = std::size_t{1} << 40;
  double disk_beside = 0;  // seconds that each byte of disk traffic costs a computing thread.
  double upload = 20e9, download = 20e9, link_latency = 10e-6;
  double memory = 20e9;                            // traffic of updates on the host, unless `update` is set.
  double update = 0;                               // the same, measured for this program's optimizer.
  double copy = 10e9;                              // bytes that one thread reads and writes.
  double device_memory = 1e12;                     // the same on the device.
  double network = 10e9, network_latency = 20e-6;  // bytes that a rank sends in a collective.
  bool is_unified = true;                          // operators run on host memory.
  double launch = 5e-6;                            // seconds of this thread per operator, on a separate device.
  std::size_t device_bytes = 0;                    // memory of a separate device.
  std::size_t host_bytes = std::size_t{1} << 40;
};

class Machine {
 public:
  explicit Machine(const MachineSpeeds& speeds) : speeds(speeds) {}

  const MachineSpeeds speeds;
  VirtualClock clock;

  /// A server of one request at a time.
  class Server {
   public:
    /// The end of a request that is made at `now` and takes `seconds`.
    Clock::time_point serve(Clock::time_point now, double seconds) {
      free_at_ = VirtualClock::after(std::max(free_at_, now), seconds);
      busy_seconds_ += seconds;
      return free_at_;
    }
    double busy_seconds() const { return busy_seconds_; }

   private:
    Clock::time_point free_at_{};
    double busy_seconds_ = 0;
  };
  Server disk, uploads, downloads, network;

  /// The end of the separate device's requested work.
  Clock::time_point stream_free{};
  /// The same of its stream for gathers, to which requests go now if `is_aside`.
  Clock::time_point aside_free{};
  bool is_aside = false;
  /// When the stream that requests go to comes to a request that is made now.
  Clock::time_point stream_ready() const { return std::max(is_aside ? aside_free : stream_free, clock.now()); }
  /// Seconds that the stream was idle, waiting for the link or for other ranks. (The program's thread does not wait
  /// for these.)
  double idle_for_link = 0, idle_for_network = 0;
  /// Makes the stream wait until `until`.
  void stream_waits(Clock::time_point until, double& idle) {
    const Clock::time_point from = stream_ready();
    if (until <= from) return;
    if (is_aside) return void(aside_free = until);
    idle += std::chrono::duration<double>(until - from).count();
    stream_free = until;
  }

  /// Seconds of operators, and the part of it that was updates.
  double computed_seconds = 0, updated_seconds = 0;

  /// Adds work to the device's stream, for a caller that may hold locks.
  void compute_later(double seconds) {
    (is_aside ? aside_free : stream_free) = VirtualClock::after(stream_ready(), seconds);
  }
  /// Runs an operator of `seconds`. On a separate device it runs in its stream, concurrently with this thread.
  void compute(double seconds) {
    computed_seconds += seconds;
    if (speeds.is_unified) return clock.advance(seconds);
    compute_later(seconds);
    clock.advance(speeds.launch);
  }
  /// Runs an update that reads and writes `bytes`: on the host, by this thread, or where operators run.
  void update(std::size_t bytes, bool in_host) {
    const bool on_host = in_host || speeds.is_unified;
    const double in_memory = speeds.update > 0 ? speeds.update : speeds.memory;
    const double seconds = static_cast<double>(bytes) / (on_host ? in_memory : speeds.device_memory);
    updated_seconds += seconds;
    if (!on_host) return compute(seconds);
    computed_seconds += seconds;
    clock.advance(seconds);
  }
  /// Compares, like space/bandwidth.h: the host traffic of an update with two states (7 arrays), and the upload of
  /// three arrays, whose download overlaps it.
  bool updates_are_faster_in_host() const { return 7 / speeds.memory < 3 / speeds.upload; }
  /// Copies `bytes` in the memory that operators use.
  void copy(std::size_t bytes) {
    compute(2 * static_cast<double>(bytes) / (speeds.is_unified ? speeds.copy : speeds.device_memory));
  }
  /// Returns when all operators have run.
  void synchronize() { clock.advance_to(std::max(stream_free, clock.now())); }
};

/// The machine's disk, with the request size and depth of `options`.
std::unique_ptr<Io> make_planned_io(std::shared_ptr<Machine> machine, const IoOptions& options);

/// Memory of the machine's device.
std::shared_ptr<DeviceMemory> make_planned_device(std::shared_ptr<Machine> machine, std::size_t bytes);

}  // namespace zeropage
