#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/pager/home.h"

namespace zeropage {
namespace {

class DiskHome final : public Home {
 public:
  DiskHome(Io& io, SwapFile& file) : io_(io), file_(file) {}

  std::shared_ptr<Backing> allocate(std::size_t bytes) override {
    auto backing = std::make_shared<Backing>();
    backing->extent = file_.allocate(bytes);
    return backing;
  }

  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override {
    return read_backing(run.backing_of(page), page * run.page_bytes, run.bytes_of(page), into, priority,
                        std::move(done));
  }

  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from, const DeviceMemory::Event&,
                               Priority priority, Done done) override {
    const std::uint64_t offset = run.backing_of(page).extent.offset() + page * run.page_bytes;
    return start(Direction::write, offset, run.bytes_of(page), const_cast<std::byte*>(from), priority,
                 std::move(done));
  }

  std::optional<Outcome> read_backing(const Backing& backing, std::uint64_t offset, std::size_t bytes,
                                      std::byte* into, Priority priority, Done done) override {
    if (!backing.source) {
      return start(Direction::read, backing.extent.offset() + offset, bytes, into, priority, std::move(done));
    }
    // Reads exactly these bytes, wherever they begin.
    const auto& file = backing.source.file;
    offset += backing.source.offset;
    io_.start({Direction::read, &file->file_for(offset, bytes), offset, into, bytes}, priority,
              [file, done = std::move(done)](std::exception_ptr error) {
                try {
                  file->check();  // also after a short read: it tells the reason
                } catch (...) {
                  error = std::current_exception();
                }
                done({std::move(error), nullptr});
              });
    return std::nullopt;
  }

  void hurry(const Run&, std::size_t, std::span<std::byte> frame) override { io_.expedite(frame); }

  bool blocks() const override { return false; }

 private:
  std::optional<Outcome> start(Direction direction, std::uint64_t offset, std::size_t bytes, std::byte* at,
                               Priority priority, Done done) {
    std::vector<SwapFile::Piece> pieces;
    file_.for_each_piece(offset, round_up(bytes, kBlockBytes),
                         [&](const SwapFile::Piece& piece) { pieces.push_back(piece); });
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
