#include "simulate/program.h"

#include <fmt/format.h>

#include <algorithm>

#include "zeropage/io/buffers.h"

namespace zeropage::simulate {
namespace {

constexpr Access kAccess[] = {Access::read, Access::read, Access::write, Access::overwrite};
constexpr const char* kAccessNames[] = {"read", "write", "overwrite"};
/// Thresholds of 64 for the kinds of operations.
constexpr std::uint64_t kUpTo[] = {16, 30, 36, 39, 42, 45, 49, 51, 54, 56, 60, 62, 64};
static_assert(std::size(kUpTo) == kKindsCount);

/// Records the pins of whole segments while it lives.
class Grants {
 public:
  explicit Grants(World& world) : world_(world) {}
  ~Grants() {
    for (const auto& [segment, page, at] : grants_) world_.let_go(*segment, page, at);
  }
  Grants(const Grants&) = delete;
  Grants& operator=(const Grants&) = delete;
  void add(const SimulatedSegment& segment, std::size_t page, const std::byte* at) {
    world_.hold(segment, page, at, segment.bytes_of(page));
    grants_.emplace_back(&segment, page, at);
  }

 private:
  World& world_;
  std::vector<std::tuple<const SimulatedSegment*, std::size_t, const std::byte*>> grants_;
};

}  // namespace

Owner::Owner(World& world, int number, std::uint64_t seed)
    : world_(world),
      cache_(*world.cache),
      number_(number),
      random_(seed),
      mine_(world.segments[static_cast<std::size_t>(number)]) {}

std::size_t Owner::rounded_bytes(const SimulatedSegment& segment) const {
  return round_up(std::max(segment.bytes(), kBlockBytes), kBlockBytes);
}

SegmentSpec Owner::random_spec(std::size_t index) {
  const std::size_t page = world_.setup.page_bytes;
  SegmentSpec spec{};
  spec.bytes = one_in(random_, 4) ? 1 + below(random_, 1000) : 1 + below(random_, world_.setup.most_pages * page);
  if (one_in(random_, 3)) spec.bytes = round_up(spec.bytes, page);
  spec.row_bytes = one_in(random_, 3) ? 8 * (1 + below(random_, 100)) : 0;
  spec.page_bytes = one_in(random_, 8) ? kBlockBytes : 0;
  spec.role = static_cast<Role>(below(random_, kRoles));
  spec.alone = one_in(random_, 4);
  spec.tier = Tier::disk;
  const Tier tier = one_in(random_, 2) ? Tier::host : Tier::device;
  std::size_t& used = tier == Tier::host ? host_homes_ : device_homes_;
  const std::size_t most = tier == Tier::host ? world_.setup.host_homes : world_.setup.device_homes;
  const std::size_t bytes = round_up(std::max(spec.bytes, kBlockBytes), kBlockBytes);
  if (index % 3 == 2 && used + bytes <= most) {
    spec.tier = tier;
    used += bytes;  // counted forever, so that the books are simple
  }
  return spec;
}

void Owner::make_plan() {
  for (std::size_t i = 0; i < world_.setup.cycle; ++i) plan_.push_back(make_step());
}

Owner::Step Owner::make_step() {
  const std::uint64_t at = below(random_, 64);
  const auto kind = static_cast<Kind>(std::ranges::upper_bound(kUpTo, at) - std::begin(kUpTo));
  Step step{kind, {}, random_()};
  const std::size_t count = 1 + below(random_, 3);
  for (std::size_t i = 0; i < count; ++i) {
    step.members.emplace_back(below(random_, world_.setup.segments), kAccess[below(random_, 4)]);
  }
  return step;
}

void Owner::run() {
  for (std::size_t i = 0; i < world_.setup.segments; ++i) specs_.push_back(random_spec(i));
  mine_.resize(world_.setup.segments);
  make_plan();
  for (std::size_t i = 0; i < mine_.size() && !world_.is_closing; ++i) do_step({Kind::bind, {{i, Access::read}}, i});
  for (int cycle = 0; cycle < world_.setup.cycles; ++cycle) {
    for (Step step : plan_) {
      if (world_.is_closing) return;
      if (one_in(random_, world_.setup.surprise_in)) step = make_step();  // a surprise
      if (one_in(random_, 2)) step.seed = random_();
      if (!world_.setup.skipped.contains(step.kind)) do_step(step);
    }
  }
}

/// Performs an operation, and judges its errors.
void Owner::do_step(const Step& step) {
  details_.seed(step.seed);
  ++world_.result.operations;
  world_.begin_operation();
  try {
    perform(step);
  } catch (const Planned&) {
    world_.threads.doing("failed on purpose");
  } catch (const DiskError& error) {
    world_.threads.doing(error.what());
    world_.judge(error);
  } catch (const BudgetError& error) {
    world_.judge(error, step.kind == Kind::whole || step.kind == Kind::bind || step.kind == Kind::read_others);
  } catch (const VersionOpen& error) {
    if (step.kind != Kind::read_others) world_.threads.fail(error.what());
  } catch (const AccessError& error) {
    if (!world_.is_closing) world_.threads.fail(fmt::format("an AccessError: {}", error.what()));
  }
}

std::vector<Owner::Shared> Owner::members_of(const Step& step, std::vector<Access>& access) const {
  std::vector<Shared> members;
  std::size_t bytes = 0;
  for (const auto& [index, how] : step.members) {
    const Shared& segment = mine_[index];
    if (!segment || std::ranges::find(members, segment) != members.end()) continue;
    bytes += rounded_bytes(*segment);
    if (bytes > world_.setup.quota) break;
    members.push_back(segment);
    access.push_back(how);
  }
  return members;
}

void Owner::perform(const Step& step) {
  std::vector<Access> access;
  const std::vector<Shared> members = members_of(step, access);
  std::string text = kKinds[static_cast<int>(step.kind)];
  for (std::size_t i = 0; i < members.size(); ++i) {
    text += fmt::format(" {} ({})", members[i]->id(), kAccessNames[static_cast<int>(access[i])]);
  }
  world_.threads.doing(text);
  if (step.kind == Kind::bind) return bind(step.members[0].first);
  if (step.kind == Kind::compute) return compute();
  if (step.kind == Kind::evict) return evict();
  if (step.kind == Kind::wait) return cache_.wait();
  if (step.kind == Kind::read_others) return read_others();
  if (members.empty()) return;
  switch (step.kind) {
    case Kind::whole:
      return use_whole(step, members, access);
    case Kind::stream:
      return stream(members, access);
    case Kind::zero:
      return zero(members[0]);
    case Kind::read_home:
      return read_home(members[0]);
    case Kind::version:
      return update_versions(members);
    case Kind::write_behind:
      return cache_.write_behind(*members[0]);
    case Kind::freeze:
      return freeze(members);
    case Kind::below:
      return use_below(members[0], access[0]);
    default:
      break;
  }
}

void Owner::use_whole(const Step&, const std::vector<Shared>& members, const std::vector<Access>& access) {
  std::vector<Busy> busy;
  std::vector<PinRequest> requests;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (access[i] != Access::read) busy.emplace_back(world_, members[i]);
    requests.push_back({members[i].get(), access[i]});
    bytes += rounded_bytes(*members[i]);
  }
  if (chance(8)) requests.push_back({members[0].get(), Access::read});  // named twice
  const bool fails = chance(12);
  const Asking asking(world_, bytes, 0);
  cache_.pin(requests);
  try {
    compute_on(members, access, fails);
  } catch (const Planned&) {
    cache_.unpin(requests, this_thread_number(), /*failed=*/true);
    throw;
  }
  cache_.unpin(requests);
}

