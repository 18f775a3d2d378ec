#include "zeropage/pager/foresight/access_plan.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace zeropage {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15;  // odd: powers of it never vanish modulo 2^64

/// kBase to the power of n * step, for n below 512.
constexpr std::array<std::uint64_t, 512> powers(std::size_t step) {
  std::uint64_t base = 1;
  for (std::size_t i = 0; i < step; ++i) base *= kBase;
  std::array<std::uint64_t, 512> powers{1};
  for (std::size_t n = 1; n < powers.size(); ++n) powers[n] = powers[n - 1] * base;
  return powers;
}
constexpr auto kLowPowers = powers(1), kHighPowers = powers(512);

}  // namespace

AccessPlan::Ordinal AccessPlan::create(std::uint64_t kind, bool take_over) {
  if (take_over) {
    for (std::size_t k = 0; k < kMakings; ++k) {
      const auto next = likely(k);
      if (!next) break;
      const Known& known = known_[next->use.ordinal];
      if (!known.alive && known.kind == kind) return revive(next->use.ordinal);
    }
    // If nothing repeats, reusing the ordinals of long-dead runs bounds their number.
    if (!free_.empty()) {
      ++kinds_[kind].ordinals;
      const Ordinal ordinal = free_.front();
      alive_.splice(alive_.end(), free_, free_.begin());
      known_[ordinal].kind = kind, known_[ordinal].alive = true;
      return ordinal;
    }
    if (const auto of = kinds_.find(kind); of != kinds_.end() && of->second.spare.size() > 1024) {
      return revive(of->second.spare.front());
    }
  }
  known_.emplace_back();  // of no kind yet, and in no list: the last one
  Ordinals made;
  try {
    made.push_back(static_cast<Ordinal>(known_.size() - 1));
    ++kinds_[kind].ordinals;
  } catch (...) {
    known_.pop_back();
    throw;
  }
  alive_.splice(alive_.end(), made);
  known_.back() = {kind, true, 0, {}, std::prev(alive_.end())};
  return alive_.back();
}

AccessPlan::Ordinal AccessPlan::revive(Ordinal ordinal) noexcept {
  Known& known = known_[ordinal];
  known.alive = true;
  alive_.splice(alive_.end(), kinds_.find(known.kind)->second.spare, known.node);
  return ordinal;
}

/// Makes any run's what the history does not know any more.
void AccessPlan::free(Ordinal ordinal, Ordinals& from) noexcept {
  free_.splice(free_.end(), from, known_[ordinal].node);
  const auto of = kinds_.find(known_[ordinal].kind);
  if (--of->second.ordinals == 0) kinds_.erase(of);
}

AccessPlan::Ordinal AccessPlan::shared(std::uint64_t kind) {
  if (const auto known = shared_.find(kind); known != shared_.end()) return known->second;
  Ordinal& ordinal = shared_[kind];
  try {
    return ordinal = create(kind, /*take_over=*/false);
  } catch (...) {
    shared_.erase(kind);
    throw;
  }
}

void AccessPlan::destroy(Ordinal ordinal) noexcept {
  Known& known = known_[ordinal];
  known.alive = false;
  if (known.places.empty()) return free(ordinal, alive_);
  Entry& latest = at(position_of(known.places.back()));
  latest.use.last = true;
  latest.died = now_;
  Ordinals& spare = kinds_.find(known.kind)->second.spare;
  spare.splice(spare.end(), alive_, known.node);
}

void AccessPlan::use(const Use& use, std::size_t bytes, double seconds) {
  if (size() > 0 && at(end_ - 1).use.ordinal == use.ordinal) {
    Use& latest = at(end_ - 1).use;
    if (use.access != Access::read && latest.access == Access::read) latest.access = Access::write;
    latest.whole |= use.whole;
    latest.last = false;  // of a run that died, whose ordinal this one took over
    return;
  }
  if (size() == kMostUses) forget_oldest();
  if (const std::size_t block = slot_of(end_) / kBlock; block == blocks_.size()) {
    blocks_.push_back(std::make_unique<Entry[]>(kBlock));
  }
  // All that may throw comes first.
  if (buckets_.empty()) buckets_.resize(kBuckets);
  std::vector<Slot>& places = known_[use.ordinal].places;
  places.push_back(slot_of(end_));
  try {
    if (use.begins) groups_.push_back(slot_of(end_));
  } catch (...) {
    places.pop_back();
    throw;
  }
  const bool expected = match_ != kNowhere && at(match_ + 1).use.ordinal == use.ordinal;
  const Position here = end_++;
  at(here) = {use, now_, seconds, 0, at(here - 1).hash * kBase + use.ordinal + 1, {kNone, kNone, kNone}, {}};
  if (use.begins) latest_group_ = uses_, latest_group_began_ = now_;
  now_ += bytes + 1;
  ++uses_;
  if (expected) {
    ++match_;
    confident_ = true;
  } else {
    match_ = find_place();
    ++surprises_;
  }
  index_latest();
}

std::uint64_t AccessPlan::power(std::size_t exponent) const {
  return kLowPowers[exponent % 512] * kHighPowers[exponent / 512];
}

/// The hash of the `length` uses that end at `end`.
std::uint64_t AccessPlan::hash_of(Position end, std::size_t length) const {
  return at(end).hash - at(end - length).hash * power(length);
}

/// The number of equal uses that end at a and at b, both included; a < b.
std::size_t AccessPlan::common_length(Position a, Position b) const {
  std::size_t low = 0, high = a + 1 - oldest_;
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    hash_of(a, middle) == hash_of(b, middle) ? low = middle : high = middle - 1;
  }
  return low;
}

