#include "zeropage/rules/preview.h"

#include <ATen/ops/_unique.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

// Bytes outside the budget: of copies, and of blocks that are being read.
constexpr std::size_t kMostBytes = 16 * kMiB, kMostInFlight = 8 * kMiB;
constexpr std::size_t kOneRead = 2 * kBlockBytes;  // for a row that begins anywhere in a block
/// A preview that reads more than this part of the program's bytes does not pay.
constexpr std::size_t kWorthIt = 4;

/// Copies ranges of segments, from pages in memory and, many at once, from disk.
class PartReader {
 public:
  /// `into` must live until finish(). Ranges of one segment come in order.
  void add(StorageSegment& segment, std::size_t at, std::size_t bytes, std::byte* into) {
    while (bytes > 0) {
      const std::size_t page = at / segment.page_bytes(), within = at % segment.page_bytes();
      const std::size_t here = std::min(bytes, segment.page_bytes() - within);
      add_within(segment, page, {within, here, into});
      at += here, into += here, bytes -= here;
    }
  }
  void finish() {
    for (Blocks& blocks : all_) start(blocks);
    for (Blocks& blocks : all_) end(blocks);
    all_.clear();
    in_flight_ = 0;
  }

 private:
  struct Part {
    std::size_t at, bytes;  // in the page
    std::byte* into;
  };
  /// Consecutive blocks of a page, and the parts that they contain.
  struct Blocks {
    StorageSegment* segment;
    std::size_t page, begin, end;
    std::vector<Part> parts;
    Buffer buffer = nullptr;
    HomeRead read = {};  // ends before the buffer
  };

  void add_within(StorageSegment& segment, std::size_t page, Part part) {
    const std::size_t begin = round_down(part.at, kBlockBytes), end = round_up(part.at + part.bytes, kBlockBytes);
    if (all_.empty() || all_.back().segment != &segment || all_.back().page != page || begin > all_.back().end) {
      if (in_flight_ > kMostInFlight) finish();
      all_.push_back({&segment, page, begin, begin, {}});
    }
    in_flight_ += end - all_.back().end;
    all_.back().end = end;
    all_.back().parts.push_back(part);
  }

  static void start(Blocks& blocks) {
    const std::size_t bytes = blocks.end - blocks.begin;
    blocks.buffer = make_buffer(bytes);
    blocks.read = blocks.segment->cache()->read_part_of_home(*blocks.segment, blocks.page, blocks.begin, bytes,
                                                             blocks.buffer.get());
  }

  static void end(Blocks& blocks) {
    const std::byte* from = nullptr;  // of the first block
    if (blocks.read) {
      const Booking waits(Spent::disk);
      if (blocks.read.wait()) from = blocks.buffer.get();
    }
    PagePin pin;
    if (!from) {
      FrameCache& cache = *blocks.segment->cache();
      pin = cache.try_pin_page(*blocks.segment, blocks.page, Access::read, /*is_brief=*/true);
      if (!pin || !pin.try_wait()) {
        pin = {};
        pin = cache.pin_page(*blocks.segment, blocks.page, Access::read);
        pin.wait();
      }
      from = pin.data() + blocks.begin;
    }
    for (const Part& part : blocks.parts) std::memcpy(part.into, from + part.at - blocks.begin, part.bytes);
  }

  std::vector<Blocks> all_;
  std::size_t in_flight_ = 0;
};

/// The units that contain the rows, as ranges of elements. Rows are sorted.
std::vector<Cut> cuts_around(c10::ArrayRef<std::int64_t> rows, std::size_t columns, std::size_t unit,
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

/// Gives a counter its present value back at the end.
class Restored {
 public:
  explicit Restored(std::atomic<std::size_t>& counter) : counter_(counter), value_(counter) {}
  ~Restored() { counter_ = value_; }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  std::atomic<std::size_t>& counter_;
  const std::size_t value_;
};

std::size_t elements_of(c10::ArrayRef<Cut> cuts) {
  std::size_t elements = 0;
  for (const Cut& cut : cuts) elements += cut.end - cut.begin;
  return elements;
}

/// The parts of the cuts before and after an element.
std::pair<std::vector<Cut>, std::vector<Cut>> divided(c10::ArrayRef<Cut> cuts, std::size_t at) {
  std::pair<std::vector<Cut>, std::vector<Cut>> parts;
  for (const Cut& cut : cuts) {
    const std::size_t middle = std::clamp(at, cut.begin, cut.end);
    if (cut.begin < middle) parts.first.push_back({cut.begin, middle});
    if (middle < cut.end) parts.second.push_back({middle, cut.end});
  }
  return parts;
}

}  // namespace

