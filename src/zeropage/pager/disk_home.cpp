#include "zeropage/base/units.h"
#include "zeropage/pager/home.h"

namespace zeropage {
namespace {

class DiskHome final : public Home {
 public:
  DiskHome(Io& io, const SwapFile& file) : io_(io), file_(file) {}

  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override {
    start(Direction::read, run, page, into, priority, std::move(done));
    return std::nullopt;
  }

  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from, const DeviceMemory::Event&,
                               Priority priority, Done done) override {
    start(Direction::write, run, page, const_cast<std::byte*>(from), priority, std::move(done));
    return std::nullopt;
  }

  void hurry(const Run&, std::size_t, std::byte* frame) override { io_.expedite(frame); }

  bool blocks() const override { return false; }

 private:
  void start(Direction direction, const Run& run, std::size_t page, std::byte* at, Priority priority, Done done) {
    io_.start({direction, &file_.file(), run.offset_on_disk(page), at, round_up(run.bytes_of(page), kBlockBytes)},
              priority, [done = std::move(done)](std::exception_ptr error) { done({std::move(error), nullptr}); });
  }

  Io& io_;
  const SwapFile& file_;
};

}  // namespace

std::unique_ptr<Home> make_disk_home(Io& io, const SwapFile& file) { return std::make_unique<DiskHome>(io, file); }

}  // namespace zeropage
