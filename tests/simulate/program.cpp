#include "simulate/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace zeropage::simulate {
namespace {

constexpr Access kAccess[] = {Access::read, Access::read, Access::write, Access::overwrite};
constexpr const char* kAccessNames[] = {"read", "write", "overwrite"};

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
  const auto& weights = world_.setup.weights;
  std::uint64_t at = below(random_, std::accumulate(weights.begin(), weights.end(), std::uint64_t{0}));
  std::size_t kind = 0;
  while (at >= weights[kind]) at -= weights[kind++];
  Step step{static_cast<Kind>(kind), {}, random_()};
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

}  // namespace zeropage::simulate
