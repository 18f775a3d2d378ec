// What it takes for a tensor that lies over several ranks to be used whole, or by this rank's share alone.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <deque>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

constexpr std::size_t kGathersAhead = 2;
constexpr std::size_t kPackBytes = 16 * kMiB;  // of what starts equal, at once

Subject subject_of(const StorageSegment& segment, std::size_t page = 0) {
  return {name_of(segment.role()), segment.number(), page};
}

using Storages = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

/// Small tensors travel together, from the first rank of each group.
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
  const Subject subject{"what is not split", 0, 0};
  domain.partition.ranks->broadcast(packed, subject);
  if (domain.partition.replicas) domain.partition.replicas->broadcast(packed, subject);
  for_each_part([](at::Tensor content, at::Tensor part) { content.copy_(part); });
}

/// A large segment's pages, from the first rank of the group.
void broadcast_pages(StorageSegment& segment, Collectives& group, const Subject& subject) {
  for (std::size_t i = 0; i < segment.pages(); ++i) {
    PagePin page = segment.pager()->pin_page(segment, i, Access::write);
    page.wait();
    const auto options = at::TensorOptions().dtype(at::kByte).device(segment.domain()->device);
    at::Tensor bytes = at::from_blob(
        page.data(), {static_cast<std::int64_t>(segment.bytes_of(i))}, [](void*) {}, options,
        segment.domain()->device);
    group.broadcast(bytes, {subject.role, subject.number, i});
  }
}

}  // namespace

void StorageSegment::complete() {
  if (auto pending = std::exchange(pending_, nullptr)) pending->complete();
}

void StorageSegment::refresh(Access access) {
  complete();
  if (stale_ && access != Access::overwrite) gather_stale();
  stale_ = false;
}

void StorageSegment::open_share(Access access) {
  complete();
  claim_share(access);
}

void StorageSegment::claim_share(Access access) {
  if (is_partitioned()) {
    access == Access::read ? pager()->store(*this) : pager()->share_changes(*this);
  } else if (access != Access::read) {
    stale_ = true;
  }
}

/// Brings the other ranks' shares in, page by page, in place.
void StorageSegment::gather_stale() {
  struct Gather {
    PagePin page;
    std::unique_ptr<Ranks::Work> work;
  };
  std::deque<Gather> under_way;
  const std::size_t item_bytes = storage_->nbytes() / elements_;
  for (std::size_t i = 0; i < stripes_.pages(); ++i) {
    if (under_way.size() == kGathersAhead) {
      under_way.front().work->wait();
      under_way.pop_front();
    }
    Gather gather{pager()->pin_page(*this, i, Access::write), nullptr};
    gather.page.wait();
    const std::size_t part_bytes = stripes_.part(i) * item_bytes;
    std::byte* const page = gather.page.data();
    gather.work = domain_->partition.ranks->all_gather(page, page + stripes_.rank() * part_bytes, part_bytes,
                                                       subject_of(*this, i));
    under_way.push_back(std::move(gather));
  }
  for (Gather& gather : under_way) gather.work->wait();
}

void start_equal(Domain& domain) {
  if (!domain.partition.ranks || scope_domain().get() == &domain) return;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  c10::NoGradGuard no_grad;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> newborn;
  {
    std::lock_guard lock(domain.newborn_mutex);
    newborn.swap(domain.newborn);
  }
  Storages small;
  std::size_t bytes = 0;
  for (auto& weak : newborn) {
    auto storage = weak.lock();
    if (!storage || !segment_of(*storage)) continue;
    StorageSegment& segment = *segment_of(*storage);
    const auto& [ranks, replicas] = std::tie(domain.partition.ranks, domain.partition.replicas);
    if (segment.is_partitioned()) {
      segment.open_share(Access::read);
      if (replicas) broadcast_pages(segment.share_segment(), *replicas, subject_of(segment));
    } else if (segment.is_shareable()) {
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
