#include "zeropage/rules/windows.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/kernels/formats.h"

namespace zeropage {
namespace {

constexpr std::size_t kLargestWindow = std::size_t{1}
                                       << 22;  // elements, if no page ends sooner: bounds the memory of `run`

/// Bytes of all operands from which threads share a window. PyTorch's grain, for an operator on two float32 tensors.
constexpr std::size_t kShared = 2 * sizeof(float) * at::internal::GRAIN_SIZE;

/// One operand's bytes, reached window by window.
class Cursor {
 public:
  /// `share`: windows cover this rank's share, but the operand's segment holds the whole.
  Cursor(const Operand& operand, const Stripes* share, Where where)
      : operand_(operand),
        share_(share),
        where_(where),
        item_bytes_(operand.tensor.itemsize()),
        page_elements_(operand.segment ? operand.segment->page_bytes() / item_bytes_ * operand.per : ~std::size_t{0}),
        options_(operand.tensor.options().requires_grad(false)) {
    if (where == Where::in_host) options_ = options_.device(c10::kCPU);
    if (!operand.segment) plain_ = static_cast<std::byte*>(const_cast<void*>(operand.tensor.const_data_ptr()));
  }

  std::size_t next_edge(std::size_t at) const {
    const std::size_t part_end = share_ ? share_->part_end(at) : ~std::size_t{0};
    if (!operand_.segment) return part_end;
    const std::size_t here = share_ ? share_->in_tensor(at) : at;
    return std::min((here / page_elements_ + 1) * page_elements_ - here + at, part_end);
  }

  /// Pins the page or pages of the window and unpins earlier ones. `resumes`: a walk that throws in the middle of a
  /// page goes on there, so that an overwritten page may be incomplete until then. False if the host cannot hold a
  /// page, or, unless it `waits`, if one is not in memory.
  [[nodiscard]] bool move_to(Cut window, bool resumes, bool waits = true) {
    window = shift(window);
    if (!operand_.segment) return true;
    const std::size_t low = window.begin / page_elements_, high = (window.end - 1) / page_elements_;
    if (held_[0].pin && held_[0].page < low) held_[0] = std::move(held_[1]), held_[1] = {};
    return hold(held_[0], low, access_to(low, window, resumes), waits) &&
           (high == low || hold(held_[1], high, access_to(high, window, resumes), waits));
  }
  void let_go() { held_[0] = {}, held_[1] = {}; }
  /// Notes, in a lasting stream, that all before `at` is done.
  void reach(std::size_t at) const {
    if (operand_.segment) reach_in_stream(operand_, at);
  }

  bool reads() const { return operand_.access == Access::read; }
  bool overwrites() const { return operand_.access == Access::overwrite; }
  std::size_t bytes_of(std::size_t elements) const { return elements / operand_.per * item_bytes_; }

  /// Waits for the pages. A page for overwriting keeps its content until then, so wait after all pages that are read.
  void wait() {
    for (Held& held : held_) {
      if (held.pin) held.pin.wait();
    }
  }

  bool try_wait() {
    return std::ranges::all_of(held_, [](Held& held) { return !held.pin || held.pin.try_wait(); });
  }

  /// Makes the pages keep their changes even if a later window of them fails.
  void keep() {
    for (Held& held : held_) held.pin.written();
  }

  bool straddles(Cut window) const {
    window = place(window);
    return operand_.segment && window.begin / page_elements_ != (window.end - 1) / page_elements_;
  }

  /// The part [begin, end) of the current window, which must not straddle two pages.
  at::Tensor slice(Cut part) const {
    part = place(part);
    const std::size_t begin = operand_.segment ? part.begin - held_[0].page * page_elements_ : part.begin;
    std::byte* const data = (operand_.segment ? held_[0].pin.data() : plain_) + begin / operand_.per * item_bytes_;
    const auto length = static_cast<std::int64_t>(ceil_div(part.end - part.begin, operand_.per));
    return at::from_blob(data, {length}, [](void*) {}, options_, options_.device());
  }

