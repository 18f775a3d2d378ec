#include "zeropage/io/direct_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

/// Ends when several transfers have ended, with the first error among them.
class Together {
 public:
  Together(std::size_t parts, Completion completion) : left_(parts), completion_(std::move(completion)) {}

  void end(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      if (error && !error_) error_ = std::move(error);
      if (--left_ > 0) return;
    }
    std::exchange(completion_, nullptr)(std::move(error_));
  }

 private:
  std::mutex mutex_;
  std::size_t left_;
  std::exception_ptr error_;
  Completion completion_;
};

}  // namespace

DirectFile::DirectFile(File file, Mode mode)
    : mode_(mode), file_(std::move(file)), direct_(file_.reopen_direct(mode == Mode::update)) {}

DirectFile DirectFile::open(const std::string& path, Mode mode) {
  return {File::open(path, /*writable=*/mode == Mode::update), mode};
}

DirectFile DirectFile::create(const std::string& path, std::uint64_t bytes) {
  return {File::create(path, bytes), Mode::update};
}

Ticket DirectFile::start(Io& io, Direction direction, std::uint64_t offset, std::byte* buffer, std::size_t bytes,
                         Priority priority) const {
  if (direction == Direction::write && mode_ == Mode::read) {
    throw DiskError(fmt::format("\"{}\" was opened for reading: open it for updates to write to it", name()), EBADF,
                    name());
  }
  const std::uint64_t end = offset + bytes, first = round_up(offset, kBlockBytes),
                      last = round_down(end, kBlockBytes);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(buffer) % kBlockBytes == offset % kBlockBytes;
  if (!direct_ || !is_aligned || first >= last)
    return io.submit({direction, &file_, offset, buffer, bytes}, priority);
  if (first == offset && last == end) return io.submit({direction, &direct_, offset, buffer, bytes}, priority);

  std::vector<Transfer> parts{{direction, &direct_, first, buffer + (first - offset), last - first}};
  if (offset < first) parts.push_back({direction, &file_, offset, buffer, first - offset});
  if (last < end) parts.push_back({direction, &file_, last, buffer + (last - offset), end - last});
  auto [ticket, completion] = Ticket::pending();
  const auto together = std::make_shared<Together>(parts.size(), std::move(completion));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    try {
      io.start(parts[i], priority, [together](std::exception_ptr error) { together->end(std::move(error)); });
    } catch (...) {  // parts that have started still end, and the ticket with them
      const bool has_started = i > 0;
      for (; i < parts.size(); ++i) together->end(std::current_exception());
      if (!has_started) throw;
    }
  }
  return std::move(ticket);
}

}  // namespace zeropage
