// A machine that is not there: a disk, a link to a device and links between ranks, of given speeds, in virtual time
// ([Note: virtual time] in base/clock.h). A space on it holds nothing and computes nothing; what it decides, and what
// waits for what, is what the same space would do on such a machine. Without torch.
//
// Each is a server: what is asked of it is served one after the other, in the order of asking, each for its bytes at
// the speed of its kind, and is there `latency` after it was served. A disk's order is TransferQueue's, as on a real
// one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "zeropage/base/clock.h"
#include "zeropage/io/io.h"
#include "zeropage/store/device_memory.h"

namespace zeropage {

/// Speeds in bytes a second, latencies in seconds. Of one rank: its share of what ranks of one machine use together.
struct MachineSpeeds {
  double disk_read = 3e9, disk_write = 3e9, disk_latency = 100e-6;
  std::size_t disk_bytes = std::size_t{1} << 40;
  double disk_beside = 0;  // seconds that a byte through the disk takes of a thread that computes meanwhile
  double upload = 20e9, download = 20e9, link_latency = 10e-6;
  double memory = 20e9;                            // what updates on the host read and write; or, if it is not 0:
  double update = 0;                               // the same of this program's optimizer
  double copy = 10e9;                              // what one thread reads and writes
  double device_memory = 1e12;                     // the same on the device
  double network = 10e9, network_latency = 20e-6;  // what a rank sends in a collective
  bool is_unified = true;                          // operators run on the host's memory
  double launch = 5e-6;                            // seconds of this thread an operator, on a device of its own
  std::size_t device_bytes = 0;                    // of a device with memory of its own: what there is
  std::size_t host_bytes = std::size_t{1} << 40;
};

class Machine {
 public:
  explicit Machine(const MachineSpeeds& speeds) : speeds(speeds) {}

  const MachineSpeeds speeds;
  VirtualClock clock;

  /// What serves one request after the other.
  class Server {
   public:
    /// When a request is over that is asked for at `now` and takes so long.
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

  /// Until when the device of its own computes what was asked of it.
  Clock::time_point stream_free{};
  /// That the stream had nothing to do, for what it waited for was on the link, or on its way between ranks. (The
  /// program's thread does not wait for these.)
  double idle_for_link = 0, idle_for_network = 0;
  /// The stream goes on no sooner than then.
  void stream_waits(Clock::time_point until, double& idle) {
    const Clock::time_point from = std::max(stream_free, clock.now());
    if (until <= from) return;
    idle += std::chrono::duration<double>(until - from).count();
    stream_free = until;
  }

  /// Operators took so long; and of that, updates.
  double computed_seconds = 0, updated_seconds = 0;

  /// Work of the device's stream, asked for by a thread that may hold locks.
  void compute_later(double seconds) {
    stream_free = VirtualClock::after(std::max(stream_free, clock.now()), seconds);
  }
  /// An operator of so many seconds. On a device of its own it runs in the order of its stream, beside this thread.
  void compute(double seconds) {
    computed_seconds += seconds;
    if (speeds.is_unified) return clock.advance(seconds);
    compute_later(seconds);
    clock.advance(speeds.launch);
  }
  /// An update reads and writes so many bytes, in the host, by this thread, or where operators run.
  void update(std::size_t bytes, bool in_host) {
    const bool on_host = in_host || speeds.is_unified;
    const double in_memory = speeds.update > 0 ? speeds.update : speeds.memory;
    const double seconds = static_cast<double>(bytes) / (on_host ? in_memory : speeds.device_memory);
    updated_seconds += seconds;
    if (!on_host) return compute(seconds);
    computed_seconds += seconds;
    clock.advance(seconds);
  }
  /// As space/bandwidth.h measures it: what an update with two states reads and writes in the host, or the way up of
  /// three arrays, beside which they come down.
  bool updates_are_faster_in_host() const { return 7 / speeds.memory < 3 / speeds.upload; }
  /// Bytes are read and written where operators run.
  void copy(std::size_t bytes) {
    compute(2 * static_cast<double>(bytes) / (speeds.is_unified ? speeds.copy : speeds.device_memory));
  }
  /// Returns when all that operators were asked is done.
  void synchronize() { clock.advance_to(std::max(stream_free, clock.now())); }
};

/// The machine's disk, as `options` cut and bound requests.
std::unique_ptr<Io> make_planned_io(std::shared_ptr<Machine> machine, const IoOptions& options);

/// Memory of the machine's device.
std::shared_ptr<DeviceMemory> make_planned_device(std::shared_ptr<Machine> machine, std::size_t bytes);

}  // namespace zeropage
