#include <doctest/doctest.h>
#include <torch/torch.h>

#include <atomic>

#include "failing_io.h"
#include "temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/tensor/paged_tensor.h"

using namespace zeropage;

namespace {

/// A domain with a disk that fails on request.
struct Fixture {
  TemporaryDirectory directory;
  FailingIo* disk;
  std::shared_ptr<Domain> domain = std::make_shared<Domain>();

  Fixture() {
    auto io = std::make_unique<FailingIo>();
    disk = io.get();
    CacheOptions options;
    options.device_bytes = kMiB, options.host_bytes = 256 * kKiB;
    options.disk_path = directory.path();
    options.page_bytes = 16 * kKiB;
    domain->cache = FrameCache::make(options, std::move(io));
    std::fill(std::begin(domain->tiers), std::end(domain->tiers), TierChoice::disk);
  }

  torch::Tensor paged(const torch::Tensor& content, Role role) {
    auto tensor = make_paged(domain, content.sizes(), content.strides(), content.dtype(), role);
    tensor.copy_(content);
    return tensor;
  }
};

/// Adam as optimizers write it in single operators.
void adam(torch::Tensor p, torch::Tensor g, torch::Tensor m, torch::Tensor v) {
  m.lerp_(g, 0.1);
  v.mul_(0.999).addcmul_(g, g, 0.001);
  p.addcdiv_(m, v.sqrt().div_(0.03).add_(1e-8), -0.01);
}

}  // namespace

TEST_CASE("a step that the disk interrupts goes on where it stopped, and nothing is applied twice") {
  torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  const auto start = torch::randn({150, 150}), gradient = torch::randn({150, 150});
  auto expected = start.clone(), m0 = torch::zeros_like(start), v0 = torch::zeros_like(start);
  adam(expected, gradient, m0, v0);
  int failures = 0;
  for (int bad = 0; bad < 30; ++bad) {
    Fixture f;
    auto p = f.paged(start, Role::parameter), g = f.paged(gradient, Role::gradient);
    auto m = torch::zeros_like(p), v = torch::zeros_like(p);
    for (const auto& tensor : {p, g, m, v}) f.domain->cache->evict(*segment_of(tensor));
    adam(p, g, m, v);
    g.reset();
    int seen = 0;
    f.disk->set_outcome([&](const Transfer& t) {
      return t.direction == Direction::read && seen++ == bad ? -static_cast<long>(EIO) : 1L;
    });
    bool failed = false;
    try {
      p.sum();
    } catch (const DiskError&) {
      failed = true;
    }
    failures += failed;
    f.disk->set_outcome([](const Transfer&) { return 1L; });
    CHECK(torch::equal(p, expected));
    CHECK(torch::equal(m, m0));
    CHECK(torch::equal(v, v0));
    CHECK_FALSE(segment_of(p)->is_deferred());
  }
  CHECK(failures > 3);  // of 12 reads; the others were read ahead, and are read again
}

TEST_CASE("an error while deferred operators run surfaces once") {
  torch::NoGradGuard no_grad;
  Fixture f;
  auto p = f.paged(torch::ones({150, 150}), Role::parameter), g = f.paged(torch::ones({150, 150}), Role::gradient);
  for (const auto& tensor : {p, g}) f.domain->cache->evict(*segment_of(tensor));
  p.add_(g, -0.5);
  std::atomic<bool> broken = true;
  f.disk->set_outcome(
      [&](const Transfer& t) { return broken && t.direction == Direction::read ? -static_cast<long>(EIO) : 1L; });
  CHECK_THROWS_AS(run_deferred(*f.domain), DiskError);
  broken = false;
  CHECK_NOTHROW(run_deferred(*f.domain));
  CHECK_NOTHROW(run_deferred(*f.domain));
  CHECK(p.sum().item<float>() == 0.5f * 150 * 150);
}

TEST_CASE("temporaries that are still alive get what they were to have") {
  torch::NoGradGuard no_grad;
  Fixture f;
  auto p = f.paged(torch::full({150, 150}, 3.0f), Role::parameter);
  auto dead = p.mul(2.0);
  auto alive = dead.add(1.0);
  dead.reset();
  p.zero_();
  CHECK(segment_of(alive)->is_unallocated());
  CHECK(alive.sum().item<float>() == 7.0f * 150 * 150);
  CHECK_FALSE(segment_of(alive)->is_unallocated());
  CHECK(p.sum().item<float>() == 0.0f);
}
