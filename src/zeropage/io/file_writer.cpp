#include "zeropage/io/file_writer.h"

#include <algorithm>
#include <cstring>

#include "zeropage/io/checksum.h"

namespace zeropage {
namespace {

constexpr std::size_t kInCache = 32 * kKiB;  // copied and checksummed while in a core's cache

}  // namespace

FileWriter::FileWriter(Io& io, const File& file, Priority priority, Run run)
    : io_(io),
      file_(file),
      direct_(file.reopen_direct(/*writable=*/true)),
      priority_(priority),
      run_(std::move(run)),
      blocks_(kBuffers) {
  for (Block& block : blocks_) block.memory = make_buffer(kBufferBytes);
}

void FileWriter::begin(std::uint64_t offset) {
  blocks_[current_].ticket.wait();
  base_ = round_down(offset, kBlockBytes);
  begin_ = end_ = offset;
}

std::uint32_t FileWriter::write(std::uint64_t offset, std::span<const std::byte> data, std::uint32_t crc) {
  if (offset != end_ || base_ == end_) {
    send();
    begin(offset);
  }
  while (!data.empty()) {
    if (end_ - base_ == kBufferBytes) {
      send();
      begin(end_);
    }
    const auto part = data.first(std::min(data.size(), kBufferBytes - (end_ - base_)));
    if (run_ && part.size() > kInCache) {
      run_([&] { crc = fill(part, crc); });
    } else {
      crc = fill(part, crc);
    }
    end_ += part.size();
    data = data.subspan(part.size());
  }
  return crc;
}

/// Copies `data` to the end of the current block.
std::uint32_t FileWriter::fill(std::span<const std::byte> data, std::uint32_t crc) {
  std::byte* to = blocks_[current_].memory.get() + (end_ - base_);
  while (!data.empty()) {
    const auto part = data.first(std::min(data.size(), kInCache));
    std::memcpy(to, part.data(), part.size());
    crc = crc32c(crc, part);
    to += part.size();
    data = data.subspan(part.size());
  }
  return crc;
}

/// [Note: edges]
void FileWriter::send() {
  const std::uint64_t begin = begin_, end = end_;
  if (begin == end) {
    base_ = end_;
    return;
  }
  Block& block = blocks_[current_];
  const std::uint64_t base = round_down(begin, kBlockBytes);
  const auto at = [&](std::uint64_t offset) { return block.memory.get() + (offset - base); };
  std::uint64_t middle = round_up(begin, kBlockBytes), tail = round_down(end, kBlockBytes);
  if (!direct_ || middle >= tail) middle = tail = end;
  if (middle > begin) file_.write(begin, at(begin), middle - begin);
  if (end > tail) file_.write(tail, at(tail), end - tail);
  if (tail > middle) {
    block.ticket = io_.submit({Direction::write, &direct_, middle, at(middle), tail - middle}, priority_);
    current_ = (current_ + 1) % blocks_.size();
  }
  begin_ = base_ = end_;  // only now: the next flush() retries a failed write
}

void FileWriter::flush() {
  send();
  for (Block& block : blocks_) block.ticket.wait();
}

void FileWriter::finish() {
  flush();
  if (failed_sync_) std::rethrow_exception(failed_sync_);
  try {
    file_.sync();
  } catch (...) {
    failed_sync_ = std::current_exception();
    throw;
  }
}

}  // namespace zeropage