/// An operator: reads, and writes page by page. One that fails leaves some pages unwritten.
void Owner::compute_on(const std::vector<Shared>& members, const std::vector<Access>& access, bool fails) {
  Grants grants(world_);
  for (std::size_t i = 0; i < members.size(); ++i) {
    SimulatedSegment& segment = *members[i];
    for (std::size_t page = 0; page < segment.pages(); ++page) {
      grants.add(segment, page, segment.at(page));
      if (access[i] == Access::overwrite || world_.is_closing) continue;
      world_.check_operand(segment, page, segment.model[page], segment.at(page), "an operator", chance(2));
    }
  }
  world_.threads.yield('o');
  if (chance(3)) compute();
  if (fails && chance(2)) throw Planned();
  for (std::size_t i = 0; i < members.size(); ++i) {
    SimulatedSegment& segment = *members[i];
    for (std::size_t page = 0; access[i] != Access::read && page < segment.pages(); ++page) {
      const std::size_t bytes = segment.bytes_of(page), half = bytes / 16 * 8;
      const Stamp stamp = world_.next_stamp(segment, page);
      world_.write_operand(segment.at(page), half, stamp);
      world_.threads.yield('o');
      world_.write_operand(segment.at(page) + half, bytes - half, stamp);
      PageModel& model = segment.model[page];
      // After a failed overwrite a page has either content.
      model.write(stamp, fails && access[i] == Access::overwrite);
      world_.threads.doing(fmt::format("wrote {} to page {} of {}", stamp >> 24, page, segment.id()));
      if (fails && chance(4)) throw Planned();
    }
  }
  world_.threads.yield('o');
  for (std::size_t i = 0; i < members.size(); ++i) {
    SimulatedSegment& segment = *members[i];
    for (std::size_t page = 0; page < segment.pages() && !world_.is_closing && !fails; ++page) {
      world_.check_operand(segment, page, segment.model[page], segment.at(page), "an operator at its end", chance(4));
    }
  }
  if (fails) throw Planned();
}