/// Kernels round the last elements of a range in another way ([Note: bits at the edges] in windows.h), so all ranges
/// but the tensor's last are whole vectors, and one thread's part of the operator is the whole tensor.
std::size_t Program::unit_of_preview(const at::Tensor& tensor) const {
  const auto its = std::ranges::find(slots_, segment_of(tensor), &Slot::segment);
  if (its == slots_.end() || its->temporary || is_zeroed(*its) || its->per != 1 ||
      its->shape.dtype() != tensor.dtype() || its->shape.numel() != tensor.numel()) {
    return 0;
  }
  if (running_ || in_host_ || domain_->partition.ranks || domain_->planned_on) return 0;
  if (!code_.any_chunking && chunk_of(elements_, 0, code_.chunking, at::get_num_threads()).end != elements_) {
    return 0;
  }
  std::size_t unit = kVector;
  for (const Slot& slot : slots_) {
    if (!slot.shape.is_cpu() || (slot.segment && !slot.temporary && slot.segment->is_unallocated())) return 0;
    unit = std::max(unit, slot.per);
  }
  const bool fits = std::ranges::all_of(slots_, [&](const Slot& slot) { return unit % slot.per == 0; });
  return fits && (progress_.done == elements_ || progress_.done % unit == 0) ? unit : 0;
}

at::Tensor Program::preview(const StorageSegment& segment, c10::ArrayRef<Cut> cuts) {
  const Computing computing;
  const c10::impl::ExcludeDispatchKeyGuard below_us(kPagedKeys);
  const auto [made, rest] = divided(cuts, progress_.done);
  const auto slot = std::ranges::find(slots_, &segment, &Slot::segment);
  const at::Tensor result = at::empty(static_cast<std::int64_t>(elements_of(cuts)), slot->shape.options());
  PartReader reader;
  auto* into = static_cast<std::byte*>(result.mutable_data_ptr());
  for (const Cut& cut : made) {
    const std::size_t bytes = (cut.end - cut.begin) * result.itemsize();
    reader.add(*slot->segment, cut.begin * result.itemsize(), bytes, into);
    into += bytes;
  }
  if (rest.empty()) return reader.finish(), result;
  const std::size_t elements = elements_of(rest);
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
    for (const Cut& cut : rest) {
      const std::size_t begin = cut.begin / slot.per * item, end = ceil_div(cut.end, slot.per) * item;
      reader.add(*slot.segment, begin, end - begin, into);
      into += end - begin;
    }
  }
  reader.finish();
  const auto update = find_update(code_.instructions);
  const Running running(running_);
  const Restored written(written_window_), not_finite(domain_->not_finite);
  update ? run_update_on(*update, slices, operand_of) : run_piece(code_.instructions, slices, operand_of);
  result.narrow(0, result.numel() - slices[wanted].numel(), slices[wanted].numel()).copy_(slices[wanted]);
  return result;
}

at::Tensor preview(const at::Tensor& tensor) {
  auto* const segment = segment_of(tensor);
  if (!has_program(segment) || !segment->is_unallocated() || !is_operand(tensor, tensor)) return {};
  if (tensor.nbytes() > segment->domain()->cache->frame_limit()) return {};  // its operator reads pages repeatedly
  const auto& domain = segment->domain();
  if (domain->partition.ranks) return {};  // all ranks would have to make the same copies
  std::lock_guard lock(domain->deferral_mutex);
  const auto program = std::static_pointer_cast<Program>(segment->deferred());
  if (program) discard_ahead(*program);
  if (!program || !program->makes_only(*segment)) return {};
  try {
    at::Tensor copy = make_paged(domain, tensor.sizes(), tensor.strides(), tensor.dtype(), segment->role(),
                                 {.layout = segment->layout(), .like = segment});
    const PinRequest request{segment_of(copy), Access::overwrite};
    const TensorPin in_one_frame(request);
    program->run_into(copy, *segment);
    return copy;
  } catch (const BudgetError&) {
    return {};  // no room for both: the caller makes the tensor itself
  }
}