  /// Gathers a window that straddles two pages into scratch memory.
  at::Tensor gather(Cut window) {
    window = place(window);
    move_straddling(window, /*into_pages=*/false);
    return at::from_blob(
        scratch_, {static_cast<std::int64_t>(window.end - window.begin)}, [](void*) {}, options_, options_.device());
  }

  void scatter(Cut window) {
    if (operand_.access != Access::read) move_straddling(place(window), /*into_pages=*/true);
  }

 private:
  struct Held {
    PagePin pin;
    std::size_t page = 0;
  };

  /// The range of the operand's segment or memory for a window. A window is within one part of the share.
  Cut shift(Cut window) {
    if (share_) shift_ = share_->in_tensor(window.begin) - window.begin;
    return place(window);
  }
  Cut place(Cut range) const { return {range.begin + shift_, range.end + shift_}; }

  /// A walk discards a page's content for overwriting only at the page's beginning. If an error could leave the page
  /// incomplete, one window must also cover all of it.
  Access access_to(std::size_t page, Cut window, bool resumes) const {
    if (operand_.access != Access::overwrite) return operand_.access;
    const std::size_t begin = page * page_elements_;
    const std::size_t end = std::min(begin + page_elements_, operand_.segment->bytes() / item_bytes_ * operand_.per);
    const bool from_start = window.begin <= begin, in_one = window.end >= end;
    return from_start && (resumes || in_one) ? Access::overwrite : Access::write;
  }

  bool hold(Held& held, std::size_t page, Access access, bool waits) {
    if (held.pin && held.page == page) return true;
    held.pin = {};
    held.pin = waits ? pin(page, access)
                     : operand_.segment->cache()->try_pin_page(*operand_.segment, page, access, /*is_brief=*/true);
    if (!held.pin) return false;
    if (operand_.segment->role() == Role::optimizer) held.pin.will_not_reuse();
    held.page = page;
    return true;
  }

  PagePin pin(std::size_t page, Access access) {
    FrameCache& cache = *operand_.segment->cache();
    while (true) {
      try {
        return where_ == Where::in_host ? cache.pin_page_below(*operand_.segment, page, access)
                                        : cache.pin_page(*operand_.segment, page, access);
      } catch (const VersionOpen&) {  // opened since the walk began
        operand_.segment->settle();
      }
    }
  }

  void move_straddling(Cut window, bool into_pages) {
    if (operand_.segment->domain()->planned_on) return;
    const std::size_t edge = held_[1].page * page_elements_;
    const std::size_t before = (edge - window.begin) * item_bytes_, after = (window.end - edge) * item_bytes_;
    std::byte* low = held_[0].pin.data() + (window.begin - held_[0].page * page_elements_) * item_bytes_;
    std::byte* high = held_[1].pin.data();
    if (into_pages) {
      std::memcpy(low, scratch_, before), std::memcpy(high, scratch_ + before, after);
    } else {
      std::memcpy(scratch_, low, before), std::memcpy(scratch_ + before, high, after);
    }
  }

