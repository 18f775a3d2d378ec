#include "zeropage/rules/preview.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/io/buffers.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

constexpr std::size_t kMostBytes = 32 * kMiB;  // of copies, outside the budget
/// A preview of more rows than this part of all does not pay.
constexpr std::int64_t kWorthIt = 8;

/// Copies ranges of segments, from pages in memory and, all at once, from disk.
class PartReader {
 public:
  /// `into` must live until finish().
  void add(StorageSegment& segment, std::size_t at, std::size_t bytes, std::byte* into) {
    while (bytes > 0) {
      const std::size_t page = at / segment.page_bytes(), within = at % segment.page_bytes();
      const std::size_t here = std::min(bytes, segment.page_bytes() - within);
      add_within({.segment = &segment, .page = page, .at = within, .bytes = here, .into = into});
      at += here, into += here, bytes -= here;
    }
  }
  void finish() {
    for (Part& part : parts_) {
      if (part.read && part.read.wait()) {
        std::memcpy(part.into, part.buffer.get() + part.at % kBlockBytes, part.bytes);
      } else {
        PagePin pin = part.segment->cache()->pin_page(*part.segment, part.page, Access::read);
        pin.wait();
        std::memcpy(part.into, pin.data() + part.at, part.bytes);
      }
    }
    parts_.clear();
  }

 private:
  struct Part {
    StorageSegment* segment;
    std::size_t page, at, bytes;
    std::byte* into;
    Buffer buffer = nullptr;
    HomeRead read = {};  // ends before the buffer
  };

  void add_within(Part part) {
    FrameCache& cache = *part.segment->cache();
    if (PagePin pin = cache.try_pin_page(*part.segment, part.page, Access::read, /*is_brief=*/true);
        pin && pin.try_wait()) {
      std::memcpy(part.into, pin.data() + part.at, part.bytes);
      return;
    }
    if (!part.segment->run()->shares_page()) {
      const std::size_t begin = round_down(part.at, kBlockBytes), end = round_up(part.at + part.bytes, kBlockBytes);
      part.buffer = make_buffer(end - begin);
      part.read = cache.read_part_of_home(*part.segment, part.page, begin, end - begin, part.buffer.get());
    }
    parts_.push_back(std::move(part));
  }

  std::vector<Part> parts_;
};

/// The units in which the rows lie, as ranges of elements. Rows are sorted.
std::vector<Cut> cuts_around(const std::vector<std::int64_t>& rows, std::size_t columns, std::size_t unit,
                             std::size_t elements) {
  std::vector<Cut> cuts;
  for (const std::int64_t row : rows) {
    const std::size_t first = static_cast<std::size_t>(row) * columns;
    const Cut cut{round_down(first, unit), std::min(round_up(first + columns, unit), elements)};
    if (!cuts.empty() && cut.begin <= cuts.back().end) {
      cuts.back().end = std::max(cuts.back().end, cut.end);
    } else {
      cuts.push_back(cut);
    }
  }
  return cuts;
}

std::size_t elements_of(c10::ArrayRef<Cut> cuts) {
  std::size_t elements = 0;
  for (const Cut& cut : cuts) elements += cut.end - cut.begin;
  return elements;
}

}  // namespace

/// Kernels round the last elements of a range in another way ([Note: bits at the edges] in windows.h), so all ranges
/// but the tensor's last are whole vectors, and one thread's part of the operator is the whole tensor.
std::size_t Program::unit_of_preview() const {
  if (running_ || in_host_ || domain_->partition.ranks || domain_->planned_on) return 0;
  if (!code_.any_chunking &&
      chunk_of(elements_, 0, code_.chunking, at::get_num_threads()).end != elements_) {
    return 0;
  }
  std::size_t unit = kVector;
  for (const Slot& slot : slots_) {
    if (!slot.shape.is_cpu() || (slot.segment && !slot.temporary && slot.segment->is_unallocated())) return 0;
    unit = std::max(unit, slot.per);
  }
  const bool fits = std::ranges::all_of(slots_, [&](const Slot& slot) { return unit % slot.per == 0; });
  return fits ? unit : 0;
}