PagePin Owner::pin_page(SimulatedSegment& segment, std::size_t page, Access access) {
  PagePin pin;
  if (chance(3)) pin = cache_.try_pin_page(segment, page, access);
  if (!pin) pin = cache_.pin_page(segment, page, access);
  return pin;
}

/// A rule's use of a page. A rule that fails leaves an overwritten page with either content.
void Owner::use_page(SimulatedSegment& segment, std::size_t page, PagePin& pin, Access access) {
  pin.wait();
  pin.wait_for_uses();
  Grants grants(world_);
  grants.add(segment, page, pin.data());
  PageModel& model = segment.model[page];
  if (access != Access::overwrite && !world_.is_closing)
    world_.check_operand(segment, page, model, pin.data(), "a rule", chance(2));
  if (access != Access::read) {
    const std::size_t bytes = segment.bytes_of(page), half = bytes / 16 * 8;
    const Stamp stamp = world_.next_stamp(segment, page);
    if (chance(24)) throw Planned();
    world_.write_operand(pin.data(), half, stamp);
    world_.threads.yield('o');
    world_.write_operand(pin.data() + half, bytes - half, stamp);
    const bool fails = access == Access::overwrite && chance(24);
    model.write(stamp, fails);
    world_.threads.doing(
        fmt::format("wrote {} to page {} of {}{}", stamp >> 24, page, segment.id(), fails ? ", and fails" : ""));
    if (fails) throw Planned();
    pin.written();
  }
  if (chance(4)) pin.will_not_reuse();
}

/// The pages of all members take turns. Two pins or more are held at once.
void Owner::stream(const std::vector<Shared>& members, const std::vector<Access>& access) {
  std::vector<Busy> busy;
  std::vector<PinRequest> requests;
  std::size_t bytes = 0, pages = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (access[i] != Access::read) busy.emplace_back(world_, members[i]);
    requests.push_back({members[i].get(), access[i]});
    bytes += rounded_bytes(*members[i]);
    pages = std::max(pages, members[i]->pages());
  }
  const Asking asking(world_, 0, bytes);
  if (!chance(6)) cache_.announce(requests);
  const bool pins_first = chance(2), keeps = chance(2);
  std::vector<PagePin> before;
  const std::size_t end = chance(8) ? pages / 2 : pages;  // leaves it halfway
  for (std::size_t page = 0; page < end; ++page) {
    std::vector<PagePin> pins(members.size());
    for (std::size_t i = 0; pins_first && i < members.size(); ++i) {
      if (page < members[i]->pages()) pins[i] = pin_page(*members[i], page, access[i]);
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (page >= members[i]->pages()) continue;
      if (!pins[i]) pins[i] = pin_page(*members[i], page, access[i]);
      use_page(*members[i], page, pins[i], access[i]);
    }
    before.clear();
    if (keeps) before = std::move(pins);
  }
}

