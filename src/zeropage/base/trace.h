// A record of what happens when, in a file that Perfetto and Chrome's viewer open (the Trace Event Format: JSON).
// While none is recorded, each function costs one load. Any thread may call any of them, under any lock: they take
// one of their own, inside of which nothing else is called. A forked child records nothing.
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

  /// Records to a new file, in place of one that exists. Throws ConfigError if one is being recorded, DiskError if
  /// the file cannot be written.
  static void start(const std::string& path);
  /// Returns when all is in the file. Throws DiskError if that failed. Nothing if none is recorded.
  static void stop();

  /// What this thread did from `begin` to `end`. `args`: members of a JSON object, as arg() makes them, or empty.
  static void span(std::string_view category, std::string_view name, Time begin, Time end,
                   std::string_view args = {});
  /// What overlaps with others of its kind: begins, and ends. `id`: among those of the category under way.
  static void begin(std::string_view category, std::uint64_t id, std::string_view args);
  static void end(std::string_view category, std::uint64_t id);
  /// A value as it is from now on.
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
  std::string_view category_, name_;  // that outlive it
  Trace::Time begin_{};
};

}  // namespace zeropage
