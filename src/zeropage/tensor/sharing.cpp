// Prepares tensors that several ranks share for use: the whole tensor, or this rank's share alone.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/tensor/refresh.h"

namespace zeropage {
namespace {

constexpr std::size_t kPackBytes = 16 * kMiB;  // of small tensors in one collective

Subject subject_of(const StorageSegment& segment, std::size_t page = 0) {
  return {name_of(segment.role()), segment.number(), page};
}

/// Broadcasts small tensors together, from the first rank of each group.
void broadcast_packed(Domain& domain, const Storages& storages) {
  std::size_t bytes = 0;
  for (const auto& storage : storages) bytes += storage->nbytes();
  if (bytes == 0) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(domain.device);
  at::Tensor packed = at::empty({static_cast<std::int64_t>(bytes)}, options);
  const auto for_each_part = [&](auto copy) {
    std::int64_t at = 0;
    for (const auto& storage : storages) {
      const auto length = static_cast<std::int64_t>(storage->nbytes());
      const PinRequest request{segment_of(*storage), Access::write};
      TensorPin pin(request);
      at::Tensor content = at::from_blob(storage->mutable_data(), {length}, [](void*) {}, options, domain.device);
      copy(content, packed.narrow(0, at, length));
      at += length;
    }
  };
  for_each_part([](at::Tensor content, at::Tensor part) { part.copy_(content); });
  const Subject subject{"what is not partitioned", 0, 0};
  domain.partition.ranks->broadcast(packed, subject);
  if (domain.partition.replicas) domain.partition.replicas->broadcast(packed, subject);
  for_each_part([](at::Tensor content, at::Tensor part) { content.copy_(part); });
}

/// Broadcasts a large segment's pages from the first rank of the group.
void broadcast_pages(StorageSegment& segment, Collectives& group, const Subject& subject) {
  for (std::size_t i = 0; i < segment.pages(); ++i) {
    PagePin page = segment.cache()->pin_page(segment, i, Access::write);
    page.wait();
    const auto options = at::TensorOptions().dtype(at::kByte).device(segment.domain()->device);
    at::Tensor bytes = at::from_blob(
        page.data(), {static_cast<std::int64_t>(segment.bytes_of(i))}, [](void*) {}, options,
        segment.domain()->device);
    group.broadcast(bytes, {subject.role, subject.number, i});
  }
}

/// The set of stale parameters may depend on when Python's collector ran here. Ranks refresh those that all of them
/// still have: a program that is the same on all ranks can use no other again.
void gather_stale_parameters(Domain& domain) {
  run_deferred(domain);  // so that the same are stale on all ranks
  std::map<std::uint64_t, c10::intrusive_ptr<c10::StorageImpl>> alive;
  {
    std::lock_guard lock(domain.sharing_mutex);
    std::erase_if(domain.stale, [&](const auto& entry) {
      auto storage = entry.second.lock();
      if (!storage || !segment_of(*storage)) return true;
      alive.emplace(entry.first, std::move(storage));
      return false;
    });
  }
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, _] : alive) numbers.push_back(number);
  Storages stale;
  for (const std::uint64_t number : domain.partition.ranks->common(numbers, {"stale parameters", 0, 0})) {
    stale.push_back(alive.at(number));
  }
  for (const auto& storage : stale) segment_of(*storage)->complete();
  const auto set_fresh = [](const Storages& storages) {
    for (const auto& storage : storages) segment_of(*storage)->set_stale(false);
  };
  if (domain.refresher) {  // its gathers compare nothing on their way
    std::uint64_t writes = 0;
    for (const auto& storage : stale) writes = 31 * writes + segment_of(*storage)->program_writes();
    const auto words = domain.partition.ranks->agree({static_cast<std::int64_t>(writes)}, {"stale parameters", 0, 0});
    if (std::ranges::any_of(words, [&](const auto& others) { return others != words[0]; })) {
      domain.partition.ranks->differ(
          "ranks wrote different values into one tensor, because one has written it more often:");
    }
    domain.refresher->start(stale);
    return set_fresh(stale);  // then: another thread must wait for it or see it on its way
  }
  for (const Storages& together : in_refreshes(std::move(stale))) {
    Refresh(*domain.partition.ranks, segments_of(together)).run();
    set_fresh(together);
  }
}