/// Reads another owner's segments, which may be replaced, written or updated meanwhile.
void Owner::read_others() {
  const auto& others = world_.segments[below(details_, world_.segments.size())];
  if (others.empty()) return;
  const Shared segment = others[below(details_, others.size())];
  if (!segment || rounded_bytes(*segment) > world_.setup.quota) return;
  world_.threads.doing(fmt::format("read_others {}", segment->id()));
  const PinRequest request{segment.get(), Access::read};
  world_.order_after_writes(*segment);
  const auto check = [&](std::size_t page, const std::byte* at) {
    if (world_.is_closing) return;
    world_.check_operand(*segment, page, segment->model[page], at, "a reader", /*now=*/true, /*only_if_quiet=*/true);
  };
  if (chance(2)) {
    const Asking asking(world_, rounded_bytes(*segment), 0);
    cache_.pin({&request, 1});
    {
      Grants grants(world_);
      for (std::size_t page = 0; page < segment->pages(); ++page) {
        grants.add(*segment, page, segment->at(page));
        check(page, segment->at(page));
      }
      world_.threads.yield('o');
      for (std::size_t page = 0; page < segment->pages(); ++page) check(page, segment->at(page));
    }
    return cache_.unpin({&request, 1});
  }
  const Asking asking(world_, 0, rounded_bytes(*segment));
  if (chance(2)) cache_.announce({&request, 1});
  for (std::size_t page = 0; page < segment->pages(); ++page) {
    PagePin pin = pin_page(*segment, page, Access::read);
    pin.wait();
    pin.wait_for_uses();
    Grants grants(world_);
    grants.add(*segment, page, pin.data());
    check(page, pin.data());
  }
}

void Owner::zero(const Shared& segment) {
  const Busy busy(world_, segment);
  const Asking asking(world_, 0, rounded_bytes(*segment));
  cache_.zero(*segment);
  for (PageModel& page : segment->model) page = {};
}

void Owner::evict() {
  const auto& some = world_.segments[below(details_, world_.segments.size())];
  if (some.empty()) return;
  if (const Shared segment = some[below(details_, some.size())]) {
    world_.threads.doing(fmt::format("evict {}", segment->id()));
    cache_.evict(*segment);
  }
}

/// Reads past the cache. If the owner writes meanwhile, the read must notice.
void Owner::read_home(const Shared& segment) {
  const std::size_t page = below(details_, segment->pages());
  const Buffer memory = make_buffer(round_up(segment->bytes_of(page), kBlockBytes));
  HomeRead read = cache_.read_home(*segment, page, memory.get());
  if (!read) return;
  if (chance(3)) stream({segment}, {Access::write});
  if (chance(4)) compute();
  if (read.wait() && !world_.is_closing) {
    world_.check(*segment, page, segment->model[page], memory.get(), "a read past the cache");
  }
}

/// Writes every page of the open second version, or fails.
bool Owner::write_version(SimulatedSegment& segment, std::vector<PageModel>& next) {
  const bool leaves_out = chance(6);
  next = segment.model;
  for (std::size_t page = 0; page < segment.pages(); ++page) {
    if (leaves_out && chance(2)) return false;
    const Access access = chance(2) ? Access::write : Access::overwrite;
    PagePin pin = pin_page(segment, page, access);
    pin.wait();
    pin.wait_for_uses();
    Grants grants(world_);
    grants.add(segment, page, pin.data());
    if (access == Access::write && !world_.is_closing) {
      world_.check_operand(segment, page, next[page], pin.data(), "an update ahead", chance(2));
    }
    const Stamp stamp = world_.next_stamp(segment, page);
    const std::size_t bytes = segment.bytes_of(page), half = bytes / 16 * 8;
    world_.write_operand(pin.data(), half, stamp);
    world_.threads.yield('o');
    world_.write_operand(pin.data() + half, bytes - half, stamp);
    next[page] = {stamp};
    pin.written();
  }
  return true;
}

