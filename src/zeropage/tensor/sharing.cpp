// Prepares tensors that several ranks share for use: the whole tensor, or this rank's share alone.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

constexpr std::size_t kGathersAhead = 2;
constexpr std::size_t kPackBytes = 16 * kMiB;  // of small tensors in one collective

Subject subject_of(const StorageSegment& segment, std::size_t page = 0) {
  return {name_of(segment.role()), segment.number(), page};
}

using Storages = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

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

/// Gathers the other ranks' shares of whole tensors. Packs small tensors together; gathers large ones page by page in
/// place, kGathersAhead pages at once.
class Refresh {
 public:
  explicit Refresh(Domain& domain) : domain_(domain), ranks_(*domain.partition.ranks) {}

  void run(const std::vector<StorageSegment*>& segments) {
    const NoPagingGuard no_paging;  // also in a scope
    std::vector<StorageSegment*> small;
    std::size_t bytes = 0;
    for (StorageSegment* segment : segments) {
      if (segment->pages() > 1) {
        gather_pages(*segment);
        continue;
      }
      small.push_back(segment);
      bytes += segment->bytes();
      if (bytes >= kPackBytes) gather_packed(std::exchange(small, {})), bytes = 0;
    }
    if (!small.empty()) gather_packed(small);
    while (!under_way_.empty()) finish_oldest();
  }

 private:
  struct Gather {
    PagePin page;
    std::unique_ptr<Ranks::Work> work;
  };

  void finish_oldest() {
    under_way_.front().work->wait();
    under_way_.pop_front();
  }

  void gather_pages(StorageSegment& segment) {
    const Stripes& stripes = segment.stripes();
    for (std::size_t i = 0; i < stripes.pages(); ++i) {
      if (under_way_.size() == kGathersAhead) finish_oldest();
      Gather gather{segment.cache()->pin_page(segment, i, Access::write), nullptr};
      gather.page.wait();
      const std::size_t part_bytes = stripes.part(i) * item_bytes(segment);
      std::byte* const page = gather.page.data();
      gather.work = ranks_.all_gather(page, page + stripes.rank() * part_bytes, part_bytes, subject_of(segment, i));
      under_way_.push_back(std::move(gather));
    }
  }

  void gather_packed(const std::vector<StorageSegment*>& segments) {
    std::int64_t length = 0;
    for (StorageSegment* segment : segments) length += part_bytes(*segment);
    const auto options = at::TensorOptions().dtype(at::kByte).device(domain_.device);
    at::Tensor mine = at::empty({length}, options), all = at::empty({ranks_.size(), length}, options);
    for_each_place(segments, [&](at::Tensor parts, std::int64_t at, std::int64_t bytes) {
      mine.narrow(0, at, bytes).copy_(parts[ranks_.rank()]);
    });
    ranks_
        .all_gather(static_cast<std::byte*>(all.mutable_data_ptr()),
                    static_cast<const std::byte*>(mine.const_data_ptr()), length, subject_of(*segments[0]))
        ->wait();
    for_each_place(segments, [&](at::Tensor parts, std::int64_t at, std::int64_t bytes) {
      parts.copy_(all.narrow(1, at, bytes));
    });
  }

  /// Calls `visit` with every rank's part of each segment, [ranks, bytes], and its offset in the pack.
  void for_each_place(const std::vector<StorageSegment*>& segments,
                      c10::function_ref<void(at::Tensor, std::int64_t, std::int64_t)> visit) {
    std::int64_t at = 0;
    for (StorageSegment* segment : segments) {
      PagePin page = segment->cache()->pin_page(*segment, 0, Access::write);
      page.wait();
      const std::int64_t bytes = part_bytes(*segment);
      const auto options = at::TensorOptions().dtype(at::kByte).device(domain_.device);
      visit(at::from_blob(page.data(), {ranks_.size(), bytes}, [](void*) {}, options, domain_.device), at, bytes);
      at += bytes;
    }
  }

  static std::size_t item_bytes(const StorageSegment& segment) {
    return segment.bytes() / segment.stripes().padded();
  }
  static std::int64_t part_bytes(const StorageSegment& segment) {
    return static_cast<std::int64_t>(segment.stripes().part(0) * item_bytes(segment));
  }

  Domain& domain_;
  Collectives& ranks_;
  std::deque<Gather> under_way_;
};

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
  std::vector<StorageSegment*> segments;
  for (const std::uint64_t number : domain.partition.ranks->common(numbers, {"stale parameters", 0, 0})) {
    segments.push_back(segment_of(*alive.at(number)));
  }
  for (StorageSegment* segment : segments) segment->complete();
  Refresh(domain).run(segments);
  for (StorageSegment* segment : segments) segment->set_stale(false);
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

}  // namespace

void StorageSegment::complete() {
  settle();
  run_deferred();
  complete_pending();
  run_deferred();  // what has come may have to be widened
}

void StorageSegment::complete_pending() {
  // If this throws, pending_ stays, so that the next use throws again or goes on. A gradient that came clears it.
  while (const auto pending = pending_) {
    pending->complete();
    if (pending_ == pending) pending_ = nullptr;
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
  touched_ = touched_ || access != Access::read;
  if (stale_ && access != Access::overwrite) {
    // After a step the first use of any parameter refreshes all: ranks may use another one first.
    role() == Role::parameter ? gather_stale_parameters(*domain_) : Refresh(*domain_).run({this});
    if (role() == Role::parameter && stale_) {
      throw RankError(
          fmt::format("parameter {} is used here and no longer exists on another rank, which held a share of its "
                      "last update; keep the same modules on every rank",
                      number_));
    }
  }
  if (stale_) set_stale(false);
}

void StorageSegment::set_keeps_same(bool keeps) {
  keeps_same_ = keeps;
  if (auto* const master = segment_of(master_)) master->set_keeps_same(keeps);
}

void StorageSegment::set_stale(bool stale) {
  if (std::exchange(stale_, stale) == stale || role() != Role::parameter || !storage_) return;
  std::lock_guard lock(domain_->sharing_mutex);
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
    set_stale(true);
  }
}

void start_equal(Domain& domain) {
  if (!domain.partition.ranks || is_in_scope_of(domain)) return;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
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
      segment.open_share(Access::read);
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
