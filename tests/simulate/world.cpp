#include "simulate/world.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeropage::simulate {
namespace {

constexpr int kMostThreads = 32;
/// Usual weights of the kinds of operations.
constexpr std::array<std::uint64_t, kKindsCount> kWeights = {16, 14, 6, 3, 3, 3, 4, 2, 3, 2, 4, 2, 2};

bool is_small(const SegmentSpec& spec, std::size_t page_bytes) {
  return !spec.alone && spec.bytes <= std::max(page_bytes / 4, kBlockBytes) / 4;
}

}  // namespace

Setup Setup::of(std::uint64_t seed, Random& random) {
  Setup setup;
  setup.page_bytes = (std::size_t{4} << below(random, 3)) * kKiB;
  setup.owners = 1 + static_cast<int>(below(random, 4));
  setup.segments = 3 + below(random, 8);
  setup.most_pages = 2 + below(random, 6);
  setup.cycle = 4 + below(random, 12);
  setup.cycles = 4 + static_cast<int>(below(random, 8));
  setup.is_tight = seed % 4 == 1;
  setup.closes_early = seed % 16 == 7;
  setup.has_small_disk = seed % 8 == 3;
  const std::size_t largest = setup.most_pages * setup.page_bytes;
  setup.quota = largest * (1 + below(random, 4) / 3);
  setup.device_homes = one_in(random, 3) ? largest : 0;
  setup.host_homes = one_in(random, 2) ? largest : 0;
  const auto owners = static_cast<std::size_t>(setup.owners);
  const std::size_t asked = owners * setup.quota + largest;  // a checkpoint pins too
  const std::size_t shared_homes = owners * setup.segments * kBlockBytes;
  setup.device_bytes =
      (setup.is_tight ? std::max(asked * (4 + below(random, 4)) / 10, setup.quota + largest) : asked) +
      owners * setup.device_homes + (setup.device_homes ? shared_homes : 0);
  setup.host_bytes = owners * setup.host_homes + (setup.host_homes ? shared_homes : 0) +
                     (one_in(random, 3) ? below(random, 8) * setup.page_bytes : 0);
  setup.device_bytes = round_up(setup.device_bytes, kBlockBytes);
  setup.has_device = seed % 5 == 4;
  if (setup.has_device) setup.host_bytes += (owners + 2) * largest;  // for pages on their way
  setup.surprise_in = below(random, 3) == 0 ? 0 : 4 << below(random, 3);
  setup.disk_bytes =
      setup.has_small_disk ? owners * setup.segments * largest / 2 + (one_in(random, 3) ? 140 * kMiB : 0) : kGiB;
  for (std::size_t kind = 0; kind < kKindsCount; ++kind) {
    setup.weights[kind] = one_in(random, 4) ? 0 : kWeights[kind] << below(random, 4);
  }
  setup.weights[below(random, 2)] += 8;  // some pins
  DiskProfile& disk = setup.disk;
  disk.threads = 1 + static_cast<int>(below(random, 2));
  disk.latency = std::chrono::microseconds(10 << below(random, 7));
  disk.is_serial = one_in(random, 3);
  disk.slow_in = one_in(random, 3) ? 20 : 0;
  if (seed % 2 == 0) return setup;
  if (one_in(random, 3)) disk.refused_in = 20 + below(random, 60);
  if (one_in(random, 2)) disk.failed_in = 10 + below(random, 60);
  if (one_in(random, 3)) disk.short_in = 20 + below(random, 60);
  return setup;
}

std::string Setup::describe() const {
  return fmt::format(
      "{} threads, {} segments of up to {} pages of {} each, {}device {}, host {}, {} server(s), latency {} "
      "us{}{}{}{}, "
      "fails one in {}/{}/{}",
      owners, segments, most_pages, page_bytes, is_tight ? "tight " : "", device_bytes, host_bytes, disk.threads,
      disk.latency.count() / 1000, disk.is_serial ? ", serial" : "", has_small_disk ? ", small disk" : "",
      closes_early ? ", closed early" : "", has_device ? ", device" : "", disk.refused_in, disk.failed_in,
      disk.short_in);
}

World::World(Threads& t, Result& r, const Setup& s) : threads(t), result(r), setup(s), most_(kMostThreads) {
  segments.resize(static_cast<std::size_t>(setup.owners));
}

