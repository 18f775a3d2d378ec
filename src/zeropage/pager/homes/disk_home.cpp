#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/io/checksum.h"
#include "zeropage/pager/homes/home.h"

namespace zeropage {
namespace {

class DiskHome final : public Home {
 public:
  DiskHome(Io& io, SwapFile& file) : io_(io), file_(file) {}

  SlotRef try_allocate(std::size_t bytes) override {
    Extent extent = file_.try_allocate(bytes);
    return extent ? std::make_shared<Slot>(std::move(extent)) : nullptr;
  }
  void grow(std::size_t bytes) override { file_.grow(bytes); }

  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override {
    return read_slot(run.slot_of(page), run.bytes_of(page), into, priority, std::move(done));
  }

  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from, const DeviceMemory::Event&,
                               Priority priority, Done done) override {
    return start(Direction::write, run.slot_to_write(page).extent, run.bytes_of(page), const_cast<std::byte*>(from),
                 priority, std::move(done));
  }

  std::optional<Outcome> read_slot(const Slot& slot, std::size_t bytes, std::byte* into, Priority priority,
                                   Done done) override {
    if (slot.extent) return start(Direction::read, slot.extent, bytes, into, priority, std::move(done));
    // Reads exactly these bytes, wherever they begin.
    const SourceRange& source = slot.source;
    io_.start({Direction::read, &source.file->file_for(source.offset, bytes), source.offset, into, bytes}, priority,
              [source, expected = slot.expected, into, done = std::move(done)](std::exception_ptr error) {
                try {
                  source.file->check();  // also after a short read: it tells the reason
                  if (!error) compare(source, expected, into);
                } catch (...) {
                  error = std::current_exception();
                }
                done({std::move(error), nullptr});
              });
    return std::nullopt;
  }

  std::optional<Outcome> read_part(const Extent& extent, std::size_t at, std::size_t bytes, std::byte* into,
                                   Priority priority, Done done) override {
    return start(Direction::read, extent, bytes, into, priority, std::move(done), at);
  }

  void hurry(const Run&, std::size_t, std::span<std::byte> frame) override { io_.expedite(frame); }

  bool blocks() const override { return false; }

 private:
  static void compare(const SourceRange& source, const Expected& expected, const std::byte* content) {
    std::uint64_t at = 0;
    for (const Checksum& checksum : expected.checksums) {
      if (crc32c(0, {content + at, checksum.bytes}) != checksum.crc) {
        throw DiskError(fmt::format("\"{}\" is damaged: bytes {} to {} of {} are not what was written; load another "
                                    "checkpoint",
                                    *expected.tensor, source.offset + at, source.offset + at + checksum.bytes,
                                    source.file->name()),
                        EIO, source.file->name());
      }
      at += checksum.bytes;
    }
  }

  /// A transfer of `bytes` of the extent from `first` on.
  std::optional<Outcome> start(Direction direction, const Extent& extent, std::size_t bytes, std::byte* at,
                               Priority priority, Done done, std::size_t first = 0) {
    std::vector<SwapFile::Piece> pieces;
    file_.for_each_piece(extent, first + round_up(bytes, kBlockBytes), [&](const SwapFile::Piece& piece) {
      const std::size_t end = piece.at + piece.bytes, begin = std::max(piece.at, first);
      if (begin < end) pieces.push_back({piece.file, piece.offset + begin - piece.at, begin - first, end - begin});
    });
    const auto all = std::make_shared<Pieces>(pieces.size(), std::move(done));
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const SwapFile::Piece& piece = pieces[i];
      try {
        io_.start({direction, piece.file, piece.offset, at + piece.at, piece.bytes}, priority,
                  [all](std::exception_ptr error) { all->end(std::move(error)); });
      } catch (...) {
        if (i == 0) throw;
        return all->leave_out(pieces.size() - i, std::current_exception());
      }
    }
    return std::nullopt;
  }

  /// Collects the parts of one transfer. It ends when all have ended, with the error of one that failed.
  struct Pieces {
    Pieces(std::size_t count, Done d) : left(count), done(std::move(d)) {}

    void end(std::exception_ptr failure) {
      {
        std::lock_guard lock(mutex);
        if (failure && !error) error = std::move(failure);
        if (--left > 0) return;
      }
      std::exchange(done, nullptr)({std::move(error), nullptr});
    }

    /// The outcome, if all started parts have ended; else the last of them reports it.
    std::optional<Outcome> leave_out(std::size_t pieces, std::exception_ptr failure) {
      std::lock_guard lock(mutex);
      if (!error) error = std::move(failure);
      left -= pieces;
      return left == 0 ? std::optional(Outcome{error, nullptr}) : std::nullopt;
    }

    std::mutex mutex;
    std::size_t left;
    std::exception_ptr error;
    Done done;
  };

  Io& io_;
  SwapFile& file_;
};

}  // namespace

std::unique_ptr<Home> make_disk_home(Io& io, SwapFile& file) { return std::make_unique<DiskHome>(io, file); }

}  // namespace zeropage
