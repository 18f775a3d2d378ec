#include "zeropage/space/planned_group.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <bit>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace zeropage {
namespace {

/// Under way until the clock reaches its end.
class PlannedWork final : public c10d::Work {
 public:
  PlannedWork(std::shared_ptr<Machine> machine, Clock::time_point end, bool on_stream)
      : machine_(std::move(machine)), end_(end), on_stream_(on_stream) {}

  /// On a device of its own, the stream waits before its next operators; else this thread waits.
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (on_stream_ && !machine_->speeds.is_unified) {
      machine_->stream_waits(end_, machine_->idle_for_network);
    } else {
      machine_->clock.advance_to(end_);
    }
    return true;
  }
  bool isCompleted() override { return machine_->clock.now() >= end_; }
  bool isSuccess() const override { return true; }

 private:
  const std::shared_ptr<Machine> machine_;
  const Clock::time_point end_;
  const bool on_stream_;
};

class PlannedBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  PlannedBackend(std::shared_ptr<Machine> machine, int ranks) : Backend(0, ranks), machine_(std::move(machine)) {}

  const std::string getBackendName() const override { return "planned"; }

  WorkPtr _allgather_base(at::Tensor& whole, at::Tensor& part, const c10d::AllgatherOptions&) override {
    repeat(part, whole);
    return send(part.nbytes() * (size_ - 1), part);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& part, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return send(part.nbytes() * (size_ - 1), part);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>&, std::vector<std::int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return send(in.nbytes() / size_ * (size_ - 1), out);
  }
  WorkPtr allreduce(std::vector<at::Tensor>& sums, const c10d::AllreduceOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!sums[0].is_meta() && options.reduceOp == c10d::ReduceOp::SUM) sums[0].mul_(static_cast<std::int64_t>(size_));
    return send(2 * sums[0].nbytes() / size_ * (size_ - 1), sums[0]);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override {
    return send(tensors[0].nbytes(), tensors[0]);
  }

 private:
  /// Each rank's part equals this one's.
  static void repeat(const at::Tensor& part, at::Tensor& whole) {
    if (part.is_meta()) return;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    whole.view({-1, part.numel()}).copy_(part.view({1, -1}));
  }

  WorkPtr send(std::size_t bytes, const at::Tensor& like) {
    const MachineSpeeds& speeds = machine_->speeds;
    const bool on_stream = like.is_meta();
    const auto ready = on_stream && !speeds.is_unified ? machine_->stream_ready() : machine_->clock.now();
    const double steps = std::bit_width(static_cast<unsigned>(size_ - 1));
    const auto sent = machine_->network.serve(ready, static_cast<double>(bytes) / speeds.network);
    return c10::make_intrusive<PlannedWork>(machine_, VirtualClock::after(sent, steps * speeds.network_latency),
                                            on_stream);
  }

  const std::shared_ptr<Machine> machine_;
};

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_planned_group(std::shared_ptr<Machine> machine, int ranks) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, ranks);
  const auto backend = c10::make_intrusive<PlannedBackend>(std::move(machine), ranks);
  for (const c10::DeviceType device : {c10::kCPU, c10::kMeta}) {
    group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace zeropage