/// The created tensors that live on all ranks. Which ones died may differ with the time at which Python's collector
/// ran.
Storages those_that_all_ranks_have(Domain& domain,
                                   const std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>& created) {
  // A gradient has its parameter's number.
  const auto key_of = [](const StorageSegment& segment) {
    return segment.number() * kRoles + static_cast<std::uint64_t>(segment.role());
  };
  Storages alive;
  std::vector<std::uint64_t> keys;
  for (const auto& weak : created) {
    auto storage = weak.lock();
    const auto* segment = storage ? segment_of(*storage) : nullptr;
    if (!segment || std::find(keys.begin(), keys.end(), key_of(*segment)) != keys.end()) continue;
    keys.push_back(key_of(*segment));
    alive.push_back(std::move(storage));
  }
  const Subject subject{"what was created", 0, 0};
  auto common = domain.partition.ranks->common(keys, subject);
  if (domain.partition.replicas) common = domain.partition.replicas->common(common, subject);
  const std::set<std::uint64_t> everyones(common.begin(), common.end());
  std::erase_if(alive, [&](const auto& storage) { return !everyones.contains(key_of(*segment_of(*storage))); });
  return alive;
}

/// One for all segments: few threads tell, and few ask while something is pending.
std::mutex pending_mutex;

}  // namespace

void StorageSegment::complete() {
  settle();
  run_deferred();
  complete_pending();
  run_deferred();  // what has come may have to be widened
}

void StorageSegment::will_come(std::shared_ptr<Pending> pending) noexcept {
  {
    const std::lock_guard lock(pending_mutex);
    pending_.swap(pending);
    is_pending_.store(pending_ != nullptr, std::memory_order_release);
  }
  pending.reset();  // what was; its end may call the program's code
}

void StorageSegment::has_come(const Pending& pending) noexcept {
  std::shared_ptr<Pending> ends;  // without the lock
  const std::lock_guard lock(pending_mutex);
  if (pending_.get() != &pending) return;
  ends.swap(pending_);
  is_pending_.store(false, std::memory_order_release);
}

std::shared_ptr<Pending> StorageSegment::pending() const noexcept {
  if (!is_pending()) return nullptr;
  const std::lock_guard lock(pending_mutex);
  return pending_;
}

void StorageSegment::complete_pending() {
  // If this throws, the content stays pending, so that the next use throws again or goes on. Gradients that came end
  // it themselves.
  while (const auto coming = pending()) {
    coming->complete();
    has_come(*coming);
  }
}

void run_coming_updates(c10::ArrayRef<PinRequest> asked) {
  thread_local bool runs = false;
  const auto* const gathered =
      std::ranges::find_if(asked, [](const PinRequest& request) { return request.segment->cache()->is_gathered(); });
  if (runs || gathered == asked.end()) return;
  Domain& domain = *static_cast<StorageSegment*>(gathered->segment)->domain();
  if (!domain.runs_coming_updates()) return;
  c10::SmallVector<PinRequest, 8> requests;
  for (const PinRequest& request : asked) {
    if (request.segment->cache() == gathered->segment->cache()) requests.push_back(request);  // not another space's
  }
  std::set<const Segment*> coming;  // addresses alone: other threads may end them
  domain.gathered->take_changes({requests.data(), requests.size()},
                                [&](Segment& segment) { coming.insert(&segment); });
  if (coming.empty()) return;
  runs = true;
  struct Ends {
    ~Ends() { runs = false; }
  } ends;
  std::lock_guard lock(domain.deferral_mutex);
  std::exception_ptr error;
  // By programs: one may outlive the parameter on this rank.
  const auto all = domain.deferred;
  for (const auto& weak : all) {
    const auto deferred = weak.lock();
    bool is_wanted = false;
    if (deferred)
      deferred->for_each_segment([&](StorageSegment& s) { is_wanted = is_wanted || coming.contains(&s); });
    if (!is_wanted) continue;
    try {
      deferred->run();
    } catch (const AccessError&) {  // the program has pinned it, on every rank: its own operators tell
    } catch (const std::exception&) {
      if (!error) error = std::current_exception();
    }
    if (deferred->length() == 0) continue;
    deferred->for_each_segment([&](StorageSegment& segment) {
      if (coming.contains(&segment)) domain.gathered->expect_change(segment);
    });
  }
  if (error) std::rethrow_exception(error);
}

