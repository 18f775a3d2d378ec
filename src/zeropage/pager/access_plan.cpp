#include "zeropage/pager/access_plan.h"

#include <algorithm>

namespace zeropage {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15;  // odd: powers of it never vanish modulo 2^64

}  // namespace

AccessPlan::Ordinal AccessPlan::create(std::uint64_t kind, bool take_over) {
  if (take_over) {
    for (std::size_t k = 0; k < kMakings; ++k) {
      const auto next = likely(k);
      if (!next) break;
      Known& known = known_[next->use.ordinal];
      if (known.alive || known.kind != kind) continue;
      known.alive = true;
      auto& spare = spare_[kind];
      if (const auto at = std::find(spare.rbegin(), spare.rend(), next->use.ordinal); at != spare.rend()) {
        spare.erase(std::next(at).base());
      }
      return next->use.ordinal;
    }
    // If nothing repeats, reusing the ordinals of long-dead runs bounds their number.
    if (auto& spare = spare_[kind]; spare.size() > 1024) {
      const Ordinal oldest = spare.front();
      spare.erase(spare.begin());
      known_[oldest].alive = true;
      return oldest;
    }
  }
  known_.push_back({kind, true});
  return static_cast<Ordinal>(known_.size() - 1);
}

AccessPlan::Ordinal AccessPlan::shared(std::uint64_t kind) {
  const auto [at, is_new] = shared_.try_emplace(kind, 0);
  if (is_new) at->second = create(kind, /*take_over=*/false);
  return at->second;
}

void AccessPlan::destroy(Ordinal ordinal) {
  known_[ordinal].alive = false;
  if (!known_[ordinal].places.empty()) history_[known_[ordinal].places.back()].use.last = true;
  spare_[known_[ordinal].kind].push_back(ordinal);
}

void AccessPlan::use(const Use& use, std::size_t bytes, double seconds) {
  if (!history_.empty() && history_.back().use.ordinal == use.ordinal) {
    Use& latest = history_.back().use;
    if (use.access != Access::read && latest.access == Access::read) latest.access = Access::write;
    latest.whole |= use.whole;
    return;
  }
  if (history_.size() == kMostUses) forget_oldest_half();
  const bool expected = match_ != kNowhere && history_[match_ + 1].use.ordinal == use.ordinal;
  const std::uint64_t before = history_.empty() ? 0 : history_.back().hash;
  const Position here = history_.size();
  history_.push_back({use, now_, seconds, before * kBase + use.ordinal + 1});
  extend_powers(history_.size());
  if (use.begins) latest_group_ = uses_, latest_group_began_ = now_;
  now_ += bytes + 1;
  ++uses_;
  known_[use.ordinal].places.push_back(here);
  if (expected) {
    ++match_;
    confident_ = true;
  } else {
    match_ = find_place();
    ++surprises_;
  }
  index_latest();
}

void AccessPlan::extend_powers(std::size_t length) {
  if (powers_.empty()) powers_.push_back(1);
  while (powers_.size() <= length) powers_.push_back(powers_.back() * kBase);
}

/// The hash of the `length` uses that end at `end`.
std::uint64_t AccessPlan::hash_of(Position end, std::size_t length) const {
  const std::uint64_t before = end + 1 == length ? 0 : history_[end - length].hash;
  return history_[end].hash - before * powers_[length];
}

/// The number of equal uses that end at a and at b, both included; a < b.
std::size_t AccessPlan::common_length(Position a, Position b) const {
  std::size_t low = 0, high = a + 1;
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    hash_of(a, middle) == hash_of(b, middle) ? low = middle : high = middle - 1;
  }
  return low;
}

/// Finds the earlier place with the longest matching history, the latest of equal ones. The history's last use is not
/// indexed yet.
AccessPlan::Position AccessPlan::find_place() {
  const Position here = history_.size() - 1;
  for (std::size_t c = 0; c < 3; ++c) {
    const std::size_t length = kContexts[c];
    if (here + 1 < length) continue;
    const auto found = latest_context_[c].find(hash_of(here, length));
    if (found == latest_context_[c].end()) continue;
    Position best = kNowhere;
    std::size_t best_length = 0, tried = 0;
    for (Position place = found->second; place != kNowhere && tried++ < kMostCandidates;
         place = history_[place].before[c]) {
      const std::size_t common = common_length(place, here);
      if (common > best_length) best = place, best_length = common;
    }
    if (best == kNowhere) continue;
    confident_ = length > 1;
    return best;
  }
  return kNowhere;
}

void AccessPlan::index_latest() {
  const Position here = history_.size() - 1;
  for (std::size_t c = 0; c < 3; ++c) {
    if (here + 1 < kContexts[c]) continue;
    auto [at, is_new] = latest_context_[c].try_emplace(hash_of(here, kContexts[c]), here);
    if (!is_new) history_[here].before[c] = std::exchange(at->second, here);
  }
}

void AccessPlan::forget_oldest_half() {
  const std::size_t gone = kMostUses / 2;
  std::vector<Entry> kept(history_.begin() + gone, history_.end());
  history_.clear();
  for (auto& map : latest_context_) map.clear();
  for (Known& known : known_) known.places.clear();
  match_ = match_ == kNowhere || match_ < gone ? kNowhere : match_ - gone;
  for (Entry& entry : kept) {
    entry.hash = (history_.empty() ? 0 : history_.back().hash) * kBase + entry.use.ordinal + 1;
    for (Position& before : entry.before) before = kNowhere;
    known_[entry.use.ordinal].places.push_back(history_.size());
    history_.push_back(entry);
    index_latest();
  }
}

std::optional<AccessPlan::Coming> AccessPlan::coming(std::int64_t k) const {
  if (k >= 0) return knows() ? likely(static_cast<std::size_t>(k)) : std::nullopt;
  if (history_.size() < static_cast<std::size_t>(-k)) return std::nullopt;
  const Entry& past = history_[history_.size() + k];
  return Coming{past.use, past.time, past.seconds - history_.back().seconds};
}

std::optional<AccessPlan::Coming> AccessPlan::likely(std::size_t k) const {
  if (match_ == kNowhere) return std::nullopt;
  // The prediction repeats the uses since the matching place, again and again.
  const Position latest = history_.size() - 1;
  const std::size_t period = latest - match_;
  const Entry& entry = history_[match_ + 1 + k % period];
  const Time length = now_ - history_[match_ + 1].time;
  const double seconds = history_[latest].seconds - history_[match_].seconds;
  return Coming{entry.use, now_ + (k / period) * length + entry.time - history_[match_ + 1].time,
                static_cast<double>(k / period) * seconds + entry.seconds - history_[match_].seconds};
}

AccessPlan::NextUse AccessPlan::next_use(Ordinal ordinal) const {
  if (!knows()) return {};
  const auto& places = known_[ordinal].places;
  const auto next = std::upper_bound(places.begin(), places.end(), match_);
  if (next == places.end()) return {};  // not used within the period
  Position first = *next, after = *next + 1;
  while (!history_[first].use.begins && first > match_ + 1) --first;
  while (after < history_.size() && !history_[after].use.begins) ++after;
  const Time now_then = history_[match_ + 1].time, end = after < history_.size() ? history_[after].time : now_;
  return {now_ + history_[first].time - now_then, now_ + end - now_then, history_[*next].use.access};
}

}  // namespace zeropage