void Owner::update_versions(const std::vector<Shared>& members) {
  std::vector<Shared> open;
  std::vector<Busy> busy;
  std::vector<std::vector<PageModel>> next(members.size());
  bool is_whole = true;
  const auto discard = [&] {
    for (const Shared& segment : open) cache_.discard_version(*segment);
  };
  try {
    for (const Shared& segment : members) {
      const Asking asking(world_, 0, rounded_bytes(*segment));
      busy.emplace_back(world_, segment);
      if (!cache_.open_version(*segment, chance(2))) continue;
      open.push_back(segment);
      is_whole = write_version(*segment, next[open.size() - 1]) && is_whole;
      if (chance(4)) compute();
    }
    std::vector<Segment*> segments;
    for (const Shared& segment : open) segments.push_back(segment.get());
    if (open.empty()) return;
    if ((is_whole && chance(4)) || !cache_.commit_versions(segments)) return discard();
    if (!is_whole && !world_.is_closing)
      world_.threads.fail("a version was committed that was not written completely");
  } catch (...) {
    discard();
    throw;
  }
  for (std::size_t i = 0; i < open.size(); ++i) open[i]->model = next[i];
  world_.result.versions += open.size();
}

/// A rule of the host on a device's segment.
void Owner::use_below(const Shared& segment, Access access) {
  if (!world_.device || !cache_.reaches_below(*segment)) return;
  std::vector<Busy> busy;
  if (access != Access::read) busy.emplace_back(world_, segment);
  const PinRequest request{segment.get(), access};
  if (!chance(4)) cache_.announce_below({&request, 1});
  if (chance(4)) cache_.bring_down(*segment);
  for (std::size_t page = 0; page < segment->pages(); ++page) {
    PagePin pin = cache_.pin_page_below(*segment, page, access);
    if (!pin) continue;  // in use on the device
    pin.wait();
    PageModel& model = segment->model[page];
    if (access != Access::overwrite && !world_.is_closing) {
      world_.check(*segment, page, model, pin.data(), "a rule of the host");
    }
    if (access == Access::read) continue;
    const Stamp stamp = world_.next_stamp(*segment, page);
    const std::size_t bytes = segment->bytes_of(page), half = bytes / 16 * 8;
    fill(pin.data(), half, stamp);
    world_.threads.yield('o');
    fill(pin.data() + half, bytes - half, stamp);
    model.write(stamp, /*fails=*/false);
    pin.written();
  }
}

/// Takes snapshots of some segments and hands them to the checkpoint's thread.
void Owner::freeze(const std::vector<Shared>& members) {
  const TakesCheckpoint takes;
  std::vector<SavedSegment> saved;
  for (const Shared& segment : members) {
    if (!cache_.can_freeze(*segment)) continue;
    const Asking asking(world_, 0, 0);
    SavedSegment one;
    one.segment = segment;
    one.model = segment->model;
    one.frozen = cache_.freeze(*segment);
    saved.push_back(std::move(one));
  }
  const std::unique_lock lock(world_.mutex);
  for (SavedSegment& one : saved) world_.to_save.push_back(std::move(one));
  world_.changed.notify_one();
}

void Owner::bind(std::size_t index) {
  if (chance(2)) specs_[index].role = static_cast<Role>(below(details_, kRoles));
  mine_[index] = nullptr;
  mine_[index] = world_.make_segment(number_, specs_[index]);
}

void Owner::compute() {
  world_.threads.sleep_for(std::chrono::microseconds(1 << below(details_, 12)));
  if (chance(4)) (void)cache_.stats();
  if (chance(4) && !mine_.empty() && mine_[0]) (void)(cache_.resident(*mine_[0]), cache_.changes(*mine_[0]));
}