  const Operand& operand_;
  const Stripes* share_;
  const Where where_;
  std::size_t shift_ = 0;
  std::size_t item_bytes_;
  std::size_t page_elements_;
  at::TensorOptions options_;
  std::byte* plain_ = nullptr;
  Held held_[2];
  alignas(64) std::byte scratch_[kVector * 16];
};

using Cursors = c10::SmallVector<std::unique_ptr<Cursor>, 8>;
using RunSlices = c10::function_ref<void(c10::ArrayRef<at::Tensor>)>;

void run_part(Cursors& cursors, Cut part, RunSlices run) {
  c10::SmallVector<at::Tensor, 8> slices;
  for (auto& cursor : cursors) slices.push_back(cursor->slice(part));
  run(slices);
}

void run_straddling(Cursors& cursors, Cut window, RunSlices run) {
  c10::SmallVector<at::Tensor, 8> slices;
  for (auto& cursor : cursors)
    slices.push_back(cursor->straddles(window) ? cursor->gather(window) : cursor->slice(window));
  run(slices);
  for (auto& cursor : cursors) {
    if (cursor->straddles(window)) cursor->scatter(window);
  }
}

/// Divides a window among ATen's threads. All parts except the last are whole vectors and whole blocks with one
/// scale.
void run_window(Cursors& cursors, Cut window, RunSlices run) {
  const std::size_t elements = window.end - window.begin;
  std::size_t bytes = 0;
  for (const auto& cursor : cursors) bytes += cursor->bytes_of(elements);
  if (bytes < kShared || at::get_num_threads() == 1) return run_part(cursors, window, run);
  const std::size_t part = round_up(ceil_div(elements, at::get_num_threads()), kernels::kQuantum);
  const bool inference = c10::InferenceMode::is_enabled();
  at::parallel_for(
      0, static_cast<std::int64_t>(ceil_div(elements, part)), 1, [&](std::int64_t first, std::int64_t last) {
        c10::InferenceMode same_mode(inference);
        c10::impl::ExcludeDispatchKeyGuard below_us(kPagedKeys);
        for (std::int64_t i = first; i < last; ++i) {
          run_part(cursors, {window.begin + i * part, std::min(window.end, window.begin + (i + 1) * part)}, run);
        }
      });
}

}  // namespace

Cut chunk_of(std::size_t elements, std::size_t at, Chunking chunking, std::size_t threads) {
  const std::size_t grain = at::internal::GRAIN_SIZE;
  if (chunking == Chunking::vectors || elements < grain || threads == 1) return {0, elements};
  // at::parallel_for computes it like this.
  const std::size_t share = ceil_div(elements, std::min(threads, ceil_div(elements, grain)));
  return {at / share * share, std::min(elements, (at / share + 1) * share)};
}

Cut window_at(std::size_t at, std::size_t edge, Cut chunk, std::size_t vector) {
  if (edge >= chunk.end) return {at, chunk.end};
  const std::size_t cut = chunk.begin + round_down(edge - chunk.begin, vector);
  if (cut > at) return {at, cut};
  return {at, std::min(at + vector, chunk.end)};  // straddles the edge
}

namespace {

/// The segments or memory that windows use for the operands.
struct Reach {
  c10::SmallVector<Operand, 8> operands;
  c10::SmallVector<const Stripes*, 8> shares;  // by operand: finds this rank's share in a whole tensor; or null
  std::size_t elements;
};

/// A segment whose share is enough, or null. Some operand must not be whole here, and ranks must share all outputs.
const StorageSegment* shared_among(c10::ArrayRef<Operand> operands) {
  const StorageSegment* shared = nullptr;
  for (const Operand& operand : operands) {
    if (operand.per > 1 && !operand.segment->is_of_share) return nullptr;
    if (operand.per > 1) continue;
    const bool read = operand.access == Access::read;
    if (!read && !(operand.segment && operand.segment->is_shareable())) return nullptr;
    if (!operand.segment) continue;
    if (operand.segment->is_partitioned() || (operand.segment->is_stale() && operand.access != Access::overwrite)) {
      shared = operand.segment;
    }
  }
  return shared;
}

/// Chooses shares or whole tensors ([Note: shares]).
Reach reach(c10::ArrayRef<Operand> operands, const StorageSegment* shared) {
  Reach reach{{operands.begin(), operands.end()}, {}, static_cast<std::size_t>(operands[0].tensor.numel())};
  reach.shares.resize(operands.size(), nullptr);
  if (shared) reach.elements = shared->stripes().own();
  for (std::size_t i = 0; i < operands.size(); ++i) {
    Operand& operand = reach.operands[i];
    if (!shared) {
      if (operand.segment) operand.segment->refresh(operand.access);
      continue;
    }
    if (operand.per > 1) continue;
    if (operand.segment) operand.segment->open_share(operand.access);
    if (operand.segment && operand.segment->is_partitioned()) {
      operand.segment = &operand.segment->share_segment();
    } else {
      reach.shares[i] = &shared->stripes();
    }
  }
  return reach;
}

/// Announces to each cache the segments that the walk uses page by page, if `is_new`, and claims the memory of its
/// pages.
std::vector<MemoryClaim> announce(const Reach& reach, Where where, bool is_new = true) {
  std::vector<MemoryClaim> claims;
  c10::SmallVector<PinRequest, 8> requests;
  FrameCache* cache = nullptr;
  const auto say = [&] {
    if (!cache) return;
    claims.push_back(where == Where::in_host ? cache->claim_below(requests) : cache->claim(requests));
    if (is_new) where == Where::in_host ? cache->announce_below(requests) : cache->announce(requests);
    requests.clear();
  };
  for (const Operand& operand : reach.operands) {
    if (!operand.segment) continue;
    if (operand.segment->cache().get() != cache) say();
    cache = operand.segment->cache().get();
    requests.push_back({operand.segment, operand.access});
  }
  say();
  return claims;
}

/// Loads the pages of a window. False if the host cannot hold them.
bool take_pages(Cursors& cursors, Cut window, bool resumes, Where where) {
  try {
    for (auto& cursor : cursors) {
      if (!cursor->move_to(window, resumes)) return false;
    }
  } catch (const BudgetError&) {
    if (where == Where::on_device) throw;
    return false;  // an update on the device needs less host memory: pages pass through it one by one
  }
  for (const bool reads : {true, false}) {
    for (auto& cursor : cursors) {
      if (cursor->reads() == reads) cursor->wait();
    }
  }
  return true;
}

/// Takes the pages of a window if they are in memory. A page to be overwritten has no content once its use begins, so
/// these come last, and all together.
bool take_pages_there(Cursors& cursors, Cut window) {
  const auto there = [&] {
    if (!std::ranges::all_of(cursors, [&](auto& c) { return c->move_to(window, /*resumes=*/true, /*waits=*/false); }))
      return false;
    return std::ranges::all_of(cursors, [](auto& cursor) { return cursor->overwrites() || cursor->try_wait(); });
  };
  if (!there()) {
    for (auto& cursor : cursors) cursor->let_go();
    return false;
  }
  for (auto& cursor : cursors) {
    if (cursor->overwrites()) cursor->wait();
  }
  return true;
}

/// Runs the windows from `progress` on. Ends early if the host cannot hold the pages. `keeps`: after an error the
/// caller resumes at `progress`.
void run_windows(const Reach& reach, Chunking chunking, RunSlices run, Progress& progress, bool resumes, bool keeps,
                 Where where) {
  const bool waits = progress.waits;
  const auto claims = waits ? announce(reach, where, !progress.is_streamed) : std::vector<MemoryClaim>();
  c10::impl::ExcludeDispatchKeyGuard below_us(kPagedKeys);
  const auto& operands = reach.operands;
  Cursors cursors;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    cursors.push_back(std::make_unique<Cursor>(operands[i], reach.shares[i], where));
  }
  const std::size_t elements = reach.elements;
  const bool device_is_cpu = std::all_of(operands.begin(), operands.end(), [](auto& o) { return o.tensor.is_cpu(); });
  const bool on_cpu = device_is_cpu || where == Where::in_host;
  // The threads of a whole tensor's operator: as many as at the first window, whatever their number is later.
  if (progress.threads == 0) progress.threads = device_is_cpu ? at::get_num_threads() : 1;
  const std::size_t threads = progress.threads;
  const std::size_t vector = on_cpu ? kVector : 1;
  const bool is_planned = std::any_of(operands.begin(), operands.end(),
                                      [](auto& o) { return o.segment && o.segment->domain()->planned_on; });
  for (std::size_t& at = progress.done; at < elements;) {
    if (progress.windows == 0) return;
    const Cut chunk = chunk_of(elements, at, chunking, threads);
    std::size_t edge = chunk.begin + round_down(at - chunk.begin + kLargestWindow, vector);
    for (const auto& cursor : cursors) edge = std::min(edge, cursor->next_edge(at));
    const Cut window = window_at(at, edge, chunk, vector);
    if (!(waits ? take_pages(cursors, window, resumes, where) : take_pages_there(cursors, window))) return;
    const Booking kernels(Spent::operators);
    const bool straddling =
        std::any_of(cursors.begin(), cursors.end(), [&](auto& c) { return c->straddles(window); });
    if (straddling) {
      run_straddling(cursors, window, run);
    } else {
      // Virtual time belongs to this thread.
      on_cpu && !is_planned ? run_window(cursors, window, run) : run_part(cursors, window, run);
    }
    for (auto& cursor : cursors) {
      if (keeps) cursor->keep();
      if (progress.is_streamed) cursor->reach(window.end);
      if (!waits) cursor->let_go();
    }
    at = window.end;
    --progress.windows;
  }
}

}  // namespace

