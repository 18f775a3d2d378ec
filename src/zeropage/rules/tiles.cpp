#include "zeropage/rules/tiles.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// Loads the pages of a range of a segment in order, and prefetches the next page while the caller uses one.
class PagesInTurn {
 public:
  PagesInTurn(const Rows& rows, Access access)
      : segment_(*rows.segment), access_(access), item_bytes_(rows.options.dtype().itemsize()) {
    begin_ = rows.begin * item_bytes_;
    end_ = begin_ + static_cast<std::size_t>(rows.rows * rows.columns) * item_bytes_;
    segment_.complete();
    segment_.refresh(access);
    const PinRequest whole{&segment_, access};
    claim_ = segment_.cache()->claim({&whole, 1});
    // A partial use must not count as a use of all its pages.
    if (begin_ == 0 && end_ == segment_.bytes()) segment_.cache()->announce({&whole, 1});
  }

  std::size_t page_bytes() const { return segment_.page_bytes(); }

  /// The bytes from `at` to the end of their page. Earlier pages stay until the next call.
  std::byte* find(std::size_t at) {
    const std::size_t page = at / page_bytes();
    while (!held_.empty() && held_.front().page < page) held_.pop_front();
    if (held_.empty() || held_.front().page != page) {
      held_.clear();
      held_.push_back({page, pin(page)});
    }
    held_.front().pin.wait();
    const bool more = (page + 1) * page_bytes() < end_;
    if (more && held_.size() == 1 && access_ == Access::read) {
      // A pin of a gathered page starts its gather. All ranks do so at the same place.
      const bool is_gathered = segment_.cache()->is_gathered();
      PagePin next = is_gathered ? pin(page + 1) : segment_.cache()->try_pin_page(segment_, page + 1, access_);
      if (next) held_.push_back({page + 1, std::move(next)});
    }
    return held_.front().pin.data() + (at - page * page_bytes());
  }

 private:
  struct Held {
    std::size_t page;
    PagePin pin;
  };

  PagePin pin(std::size_t page) {
    const std::size_t first = page * page_bytes(), last = first + segment_.bytes_of(page);
    const bool all = begin_ <= first && last <= end_;
    const Access access = access_ == Access::overwrite && !all ? Access::write : access_;
    while (true) {
      try {
        return segment_.cache()->pin_page(segment_, page, access);
      } catch (const VersionOpen&) {
        segment_.settle();
      }
    }
  }

  StorageSegment& segment_;
  const Access access_;
  const std::size_t item_bytes_;
  std::size_t begin_, end_;
  MemoryClaim claim_;  // ends after the pins
  std::deque<Held> held_;
};

}  // namespace

Rows::Rows(const at::Tensor& tensor)
    : segment(&paged_segment(tensor)),
      begin(tensor.storage_offset()),
      rows(tensor.size(-1) ? tensor.numel() / tensor.size(-1) : 0),
      columns(tensor.size(-1)),
      options(tensor.options().requires_grad(false)) {}

StorageSegment& paged_segment(const at::Tensor& tensor) {
  if (auto* segment = segment_of(tensor)) return *segment;
  throw AccessError(
      "a paged tensor that autograd saved came back as an ordinary one: hooks for saved tensors are to hand on what "
      "zeropage.is_paged() as it is");
}

Rows Rows::part(std::int64_t index, std::int64_t parts) const { return range(index * (rows / parts), rows / parts); }

Rows Rows::range(std::int64_t first, std::int64_t n) const {
  Rows range = *this;
  range.begin += static_cast<std::size_t>(first * columns);
  range.rows = n;
  return range;
}

Rows Rows::elements(const at::Tensor& tensor, std::size_t begin, std::int64_t n) {
  Rows elements(tensor);
  elements.begin = begin;
  elements.rows = n;
  elements.columns = 1;
  return elements;
}

Scratch::Scratch(const std::shared_ptr<Domain>& domain, std::int64_t elements, at::ScalarType dtype)
    : paged_(make_paged(domain, elements, 1, c10::scalarTypeToTypeMeta(dtype), Role::activation,
                        {.alone = true, .is_local = true})),
      // Its user walks over the pages of two operands meanwhile.
      pin_(PinRequest{segment_of(paged_), Access::overwrite}, {.extra = 4 * domain->cache->page_bytes()}),
      tensor_(
          at::from_blob(paged_.storage().mutable_data(), elements, [](void*) {}, paged_.options(), domain->device)) {}

namespace {

/// Libraries round doubles that do not fill a kernel differently. A kernel takes 12 of them at once, or 48 if threads
/// share a product. Tiles therefore end where a kernel does: at multiples of 48, if so many fit, else down to 12.
std::int64_t fewest_rows(const Rows& rows, std::size_t most_bytes) {
  if (rows.options.dtype() != at::kDouble || rows.columns == 1) return kFewestRows;
  std::int64_t fewest = 48;
  while (fewest > 12 && fewest * rows.columns * sizeof(double) > most_bytes) fewest /= 2;
  return fewest;
}

}  // namespace

