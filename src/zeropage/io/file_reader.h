// Reads ranges of one file in a given order at the disk's speed, past the page cache, while the caller uses earlier
// ranges. The counterpart of FileWriter.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zeropage/io/buffers.h"
#include "zeropage/io/io.h"

namespace zeropage {

class FileReader {
 public:
  static constexpr std::size_t kMostBytes = 4 * kMiB;  // of a range
  static constexpr std::size_t kBuffers = 3;

  struct Range {
    std::uint64_t offset;  // in the file
    std::size_t bytes;     // 1 to kMostBytes
  };

  /// A buffer for reads. Several readers may share it, one at a time.
  struct Block {
    Buffer memory;
    Ticket ticket;
  };
  using Blocks = std::vector<Block>;
  static std::shared_ptr<Blocks> make_blocks();

  /// Throws DiskError if the file cannot be opened.
  FileReader(Io& io, const std::string& path, std::shared_ptr<Blocks> blocks = make_blocks());

  /// Calls `visit` for each range in turn, with its index and its bytes. Throws DiskError, and exceptions of `visit`.
  void read(std::span<const Range> ranges,
            const std::function<void(std::size_t index, std::span<const std::byte>)>& visit);
  std::uint64_t size() const { return size_; }
  const std::string& name() const { return file_.name(); }
  const File& file() const { return file_; }

 private:
  void start(Block& block, const Range& range);

  Io& io_;
  const File file_;
  const File direct_;
  const std::uint64_t size_;
  const std::shared_ptr<Blocks> blocks_;
};

}  // namespace zeropage
