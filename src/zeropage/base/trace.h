// Records a timeline to a file for Perfetto and Chrome's viewer (the Trace Event Format: JSON). Without a recording,
// each function costs one load. Any thread may call any of them, under any lock: inside their own lock they call
// nothing else. A forked child records nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "zeropage/base/clock.h"

namespace zeropage {

class Trace {
 public:
  using Clock = zeropage::Clock;
  using Time = Clock::time_point;

  static bool is_on() { return on_.load(std::memory_order_relaxed); }

  /// Records to a new file, replacing an existing one. Throws ConfigError if a recording is active, DiskError if the
  /// file cannot be written.
  static void start(const std::string& path);
  /// Ends the recording, and returns when all of it is in the file. Throws DiskError on failure. Without a recording
  /// it does nothing.
  static void stop();

  /// Records this thread's activity from `begin` to `end`. `args`: members of a JSON object, made by arg(), or empty.
  static void span(std::string_view category, std::string_view name, Time begin, Time end,
                   std::string_view args = {});
  /// Record the start and end of an activity that overlaps others of its category. `id`: unique among those in
  /// progress.
  static void begin(std::string_view category, std::uint64_t id, std::string_view args);
  static void end(std::string_view category, std::uint64_t id);
  /// Records the value from now on.
  static void counter(std::string_view name, std::uint64_t value);

  /// "\"name\": \"text\"", escaped.
  static std::string arg(std::string_view name, std::string_view text);

 private:
  static inline std::atomic<bool> on_ = false;
};

/// A span that ends with this object.
class TraceSpan {
 public:
  TraceSpan(std::string_view category, std::string_view name) : category_(category), name_(name) {
    if (Trace::is_on()) begin_ = Trace::Clock::now();
  }
  ~TraceSpan() {
    if (begin_ != Trace::Time{} && Trace::is_on()) Trace::span(category_, name_, begin_, Trace::Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  std::string_view category_, name_;  // must outlive it
  Trace::Time begin_{};
};

}  // namespace zeropage
