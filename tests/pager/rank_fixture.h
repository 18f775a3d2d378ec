// A rank that is a thread, with tensors that are partitioned over ranks.
#pragma once

#include "cache_fixture.h"
#include "thread_ranks.h"
#include "zeropage/comm/stripes.h"

namespace zeropage {

inline constexpr std::size_t kPage = 4 * kBlockBytes, kItem = 4;

/// A tensor of floats that is partitioned over ranks.
struct Tensor {
  Stripes stripes;
  std::unique_ptr<TestSegment> share = std::make_unique<TestSegment>();  // must outlive `whole`
  std::unique_ptr<TestSegment> whole = std::make_unique<TestSegment>();
  unsigned seed = 0;
  bool written = false;
};

struct Rank : CacheFixture {
  /// `device` has the shares' memory apart, and `above` that of whole tensors. Null: one memory. `apart`: gathers
  /// have a connection of their own. `node_ranks`: with a secondary partition over the ranks of each node, on disk;
  /// 0: without.
  Rank(Meeting& meeting, int rank, std::size_t gathered_bytes, std::shared_ptr<DeviceMemory> device = nullptr,
       std::shared_ptr<DeviceMemory> above = nullptr, bool apart = false, int node_ranks = 0)
      : ranks(std::make_shared<ThreadRanks>(meeting, rank, apart, node_ranks)) {
    make(8 * kPage, 24 * kPage, kPage, /*failing=*/false, std::move(device));
    local = cache;
    cache = FrameCache::make_gathered(local, ranks, gathered_bytes, std::move(above),
                                      node_ranks > 0 ? std::optional(Tier::disk) : std::nullopt);
  }
  ~Rank() { cache.reset(); }

  Tensor make_tensor(std::size_t elements, std::uint64_t number) {
    Tensor tensor;
    tensor.stripes = Stripes(elements, kPage, ranks->size(), ranks->rank());
    const std::size_t page_bytes = tensor.stripes.full_page() * kItem;
    local->bind(*tensor.share, {tensor.stripes.share() * kItem, 0, Role::parameter, Tier::disk,
                                std::max(round_down(kPage, page_bytes / ranks->size()), page_bytes / ranks->size())});
    cache->bind_gathered(*tensor.whole, {elements * kItem, tensor.stripes.padded() * kItem, page_bytes,
                                         Role::parameter, tensor.share.get(), number, false});
    return tensor;
  }

  /// Writes this rank's share of the pattern, as an optimizer does.
  void write_share(Tensor& tensor, unsigned seed) {
    cache->share_changes(*tensor.whole);
    const Stripes& stripes = tensor.stripes;
    for (std::size_t i = 0; i < stripes.own(); ++i) {
      const std::size_t page_elements = tensor.share->page_bytes() / kItem, page = i / page_elements;
      const std::size_t end = std::min({(page + 1) * page_elements, stripes.own(), stripes.part_end(i)});
      PagePin pin = local->pin_page(*tensor.share, page, Access::write);
      pin.wait();
      for (std::size_t byte = 0; byte < (end - i) * kItem; ++byte) {
        pin.data()[(i - page * page_elements) * kItem + byte] = pattern(seed, stripes.in_tensor(i) * kItem + byte);
      }
      i = end - 1;
    }
  }

  std::shared_ptr<ThreadRanks> ranks;
  std::shared_ptr<FrameCache> local;
};

}  // namespace zeropage