namespace {

/// The segment of a weight whose rows may be previewed; null if there is none.
StorageSegment* find_deferred(const at::Tensor& weight, const at::Tensor& indices) {
  auto* const segment = segment_of(weight);
  if (!has_program(segment) || segment->is_unallocated() || segment->is_pinned() || !indices.is_cpu()) return nullptr;
  const Domain& domain = *segment->domain();
  if (domain.cache->holds_everything() && !domain.leaves_updates) return nullptr;
  return weight.dim() == 2 && weight.is_contiguous() && is_whole(weight) ? segment : nullptr;
}

/// Whether a preview pays.
bool pays(c10::ArrayRef<Cut> cuts, std::size_t elements, const Domain& domain) {
  const std::size_t bytes = elements_of(cuts) * sizeof(float) + cuts.size() * kOneRead;
  return domain.leaves_updates || bytes * kWorthIt <= elements * sizeof(float);
}

/// Copies rows out of the content of the cuts, which contain them.
void copy_rows(const at::Tensor& content, c10::ArrayRef<Cut> cuts, c10::ArrayRef<std::int64_t> rows,
               std::size_t columns, std::byte* into) {
  const auto* const from = static_cast<const std::byte*>(content.const_data_ptr());
  const std::size_t item = content.itemsize();
  std::size_t cut = 0, place = 0;  // the cut's place in the content, in elements
  for (const std::int64_t row : rows) {
    const std::size_t first = static_cast<std::size_t>(row) * columns;
    for (; cuts[cut].end <= first; ++cut) place += cuts[cut].end - cuts[cut].begin;
    std::memcpy(into, from + (place + first - cuts[cut].begin) * item, columns * item);
    into += columns * item;
  }
}

}  // namespace

at::Tensor preview_rows(const at::Tensor& weight, const at::Tensor& indices) {
  auto* const segment = find_deferred(weight, indices);
  if (!segment) return {};
  const Computing computing;
  const auto [unique, places] = at::_unique(indices.to(c10::kLong), /*sorted=*/true, /*return_inverse=*/true);
  const c10::ArrayRef<std::int64_t> rows(unique.const_data_ptr<std::int64_t>(),
                                         static_cast<std::size_t>(unique.numel()));
  if (rows.empty() || rows.front() < 0 || rows.back() >= weight.size(0)) return {};
  Domain& domain = *segment->domain();
  std::lock_guard lock(domain.deferral_mutex);
  if (const auto deferred = segment->deferred()) deferred->settle();
  const auto program = std::static_pointer_cast<Program>(segment->deferred());
  if (!program) return {};
  discard_ahead(*program);
  const std::size_t unit = program->unit_of_preview(weight);
  if (unit == 0) return {};
  const auto columns = static_cast<std::size_t>(weight.size(1)), elements = static_cast<std::size_t>(weight.numel());
  if (!pays(cuts_around(rows, columns, unit, elements), elements, domain)) return {};
  const std::size_t most = std::min(kMostBytes, domain.cache->frame_limit() / 8);
  const std::size_t at_once = most / ((columns + 2 * unit) * program->slots().size() * sizeof(float));
  const std::size_t row_bytes = columns * weight.itemsize();
  if (at_once == 0 || rows.size() * row_bytes > most) return {};
  const at::Tensor table =
      at::empty({static_cast<std::int64_t>(rows.size()), weight.size(1)}, weight.options().requires_grad(false));
  auto* into = static_cast<std::byte*>(table.mutable_data_ptr());
  for (std::size_t i = 0; i < rows.size(); i += at_once) {
    const auto some = rows.slice(i, std::min(at_once, rows.size() - i));
    const auto cuts = cuts_around(some, columns, unit, elements);
    copy_rows(program->preview(*segment, cuts), cuts, some, columns, into + i * row_bytes);
  }
  // The next step's operators do not join it: it would keep its gradients, and grow.
  program->seal();
  program->open_when_idle(segment->update_habit);
  ++domain.previews;
  return table.index_select(0, places);
}

}  // namespace zeropage