bool for_each_window(c10::ArrayRef<Operand> operands, Chunking chunking, RunSlices run, Progress* progress,
                     Where where) {
  for (const Operand& operand : operands) {
    if (operand.segment) operand.segment->complete();
  }
  const StorageSegment* shared = shared_among(operands);
  Progress whole;
  // An operator that only overwrites can resume: no failed read stops it half-way.
  const bool resumes = progress || std::none_of(operands.begin(), operands.end(), [](const Operand& operand) {
                         return operand.segment && operand.access != Access::overwrite;
                       });
  Progress& so_far = progress ? *progress : whole;
  const Reach reached = reach(operands, shared);
  const bool reaches = std::all_of(reached.operands.begin(), reached.operands.end(), [](const Operand& operand) {
    return operand.segment ? operand.segment->cache()->reaches_below(*operand.segment) : operand.tensor.is_cpu();
  });
  if (where == Where::in_host && reaches)
    run_windows(reached, chunking, run, so_far, resumes, progress != nullptr, where);
  if (so_far.done < reached.elements)
    run_windows(reached, chunking, run, so_far, resumes, progress != nullptr, Where::on_device);
  if (shared || so_far.done < reached.elements) return so_far.done == reached.elements;
  for (const Operand& operand : operands) {
    const bool written = operand.segment && operand.access != Access::read;
    if (written && operand.segment->is_partitioned()) operand.segment->cache()->store(*operand.segment);
  }
  return true;
}

