// The operations of a simulated program.
#include <fmt/format.h>

#include <algorithm>

#include "simulate/program.h"
#include "zeropage/io/buffers.h"

namespace zeropage::simulate {
namespace {

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
    cache_.unpin(requests, {}, this_thread_number(), /*failed=*/true);
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
  const MemoryClaim claim = cache_.claim(requests);
  if (chance(4)) {
    cache_.open_stream(requests);  // and may never close it
  } else if (!chance(6)) {
    cache_.announce(requests);
  }
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
    for (const Shared& member : members) cache_.reach_in_stream(*member, page + 1);
    before.clear();
    if (keeps) before = std::move(pins);
  }
  if (chance(2)) cache_.close_stream(requests);
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
  // A pin that was taken while the owner wrote shows what it writes, also if that fails and is undone later.
  const bool was_quiet = World::is_quiet(*segment);
  const auto check = [&, writes = segment->writes](std::size_t page, const std::byte* at) {
    if (world_.is_closing || !was_quiet || segment->writes != writes) return;
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
  const std::size_t bytes = round_up(segment->bytes_of(page), kBlockBytes);
  const Buffer memory = make_buffer(bytes);
  const bool in_parts = page % 2 == 1 && bytes > kBlockBytes;
  HomeRead first, read;
  if (in_parts) {
    first = cache_.read_part_of_home(*segment, page, 0, kBlockBytes, memory.get());
    read = cache_.read_part_of_home(*segment, page, kBlockBytes, bytes - kBlockBytes, memory.get() + kBlockBytes);
    if (!first) return;
  } else {
    read = cache_.read_home(*segment, page, memory.get());
  }
  if (!read) return;
  if (chance(3)) stream({segment}, {Access::write});
  if (chance(4)) compute();
  const bool is_first_whole = !first || first.wait();
  if (read.wait() && is_first_whole && !world_.is_closing) {
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

}  // namespace zeropage::simulate