void StorageSegment::refresh(Access access) {
  complete();
  if (access != Access::read) touched_ = true;
  if (stale_ && access != Access::overwrite) {
    const std::lock_guard lock(domain_->deferral_mutex);  // which a thread that computes deferred content holds
    if (stale_) gather_stale();                           // else another thread has
  }
  complete_pending();  // it may be on its way, even if no thread had begun that above
  if (stale_ && access == Access::overwrite) set_stale(false);
}

void StorageSegment::gather_stale() {
  if (role() != Role::parameter) {
    Refresh(*domain_->partition.ranks, {this}).run();
    return set_stale(false);
  }
  // After a step the first use of any parameter refreshes all: ranks may use another one first.
  gather_stale_parameters(*domain_);
  if (stale_) {
    throw RankError(
        fmt::format("parameter {} is used here and no longer exists on another rank, which held a share of its "
                    "last update; keep the same modules on every rank",
                    number_));
  }
}

void StorageSegment::set_keeps_same(bool keeps) {
  keeps_same_ = keeps;
  if (auto* const master = segment_of(master_)) master->set_keeps_same(keeps);
}

void StorageSegment::set_stale(bool stale) {
  if (stale_ == stale) return;
  std::lock_guard lock(domain_->sharing_mutex);
  if (stale_.exchange(stale) == stale || role() != Role::parameter || !storage_) return;
  stale ? void(domain_->stale.emplace(number_, storage())) : void(domain_->stale.erase(number_));
}

void StorageSegment::zero() {
  refresh(Access::overwrite);
  if (is_partitioned()) open_share(Access::overwrite);
  at_home().cache()->zero(at_home());
}

void StorageSegment::open_share(Access access) {
  complete();
  claim_share(access);
}

thread_local bool WrittenAhead::OfShares::is_here_ = false;

void StorageSegment::claim_share(Access access) {
  if (WrittenAhead::OfShares::is_here()) return;
  touched_ = touched_ || access != Access::read;
  if (is_partitioned()) {
    access == Access::read ? cache()->store(*this) : cache()->share_changes(*this);
  } else if (access != Access::read) {
    if (role() == Role::parameter) complete_pending();  // others' last updates may be on their way
    set_stale(true);
  }
}

void start_equal(Domain& domain) {
  if (!domain.partition.ranks || is_in_scope_of(domain)) return;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  c10::NoGradGuard no_grad;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> created;
  {
    std::lock_guard lock(domain.sharing_mutex);
    created.swap(domain.created);
  }
  Storages small;
  std::size_t bytes = 0;
  for (const auto& storage : those_that_all_ranks_have(domain, created)) {
    StorageSegment& segment = *segment_of(*storage);
    segment.complete();
    const auto& [ranks, replicas] = std::tie(domain.partition.ranks, domain.partition.replicas);
    if (segment.is_partitioned()) {
      segment.open_share(replicas ? Access::write : Access::read);
      if (replicas) broadcast_pages(segment.share_segment(), *replicas, subject_of(segment));
    } else if (segment.is_shareable()) {
      segment.refresh(Access::read);  // rank 0 has only its own share of a stale tensor
      broadcast_pages(segment, *ranks, subject_of(segment));
      if (replicas) broadcast_pages(segment, *replicas, subject_of(segment));
    } else {
      small.push_back(storage);
      bytes += storage->nbytes();
      if (bytes >= kPackBytes) broadcast_packed(domain, std::exchange(small, {})), bytes = 0;
    }
  }
  broadcast_packed(domain, small);
}

}  // namespace zeropage
