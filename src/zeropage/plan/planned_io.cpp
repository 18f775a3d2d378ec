#include <utility>

#include "zeropage/io/transfer_queue.h"
#include "zeropage/plan/machine.h"

namespace zeropage {
namespace {

class PlannedIo final : public Io {
 public:
  PlannedIo(std::shared_ptr<Machine> machine, const IoOptions& options)
      : machine_(std::move(machine)), queue_(options.depth ? options.depth : kDepth, options.block_bytes) {}
  ~PlannedIo() override { wait_all(); }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    queue_.push(std::make_shared<TransferState>(transfer, std::move(completion)), priority);
    start_requests();
  }
  void expedite(std::span<const std::byte> memory) override {
    queue_.expedite(memory);
    start_requests();
  }
  void wait_all() override {
    const VirtualClock::Entered entered(machine_->clock);
    while (!queue_.idle() && machine_->clock.run_next()) {
    }
  }
  std::string_view name() const override { return "planned"; }

 private:
  static constexpr std::size_t kDepth = 64;  // like io_uring's

  void start_requests() {
    while (auto request = queue_.pop()) {
      const MachineSpeeds& speeds = machine_->speeds;
      const bool reads = request->state->transfer.direction == Direction::read;
      const double seconds = static_cast<double>(request->bytes) / (reads ? speeds.disk_read : speeds.disk_write);
      const auto served = machine_->disk.serve(machine_->clock.now(), seconds);
      machine_->clock.at(VirtualClock::after(served, speeds.disk_latency),
                         [this, request = std::make_shared<Request>(std::move(*request))] { end(*request); });
    }
  }

  void end(Request& request) {
    queue_.over(request);
    if (machine_->speeds.is_unified) machine_->clock.owe(machine_->speeds.disk_beside * request.bytes);
    const auto state = request.state;
    const bool is_over = advance(request, static_cast<long>(request.bytes)) == Advance::transfer_over;
    start_requests();
    if (!is_over) return;
    state->finish();
    queue_.finished(*state);
  }

  const std::shared_ptr<Machine> machine_;
  TransferQueue queue_;
};

}  // namespace

std::unique_ptr<Io> make_planned_io(std::shared_ptr<Machine> machine, const IoOptions& options) {
  return std::make_unique<PlannedIo>(std::move(machine), options);
}

}  // namespace zeropage