std::shared_ptr<SimulatedSegment> World::make_segment(int owner, const SegmentSpec& spec) {
  auto made = std::shared_ptr<SimulatedSegment>(new SimulatedSegment(++ids_, owner), [this](SimulatedSegment* dead) {
    const SegmentSpec gone = dead->spec;
    if (dead->cache()) count_home(gone, -1);
    delete dead;
    count_most_homes(gone, /*begins=*/false);
  });
  made->spec = spec;
  count_most_homes(spec, /*begins=*/true);
  cache->bind(*made, spec);
  made->model.resize(made->pages());
  count_home(spec, +1);
  return made;
}

void World::count_home(const SegmentSpec& spec, int change) {
  if (spec.tier == Tier::disk) return;
  if (is_small(spec, setup.page_bytes)) {
    sharing_[static_cast<std::size_t>(spec.role)][static_cast<std::size_t>(spec.tier)] += change;
    return;
  }
  const std::size_t bytes = round_up(spec.bytes, kBlockBytes);
  std::size_t& sum = alone_bytes_[static_cast<int>(spec.tier)];
  sum = change > 0 ? sum + bytes : sum - bytes;
}

/// The fewest bytes of homes in the memory of operators.
std::size_t World::least_home_bytes() const {
  std::size_t bytes = alone_bytes_[0] + (device ? 0 : alone_bytes_[1]);
  for (const auto& tiers : sharing_) {
    for (int tier = 0; tier < (device ? 1 : kTiers); ++tier) bytes += tiers[tier] > 0 ? kBlockBytes : 0;
  }
  return bytes;
}

bool World::is_permanent(const SimulatedSegment& segment) const {
  return segment.spec.tier == Tier::device || (segment.spec.tier == Tier::host && !device);
}

/// Pinned bytes of frames that are not homes.
std::size_t World::pinned_bytes() const {
  std::size_t sum = 0;
  std::set<const std::byte*> seen;
  for (const Grant& grant : grants_) {
    if (!grant.is_home && seen.insert(grant.at).second) sum += grant.bytes;
  }
  return sum;
}

void World::check(const SimulatedSegment& segment, std::size_t page, PageModel& model, const std::byte* at,
                  const char* where) {
  const std::size_t bytes = segment.bytes_of(page);
  ++result.checked_pages;
  Stamp found = 0;
  std::memcpy(&found, at, std::min(bytes, sizeof found));
  if (bytes < sizeof found) found = model.stamp;  // too few bytes to tell
  if (model.may_be(found) && is_filled(at, bytes, found)) {
    model = {found};
    return;
  }
  threads.fail(fmt::format("{}: page {} of segment {} (owner {}, {} on {}) holds {}; it must hold {}", where, page,
                           segment.id(), segment.owner(), segment.bytes(), name_of(segment.spec.tier),
                           describe(at, bytes), model.stamp >> 24));
}

void World::check_operand(const SimulatedSegment& segment, std::size_t page, PageModel& model, const std::byte* at,
                          const char* where, bool now, bool only_if_quiet) {
  if (!device) return only_if_quiet && !is_quiet(segment) ? void() : check(segment, page, model, at, where);
  if (now || !model.others.empty()) {
    return device->run_now([&, where] {
      if (!only_if_quiet || is_quiet(segment)) check(segment, page, model, at, where);
    });
  }
  ++result.checked_pages;
  device->run([this, at, bytes = segment.bytes_of(page), stamp = model.stamp, id = segment.id(), page, where] {
    if (is_filled(at, bytes, stamp)) return;
    threads.fail(fmt::format("{}, on a device: page {} of segment {} holds {}; it must hold {}", where, page, id,
                             describe(at, bytes), stamp >> 24));
  });
}

void World::write_operand(std::byte* at, std::size_t bytes, Stamp stamp) {
  if (!device) return fill(at, bytes, stamp);
  device->run([=] { fill(at, bytes, stamp); });
}

void World::begin_operation() {
  most_[static_cast<std::size_t>(threads.self())] = {};
  note_asked();
}

/// Updates each thread's highest marks.
void World::note_asked() {
  const std::size_t device = whole_ + most_homes_[static_cast<int>(Tier::device)];
  const std::size_t host_homes = most_homes_[static_cast<int>(Tier::host)];
  for (Asked& most : most_) {
    most.device = std::max(most.device, device);
    most.host_homes = std::max(most.host_homes, host_homes);
    most.all = std::max(most.all, device + pages_ + host_homes);
  }
}

void World::begin_asking(std::size_t whole_bytes, std::size_t page_bytes) {
  whole_ += whole_bytes, pages_ += page_bytes;
  note_asked();
}

void World::end_asking(std::size_t whole_bytes, std::size_t page_bytes) {
  whole_ -= whole_bytes, pages_ -= page_bytes;
}