/// Finds the earlier place with the longest matching history, the latest of equal ones. The history's last use is not
/// indexed yet.
AccessPlan::Position AccessPlan::find_place() {
  const Position here = end_ - 1;
  for (std::size_t c = 0; c < 3; ++c) {
    const std::size_t length = kContexts[c];
    if (size() < length) continue;
    const std::uint32_t link = find_context(c, hash_of(here, length));
    Slot slot = link != 0 ? link / 4 : kNone;
    Position best = kNowhere, latest = here;
    std::size_t best_length = 0;
    for (std::size_t tried = 0; slot != kNone && tried < kMostCandidates; ++tried) {
      const Position place = position_of(slot);
      if (place < oldest_ || place >= latest) break;  // [Note: bounded history]
      const std::size_t common = common_length(place, here);
      if (common > best_length) best = place, best_length = common;
      latest = place;
      slot = at(place).before[c];
    }
    if (best == kNowhere) continue;
    confident_ = length > 1;
    return best;
  }
  return kNowhere;
}

/// A bucket is a list of contexts. Each is four times the slot of its latest end, plus its number from 1 to 3; 0 ends
/// the list. Returns the link to the context with this hash, or the list's end.
std::uint32_t& AccessPlan::find_context(std::size_t context, std::uint64_t hash) {
  std::uint32_t* link = &buckets_[(hash + context) * kBase / (~std::uint64_t{0} / kBuckets + 1)];
  while (*link != 0) {
    const std::size_t c = *link % 4 - 1;
    const Position end = position_of(*link / 4);
    if (c == context && hash_of(end, kContexts[c]) == hash) break;
    link = &at(end).next[c];
  }
  return *link;
}

void AccessPlan::index_latest() {
  const Position here = end_ - 1;
  for (std::size_t c = 0; c < 3; ++c) {
    if (size() < kContexts[c]) continue;
    std::uint32_t& link = find_context(c, hash_of(here, kContexts[c]));
    if (link != 0) {
      at(here).before[c] = link / 4;
      at(here).next[c] = at(position_of(link / 4)).next[c];
    }
    link = slot_of(here) * 4 + static_cast<std::uint32_t>(c) + 1;
  }
}

void AccessPlan::forget_oldest() {
  const Entry& entry = at(oldest_);
  for (std::size_t c = 0; c < 3; ++c) {
    std::uint32_t& link = find_context(c, hash_of(oldest_, kContexts[c]));
    if (link != 0 && link / 4 == slot_of(oldest_)) link = entry.next[c];  // it is the latest end, thus the only one
  }
  if (!groups_.empty() && groups_.front() == slot_of(oldest_)) groups_.pop_front();
  Known& known = known_[entry.use.ordinal];
  if (++known.forgotten > known.places.size() / 2) {
    known.places.erase(known.places.begin(), known.places.begin() + known.forgotten);
    known.forgotten = 0;
  }
  if (known.places.empty() && !known.alive) {  // any run may take its ordinal: the history knows nothing of it
    known.places = {};
    free(entry.use.ordinal, kinds_.find(known.kind)->second.spare);
  }
  if (match_ == oldest_) match_ = kNowhere;
  ++oldest_;
}

std::optional<AccessPlan::Coming> AccessPlan::coming(std::int64_t k) const {
  if (k >= 0) return knows() ? likely(static_cast<std::size_t>(k)) : std::nullopt;
  if (size() < static_cast<std::size_t>(-k)) return std::nullopt;
  const Entry& past = at(end_ + k);
  return Coming{past.use, past.time, past.seconds - at(end_ - 1).seconds};
}

std::optional<AccessPlan::Coming> AccessPlan::likely(std::size_t k) const {
  if (match_ == kNowhere) return std::nullopt;
  // The prediction repeats the uses since the matching place, again and again.
  const Position latest = end_ - 1;
  const std::size_t period = latest - match_;
  const Entry& entry = at(match_ + 1 + k % period);
  const Time length = now_ - at(match_ + 1).time;
  const double seconds = at(latest).seconds - at(match_).seconds;
  return Coming{entry.use, now_ + (k / period) * length + entry.time - at(match_ + 1).time,
                static_cast<double>(k / period) * seconds + entry.seconds - at(match_).seconds};
}

AccessPlan::NextUse AccessPlan::next_use(Ordinal ordinal) const {
  if (!knows()) return {};
  const Known& known = known_[ordinal];
  const auto is_before = [&](Position position, Slot slot) { return position < position_of(slot); };
  const auto place = std::upper_bound(known.places.begin() + known.forgotten, known.places.end(), match_, is_before);
  const Time now_then = at(match_ + 1).time;
  if (place != known.places.begin() + known.forgotten) {
    const Entry& before = at(position_of(*std::prev(place)));
    if (before.use.last && before.died >= now_then) {
      const Time death = now_ + before.died - now_then;
      return {death, death, Access::overwrite};
    }
  }
  if (place == known.places.end()) return {};  // not used within the period
  const Position use = position_of(*place);
  const auto after = std::upper_bound(groups_.begin(), groups_.end(), use, is_before);
  const Position first = std::max(after == groups_.begin() ? 0 : position_of(*std::prev(after)), match_ + 1);
  const Time end = after == groups_.end() ? now_ : at(position_of(*after)).time;
  return {now_ + at(first).time - now_then, now_ + end - now_then, at(use).use.access};
}

}  // namespace zeropage