void reach_in_stream(const Operand& operand, std::size_t done) {
  const std::size_t page_elements = operand.segment->page_bytes() / operand.tensor.itemsize() * operand.per;
  operand.segment->cache()->reach_in_stream(*operand.segment, done / page_elements, done % page_elements > 0);
}

void copy_windows(const at::Tensor& to, const at::Tensor& from) {
  const Operand operands[] = {{to, segment_of(to), Access::overwrite}, {from, segment_of(from), Access::read}};
  for_each_window(operands, Chunking::iterator, [](c10::ArrayRef<at::Tensor> slices) { slices[0].copy_(slices[1]); });
}

void for_each_window_of_share(const Operand& operand, RunSlices run) {
  operand.segment->complete();
  Progress whole;
  run_windows(reach(operand, operand.segment), Chunking::iterator, run, whole, /*resumes=*/false, /*keeps=*/false,
              Where::on_device);
}

bool reaches_host(const StorageSegment& segment) {
  return segment.at_home().cache()->reaches_below(segment.at_home());
}

bool holds_share_only(const StorageSegment* segment) {
  return segment && (segment->is_partitioned() || segment->is_stale());
}

bool is_operand(const at::Tensor& tensor, const at::Tensor& shape) {
  return tensor.device() == shape.device() && lies_like(tensor, shape);
}

c10::DimVector strides_of_result(const at::Tensor& like) {
  if (like.is_contiguous()) return c10::contiguous_strides(like.sizes());
  if (like.is_contiguous(at::MemoryFormat::ChannelsLast))
    return c10::DimVector(c10::get_channels_last_strides_2d(like.sizes()));
  return c10::DimVector(like.strides());
}

bool lies_like(const at::Tensor& tensor, const at::Tensor& shape) {
  if (tensor.layout() != c10::kStrided || tensor.is_conj() || tensor.is_neg() ||
      tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_quantized() || !tensor.has_storage()) {
    return false;
  }
  if (tensor.sizes() != shape.sizes() || tensor.strides() != shape.strides()) return false;
  return segment_of(tensor) ? is_whole(tensor) : tensor.is_non_overlapping_and_dense();
}

}  // namespace zeropage