namespace {

/// Copies a page from its frame. False if it was written home meanwhile.
bool save_frame(World& world, SavedSegment& saved, std::size_t page) {
  const Asking asking(world, 0, round_up(saved.segment->bytes(), kBlockBytes));
  PagePin pin;
  while (!(pin = saved.frozen.try_pin(page))) {
    if (saved.frozen.place(page) == Frozen::Place::home) return false;
    world.threads.sleep_for(std::chrono::milliseconds(1));
  }
  if (!saved.frozen.begin_copy(page)) return false;
  world.threads.yield('o');
  world.check(*saved.segment, page, saved.model[page], pin.data(), "a checkpoint of a frame");
  saved.frozen.end_copy(page);
  ++world.result.saved_pages;
  return true;
}

void save_homes(World& world, SavedSegment& saved, const std::vector<std::size_t>& pages) {
  constexpr std::size_t kAhead = 3;
  std::deque<std::pair<Buffer, HomeRead>> reads;
  std::size_t started = 0;
  for (const std::size_t page : pages) {
    for (; started < pages.size() && reads.size() < kAhead; ++started) {
      Buffer memory = make_buffer(round_up(saved.frozen.bytes_of(pages[started]), kBlockBytes));
      HomeRead read = saved.frozen.read(pages[started], memory.get());
      reads.emplace_back(std::move(memory), std::move(read));
    }
    if (!reads.front().second.wait()) world.threads.fail("a read of frozen content says that it changed");
    world.check(*saved.segment, page, saved.model[page], reads.front().first.get(), "a checkpoint from home");
    reads.pop_front();
    ++world.result.saved_pages;
  }
}

/// As checkpoint/snapshot.cpp does: frames first, since operators cannot write those pages until they are copied.
void save(World& world, SavedSegment& saved) {
  world.threads.doing(fmt::format("save {}", saved.segment->id()));
  std::vector<std::size_t> at_home;
  for (std::size_t page = 0; page < saved.frozen.pages(); ++page) {
    const Frozen::Place place = saved.frozen.place(page);
    if (place == Frozen::Place::nowhere) {
      if (!saved.model[page].may_be(0) && !world.is_closing) {
        world.threads.fail(fmt::format("a checkpoint takes page {} of segment {} for zeros; it must hold {}", page,
                                       saved.segment->id(), saved.model[page].stamp >> 24));
      }
    } else if (place == Frozen::Place::home || !save_frame(world, saved, page)) {
      at_home.push_back(page);
    }
  }
  save_homes(world, saved, at_home);
}

}  // namespace

void save_all(World& world) {
  while (true) {
    SavedSegment saved;
    {
      std::unique_lock lock(world.mutex);
      world.threads.doing("waits for checkpoints");
      world.changed.wait(lock, [&] { return !world.to_save.empty() || world.no_more; });
      if (world.to_save.empty()) return;
      saved = std::move(world.to_save.front());
      world.to_save.pop_front();
    }
    try {
      if (!world.is_closing) save(world, saved);
    } catch (const DiskError& error) {
      world.judge(error);
    } catch (const AccessError& error) {
      if (!world.is_closing) world.threads.fail(error.what());
    }
  }
}

void check_everything(World& world) {
  FrameCache& cache = *world.cache;
  world.threads.doing("checks everything at the end");
  for (int i = 0; i < 4; ++i) {
    try {
      cache.wait();
    } catch (const DiskError&) {  // of a write that failed before
    }
  }
  for (const bool from_home : {false, true}) {
    for (const auto& segments : world.segments) {
      for (const auto& segment : segments) {
        if (!segment) continue;
        world.order_after_writes(*segment);
        if (from_home) cache.evict(*segment);
        const PinRequest request{segment.get(), Access::read};
        if (!from_home) cache.pin({&request, 1});
        for (std::size_t page = 0; page < segment->pages(); ++page) {
          PagePin pin;
          if (from_home) pin = cache.pin_page(*segment, page, Access::read);
          pin.wait();
          world.check_operand(*segment, page, segment->model[page], from_home ? pin.data() : segment->at(page),
                              from_home ? "at the end, from home" : "at the end", /*now=*/true);
        }
        if (!from_home) cache.unpin({&request, 1});
      }
    }
  }
  for (int i = 0; i < 3; ++i) {  // the end of a write may start a read ahead
    for (const auto& segments : world.segments) {
      for (const auto& segment : segments) {
        if (segment) cache.evict(*segment);
      }
    }
    cache.wait();
  }
  if (!world.device) world.check_rest("after all was evicted");  // else transfers below start reads ahead
  world.segments.clear();
  cache.wait();
  world.check_rest("after all was released");
}

}  // namespace zeropage::simulate
