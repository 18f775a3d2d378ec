// A simulated device, "sim", for machines without a GPU. The host cannot touch its memory, its streams run work later
// than requested, and its link has a set speed. A program that forgets to wait for an event, or reads device memory
// with a pointer, fails here as it would on a GPU.
//
// [Note: two mappings] Device memory is mapped twice. The addresses that tensors hold are inaccessible, so every host
// access faults. The streams' threads reach the same bytes at `shadow()`.
//
// Operators run the CPU's kernels on shadows, on the stream's thread (operators.cpp). Some wait for the stream and
// run at once: random ones, and those whose result has a size or a value that the host must know.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

namespace sim {

inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice(kType, 0);

// --- streams.cpp ---

/// Work in the order in which it was asked for, on a thread of its own.
class Queue {
 public:
  explicit Queue(c10::StreamId id) : id_(id), random_(static_cast<std::uint64_t>(id)) {}

  c10::StreamId id() const { return id_; }
  /// Returns the position behind `work`.
  std::uint64_t push(std::function<void()> work);
  std::uint64_t asked();
  bool done(std::uint64_t position) { return ran_ >= position; }
  void wait(std::uint64_t position);
  /// Returns when all that was asked for is done; throws what an operator threw on the device meanwhile.
  void finish();
  void seed(std::uint64_t seed);
  /// Whether its work crosses the link: a stream of transfers.
  std::atomic<bool> crosses_link = false;

 private:
  void work();
  void delay();

  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> items_;
  std::uint64_t asked_ = 0;
  std::atomic<std::uint64_t> ran_ = 0;
  bool started_ = false;
  std::mt19937_64 random_;
};

struct Event {
  Queue* queue = nullptr;
  std::uint64_t position = 0;
  std::chrono::steady_clock::time_point when{};  // on the host's clock, as soon as it has passed
};

Queue& queue_of(const c10::Stream& stream);
c10::Stream current_stream();
c10::Stream set_current_stream(const c10::Stream& stream);
c10::Stream stream_from_pool();
inline Queue& current_queue() { return queue_of(current_stream()); }
/// Returns when all streams have run dry; throws what an operator threw on the device meanwhile.
void synchronize();
void wait_for_all() noexcept;  // the same without the throwing
/// Where each stream is when it has done what it was asked for, of those that have not.
std::vector<Event> all_under_way();
void throw_failure();
void note_failure(const std::string& what);

/// In a forked child, which has none of the threads.
bool is_forked();

/// Delays each task at random by up to this many microseconds, with this seed. 0: no delay.
void set_delays(std::uint64_t seed, std::int64_t microseconds);
/// Bytes a second, in each direction. 0: as fast as memory is.
void set_link(double bytes_per_second);

/// Counts the waits of a stream or the host for events of another. Tests leave one out to show that it is needed.
inline constexpr c10::StreamId kHost = -1;
class Waits {
 public:
  /// Notes that `waiting` waits for an event of `awaited`. False: this wait is to be left out.
  bool note(c10::StreamId waiting, c10::StreamId awaited);
  void leave_out(c10::StreamId waiting, c10::StreamId awaited);
  void leave_none_out();
  /// [waiting, awaited, how often] one after the other.
  std::vector<std::int64_t> counts();

 private:
  using Pair = std::pair<c10::StreamId, c10::StreamId>;
  std::mutex mutex_;
  std::map<Pair, std::int64_t> counts_;
  std::optional<Pair> left_out_;
};
Waits& waits();

enum class Way { upload, download };
/// Takes the time that `bytes` need on the link, on the thread of a stream.
void cross_link(Way way, std::size_t bytes);

struct Statistics {
  std::atomic<std::uint64_t> uploaded_bytes, downloaded_bytes;
  std::atomic<double> link_seconds;
  std::atomic<double> waited_seconds, host_waited_seconds;  // by streams of operators, and the host, for transfers
  std::atomic<std::uint64_t> operators, synchronous_operators;
};
Statistics& statistics();

// --- memory.cpp ---

/// The address at which the streams' threads see device memory. Null stays null.
void* shadow(const void* device_memory);
c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
/// Memory that transfers may reach while the host goes on.
/// Throws if some of the bytes are registered and others are not, or if two registered pieces hold them:
/// cudaMemcpyAsync refuses to copy those.
bool is_pinned(const void* host_memory, std::size_t bytes = 1);
c10::Allocator* pinned_allocator();

// --- generator.cpp ---

const at::Generator& default_generator();
at::Generator new_generator();
/// The CPU's generator that draws for one of the device; of none, for the device's own.
at::Generator drawing(const at::Generator& generator);

}  // namespace sim
