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
  DiskHome(Io& io, const SwapFile& file) : io_(io), file_(file) {}

  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override {
    return start(Direction::read, run, page, into, priority, std::move(done));
  }

  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from, const DeviceMemory::Event&,
                               Priority priority, Done done) override {
    return start(Direction::write, run, page, const_cast<std::byte*>(from), priority, std::move(done));
  }

  void hurry(const Run&, std::size_t, std::span<std::byte> frame) override { io_.expedite(frame); }

  bool blocks() const override { return false; }

 private:
  std::optional<Outcome> start(Direction direction, const Run& run, std::size_t page, std::byte* at,
                               Priority priority, Done done) {
    std::vector<SwapFile::Piece> pieces;
    file_.for_each_piece(run.offset_on_disk(page), round_up(run.bytes_of(page), kBlockBytes),
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

  /// Of one transfer: it is over when all of them are, and has the error of one that failed.
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

    /// The outcome, if those that were started have ended; else they tell it.
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
  const SwapFile& file_;
};

}  // namespace

std::unique_ptr<Home> make_disk_home(Io& io, const SwapFile& file) { return std::make_unique<DiskHome>(io, file); }

}  // namespace zeropage