void World::count_most_homes(const SegmentSpec& spec, bool begins) {
  if (spec.tier == Tier::disk) return;
  const std::size_t bytes = round_up(std::max(spec.bytes, kBlockBytes), kBlockBytes);
  std::size_t& sum = most_homes_[static_cast<int>(spec.tier)];
  sum = begins ? sum + bytes : sum - bytes;
  note_asked();
}

void World::judge(const BudgetError& error, bool is_whole) {
  ++result.budget_errors;
  const Asked& most = most_[static_cast<std::size_t>(threads.self())];
  if (is_whole && (most.device > setup.device_bytes || most.host_homes > setup.host_bytes)) return;
  const std::size_t pins = most.all - most.host_homes;
  if (device ? pins > setup.device_bytes : most.all > setup.device_bytes + setup.host_bytes) return;
  // A page in the host's memory for each page that a thread uses.
  if (device && most.all - most.device > setup.host_bytes) return;
  threads.fail(fmt::format(
      "a BudgetError, although at most {} were asked for of device_memory {}, {} by homes of host_memory {}, and {} "
      "in all: {}",
      most.device, setup.device_bytes, most.host_homes, setup.host_bytes, most.all, error.what()));
}

void World::judge(const DiskError& error) {
  ++result.disk_errors;
  if (setup.has_disk_faults()) return;
  threads.fail(fmt::format("a DiskError without a fault: {}", error.what()));
}

void World::hold(const SimulatedSegment& segment, std::size_t page, const std::byte* at, std::size_t bytes) {
  for (const Grant& other : grants_) {
    const bool is_same = other.segment == &segment && other.page == page;
    if (is_same && other.at != at) threads.fail("two pins of one page have different addresses");
    const bool overlaps = other.at < at + bytes && at < other.at + other.bytes;
    if (!is_same && overlaps) {
      threads.fail(fmt::format("page {} of segment {} and page {} of segment {} have the same memory", page,
                               segment.id(), other.page, other.segment->id()));
    }
  }
  grants_.push_back({&segment, page, at, bytes, is_permanent(segment)});
  const std::size_t sum = least_home_bytes() + pinned_bytes();
  const std::size_t limit = setup.device_bytes + (device ? 0 : setup.host_bytes);
  if (sum > limit) threads.fail(fmt::format("pins and homes have {} bytes of {}", sum, limit));
}

void World::let_go(const SimulatedSegment& segment, std::size_t page, const std::byte* at) {
  const auto same = [&](const Grant& g) { return g.segment == &segment && g.page == page && g.at == at; };
  const auto found = std::ranges::find_if(grants_, same);
  if (found == grants_.end()) threads.fail("a pin ends twice");
  grants_.erase(found);
}

void World::check_budgets() {
  if (!cache) return;
  std::size_t used = 0;
  for (const Pool pool : {Pool::device, Pool::host}) {
    const FrameCache::Usage usage = cache->usage(pool);
    used += device && pool == Pool::host ? 0 : usage.now;
    if (usage.now > usage.limit || usage.peak > usage.limit) {
      threads.fail(fmt::format("{} is exceeded: {} now, {} at the peak, of {}", usage.name, usage.now, usage.peak,
                               usage.limit));
    }
  }
  if (is_closing) return;
  const std::size_t pinned = pinned_bytes(), homes = alone_bytes_[0] + (device ? 0 : alone_bytes_[1]);
  if (pinned + homes > used) {
    threads.fail(fmt::format("{} bytes are pinned and {} are homes, but only {} are charged", pinned, homes, used));
  }
}

void World::check_rest(const char* when) {
  // The host's cache below a device's may keep pages that are ready for transfers.
  const std::size_t used = cache->usage(Pool::device).now + (device ? 0 : cache->usage(Pool::host).now);
  std::size_t most = alone_bytes_[0] + (device ? 0 : alone_bytes_[1]);
  for (const auto& tiers : sharing_) {
    for (int tier = 0; tier < (device ? 1 : kTiers); ++tier) {
      most += static_cast<std::size_t>(tiers[tier]) * kBlockBytes;
    }
  }
  if (used >= least_home_bytes() && used <= most) return;
  threads.fail(fmt::format("{}: {} bytes of memory are in use, and homes have {} to {}", when, used,
                           least_home_bytes(), most));
}

void World::check_closed() {
  const std::size_t used = cache->usage(Pool::device).now + cache->usage(Pool::host).now;
  if (used > 0) threads.fail(fmt::format("a closed cache still uses {} bytes of memory", used));
}

}  // namespace zeropage::simulate
