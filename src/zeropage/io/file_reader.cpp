#include "zeropage/io/file_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "zeropage/base/errors.h"

namespace zeropage {

std::shared_ptr<FileReader::Blocks> FileReader::make_blocks() {
  auto blocks = std::make_shared<Blocks>(kBuffers);
  for (Block& block : *blocks) block.memory = make_buffer(kMostBytes + 2 * kBlockBytes);
  return blocks;
}

FileReader::FileReader(Io& io, const std::string& path, std::shared_ptr<Blocks> blocks)
    : io_(io),
      file_(File::open(path, /*writable=*/false)),
      direct_(file_.reopen_direct(/*writable=*/false)),
      size_(file_.size()),
      blocks_(std::move(blocks)) {}

/// Whole disk blocks bypass the page cache. A partial block at the end of the file cannot.
void FileReader::start(Block& block, const Range& range) {
  if (range.bytes > size_ || range.offset > size_ - range.bytes) {
    throw DiskError(fmt::format("{} ends at byte {}, and {} more are expected at {}: it was cut short", file_.name(),
                                size_, range.bytes, range.offset),
                    EIO, file_.name());
  }
  const std::uint64_t begin = round_down(range.offset, kBlockBytes);
  const std::uint64_t end = std::min<std::uint64_t>(round_up(range.offset + range.bytes, kBlockBytes), size_);
  const std::uint64_t middle = direct_ ? std::max(round_down(end, kBlockBytes), begin) : begin;
  if (end > middle) file_.read(middle, block.memory.get() + (middle - begin), end - middle);
  if (middle > begin) {
    block.ticket =
        io_.submit({Direction::read, &direct_, begin, block.memory.get(), middle - begin}, Priority::demanded);
  }
}

void FileReader::read(std::span<const Range> ranges,
                      const std::function<void(std::size_t, std::span<const std::byte>)>& visit) {
  Blocks& blocks = *blocks_;
  const struct Drain {  // after an exception, ends reads in flight before the file is closed
    Blocks& blocks;
    ~Drain() {
      for (Block& block : blocks) block.ticket = {};
    }
  } drain{blocks};
  for (std::size_t i = 0; i < std::min(kBuffers, ranges.size()); ++i) start(blocks[i], ranges[i]);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    Block& block = blocks[i % kBuffers];
    block.ticket.wait();
    visit(i, {block.memory.get() + ranges[i].offset % kBlockBytes, ranges[i].bytes});
    if (i + kBuffers < ranges.size()) start(block, ranges[i + kBuffers]);
  }
}

}  // namespace zeropage