at::Tensor Program::preview(const StorageSegment& segment, c10::ArrayRef<Cut> cuts) {
  const Computing computing;
  const c10::impl::ExcludeDispatchKeyGuard below_us(kPagedKey);
  const std::size_t elements = elements_of(cuts);
  PartReader reader;
  c10::SmallVector<at::Tensor, 8> slices;
  std::vector<int> operand_of(slots_.size(), -1);
  int wanted = -1;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.segment || (slot.temporary && is_zeroed(slot))) continue;
    operand_of[i] = static_cast<int>(slices.size());
    slices.push_back(at::empty(static_cast<std::int64_t>(ceil_div(elements, slot.per)), slot.shape.options()));
    if (slot.segment == &segment) wanted = operand_of[i];
    if (slot.temporary || slot.access == Access::overwrite) continue;
    const std::size_t item = slot.shape.itemsize();
    auto* into = static_cast<std::byte*>(slices.back().mutable_data_ptr());
    for (const Cut& cut : cuts) {
      const std::size_t begin = cut.begin / slot.per * item, end = ceil_div(cut.end, slot.per) * item;
      reader.add(*slot.segment, begin, end - begin, into);
      into += end - begin;
    }
  }
  reader.finish();
  const auto update = find_update(code_.instructions);
  const Running running(running_);
  const std::size_t written = written_window_, not_finite = domain_->not_finite;
  update ? run_update_on(*update, slices, operand_of) : run_piece(code_.instructions, slices, operand_of);
  written_window_ = written;
  domain_->not_finite = not_finite;
  return slices[wanted];
}

at::Tensor preview_rows(const at::Tensor& weight, const at::Tensor& indices) {
  auto* const segment = segment_of(weight);
  if (!has_program(segment) || segment->is_unallocated() || weight.dim() != 2 || !weight.is_contiguous() ||
      !is_whole(weight) || !indices.is_cpu() || segment->is_pinned()) {
    return {};
  }
  const Domain& domain = *segment->domain();
  const auto columns = static_cast<std::size_t>(weight.size(1));
  const at::Tensor on_host = indices.to(c10::kLong).contiguous();
  const c10::ArrayRef<std::int64_t> wanted(on_host.const_data_ptr<std::int64_t>(),
                                           static_cast<std::size_t>(on_host.numel()));
  std::vector<std::int64_t> rows(wanted.begin(), wanted.end());
  std::ranges::sort(rows);
  rows.erase(std::ranges::unique(rows).begin(), rows.end());
  // Tests let small tensors be previewed too.
  const std::int64_t part = domain.leaves_updates ? 1 : kWorthIt;
  if (rows.empty() || domain.cache->holds_everything() ||
      static_cast<std::int64_t>(rows.size()) > weight.size(0) / part) {
    return {};
  }
  std::lock_guard lock(segment->domain()->deferral_mutex);
  if (const auto deferred = segment->deferred()) deferred->settle();
  const auto program = std::static_pointer_cast<Program>(segment->deferred());
  if (!program) return {};
  discard_ahead(*program);
  const std::size_t unit = program->unit_of_preview(), elements = weight.numel();
  if (unit == 0 || program->begun()) return {};
  const std::vector<Cut> cuts = cuts_around(rows, columns, unit, elements);
  const std::size_t bytes = elements_of(cuts) * program->slots().size() * sizeof(float);
  if (bytes > std::min(kMostBytes, domain.cache->frame_limit() / 8)) return {};
  const at::Tensor flat = program->preview(*segment, cuts);
  const at::Tensor result = at::empty({on_host.numel(), weight.size(1)}, flat.options());
  const std::size_t row_bytes = columns * weight.itemsize();
  std::vector<std::size_t> places;  // of the cuts, in elements of `flat`
  std::size_t place = 0;
  for (const Cut& cut : cuts) places.push_back(place), place += cut.end - cut.begin;
  const auto* const from = static_cast<const std::byte*>(flat.const_data_ptr());
  auto* into = static_cast<std::byte*>(result.mutable_data_ptr());
  for (const std::int64_t row : wanted) {
    const std::size_t first = static_cast<std::size_t>(row) * columns;
    const auto cut = std::ranges::upper_bound(cuts, first, {}, &Cut::begin) - 1;
    const std::size_t at = places[cut - cuts.begin()] + first - cut->begin;
    std::memcpy(into, from + at * weight.itemsize(), row_bytes);
    into += row_bytes;
  }
  return result;
}

}  // namespace zeropage