void for_each_tile(const Rows& rows, Access access,
                   c10::function_ref<void(std::int64_t row, const at::Tensor& tile)> use) {
  const std::size_t item_bytes = rows.options.dtype().itemsize(), row_bytes = rows.columns * item_bytes;
  const std::size_t page_bytes = rows.segment->page_bytes(), begin = rows.begin * item_bytes;
  const std::size_t limit = rows.segment->cache()->frame_limit();
  const std::int64_t fewest = fewest_rows(rows, limit / 8);
  // Tiles that cross pages write the pages in parts.
  const bool whole_pages = begin % page_bytes == 0 && page_bytes % (fewest * row_bytes) == 0;
  PagesInTurn pages(rows, access == Access::overwrite && !whole_pages ? Access::write : access);
  const auto over = [&](std::byte* data, std::int64_t n, std::int64_t columns) {
    return at::from_blob(data, {n, columns}, [](void*) {}, rows.options, rows.options.device());
  };
  // A product packs the other operand anew for each tile, so small pages are joined to fewer, larger tiles.
  const auto rows_of_page = std::max<std::int64_t>(page_bytes / row_bytes, 1);
  const auto unit = whole_pages ? rows_of_page : fewest;
  const auto good = std::clamp<std::int64_t>(limit / 8 / row_bytes, fewest, kGoodRows);
  const std::int64_t some = std::max<std::int64_t>(round_down(good, unit), whole_pages ? unit : fewest);
  const std::int64_t wanted = rows.at_once ? rows.rows : some;
  std::optional<Scratch> scratch;  // for all rows at once; few rows use memory outside the budget
  at::Tensor some_rows;
  for (std::int64_t row = 0; row < rows.rows;) {
    const std::int64_t left = rows.rows - row;
    const std::size_t at = begin + row * row_bytes;
    const auto in_page = static_cast<std::int64_t>((page_bytes - at % page_bytes) / row_bytes);
    if (in_page >= std::min(left, wanted)) {
      const std::int64_t n = in_page >= left ? left : round_down(in_page, fewest);
      // Leave at least `fewest` rows for the last tile.
      const bool joins = n < left && left - n < fewest && n > fewest;
      const std::int64_t taken = joins ? n - fewest : n;
      use(row, over(pages.find(at), taken, rows.columns));
      row += taken;
      continue;
    }
    const std::int64_t n = left < wanted + fewest ? left : wanted;
    if (n * row_bytes > limit) {
      throw BudgetError(
          fmt::format("{} rows of {} each are needed at once; raise device_memory", n, format_bytes(row_bytes)));
    }
    const std::int64_t elements = n * rows.columns;
    if (rows.at_once) {
      scratch.emplace(rows.segment->domain(), elements, c10::typeMetaToScalarType(rows.options.dtype()));
      some_rows = scratch->tensor();
    } else if (!some_rows.defined() || some_rows.numel() < elements) {
      some_rows = at::empty(elements, rows.options);
    }
    const at::Tensor flat = some_rows.narrow(0, 0, elements).unsqueeze(1), tile = flat.view({n, rows.columns});
    const auto for_each_piece = [&](auto copy) {
      const std::size_t bytes = n * row_bytes;
      for (std::size_t done = 0; done < bytes;) {
        const std::size_t here = std::min(bytes - done, page_bytes - (at + done) % page_bytes);
        const auto elements = static_cast<std::int64_t>(here / item_bytes);
        copy(over(pages.find(at + done), elements, 1), flat.narrow(0, done / item_bytes, elements));
        done += here;
      }
    };
    if (access != Access::overwrite)
      for_each_piece([](const at::Tensor& page, at::Tensor part) { part.copy_(page); });
    use(row, tile);
    if (access != Access::read) for_each_piece([](at::Tensor page, const at::Tensor& part) { page.copy_(part); });
    row += n;
  }
}

namespace {

/// All elements of the segment from the first to the last of a view, each a row.
Rows span_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  Rows rows(tensor.as_strided({last + 1, 1}, {1, 1}));
  return rows;
}

at::Tensor flat_of(const at::Tensor& copy, const Rows& span) { return copy.as_strided({span.rows, 1}, {1, 1}, 0); }

}  // namespace

at::Tensor copy_of_part(const at::Tensor& tensor) {
  const Rows span = span_of(tensor);
  const at::Tensor flat = at::empty({span.rows, 1}, span.options);
  for_each_tile(span, Access::read,
                [&](std::int64_t row, const at::Tensor& tile) { flat.narrow(0, row, tile.size(0)).copy_(tile); });
  return flat.as_strided(tensor.sizes(), tensor.strides(), 0);
}

void copy_back(const at::Tensor& copy, const at::Tensor& tensor) {
  const Rows span = span_of(tensor);
  const at::Tensor flat = flat_of(copy, span);
  for_each_tile(span, Access::write,
                [&](std::int64_t row, at::Tensor tile) { tile.copy_(flat.narrow(0, row, tile.size(0))); });
}

namespace {

/// Works also for a segment without a home, whose bytes() are still 0.
std::size_t bytes_of_storage(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
}

}  // namespace

bool is_part(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment || segment->quantisation()) return false;
  const Domain& domain = *segment->domain();
  if (domain.tiling == Tiling::off || domain.partition.ranks) return false;
  if (2 * tensor.nbytes() > bytes_of_storage(tensor) || domain.cache->holds_everything()) return false;
  if (segment->is_unallocated()) segment->complete();  // its operator reads it now; only then does it have pages
  return segment->bytes() > segment->page_bytes();
}

bool is_tiled(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment || segment->quantisation()) return false;
  const Domain& domain = *segment->domain();
  if (domain.tiling == Tiling::off || bytes_of_storage(tensor) <= domain.tile_above) return false;
  // Ranks may use other views, and own tensors of other sizes.
  if (domain.partition.ranks && (segment->is_own() || !is_whole(tensor))) return false;
  if (segment->is_unallocated()) segment->complete();
  return true;
}

}  // namespace zeropage
