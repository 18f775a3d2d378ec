#include "zeropage/train/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "zeropage/base/current_activity.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/base/units.h"
#include "zeropage/plan/machine.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

constexpr std::size_t kBucketBytes = 16 * kMiB;
constexpr std::size_t kBytesUnderWay = 2 * kBucketBytes;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) { return (hash ^ value) * 0x100000001b3; }  // FNV-1a

}  // namespace

/// One gradient on its way to its mean.
class Reducer::Reduction final : public Pending, public std::enable_shared_from_this<Reduction> {
 public:
  struct Target {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool add;
  };

  Reduction(Reducer& owner, std::uint64_t number, at::Tensor gradient, c10::ScalarType dtype, StorageSegment& target)
      : number(number), gradient(std::move(gradient)), dtype(dtype), owner_(owner.weak_from_this()) {
    scattered = target.is_partitioned() || (target.is_shareable() && !owner.domain_.partition.reduces_whole);
    stripes = target.stripes();
    bytes = stripes.elements() * c10::elementSize(dtype);
  }

  void complete() override {
    if (auto owner = owner_.lock()) owner->complete(*this);
  }

  bool add_to(StorageSegment& sum) override {
    if (sum.layout() != layout || sum.elements() != stripes.elements()) return false;
    sum.run_deferred();
    if (arrived) return false;
    add_target(sum, /*add=*/true);
    return true;
  }

  void add_target(StorageSegment& segment, bool add) {
    layout = segment.layout();
    targets.push_back({segment.storage(), add});
    segment.will_come(shared_from_this());
  }

  std::uint64_t number;  // of the leaf
  at::Tensor gradient;   // flat, in memory order; undefined: zeros, and once it was sent
  c10::ScalarType dtype;
  at::Tensor created;  // the first target, until it is handed out
  std::size_t bytes;
  bool scattered;
  Layout layout = Layout::replicated;
  Stripes stripes;
  std::vector<Target> targets;
  std::size_t pieces_left = 0;
  bool sent = false;       // all of it
  bool arrived = false;    // some of it: a target added now would miss that
  bool delivered = false;  // all of it

 private:
  std::weak_ptr<Reducer> owner_;
};

struct Reducer::PiecePart {
  ReductionPtr reduction;
  std::size_t in_result;  // where its elements begin there
  std::size_t begin;      // and in the share, or in the whole
  std::size_t elements;
};

/// One collective, and the reductions whose content it brings.
struct Reducer::Piece {
  std::unique_ptr<Ranks::Work> work;
  at::Tensor result;
  bool scaled = false;  // divided by the number of ranks already
  std::size_t bytes;
  std::vector<PiecePart> parts;
  // How far it came. An error leaves it here, and the next attempt goes on from here: nothing is added twice.
  bool over_replicas = false;
  std::size_t part = 0, target = 0, element = 0;
};

Reducer::Reducer(const Domain& domain)
    : domain_(domain), ranks_(*domain.partition.ranks), replicas_(domain.partition.replicas.get()) {}

Reducer::~Reducer() = default;

void Reducer::know(const at::Tensor& leaf) {
  std::lock_guard lock(mutex_);
  leaves_.insert_or_assign(segment_of(leaf)->number(), leaf.getIntrusivePtr());
}

Reducer::ReductionPtr Reducer::start(const at::Tensor& leaf, at::Tensor gradient) {
  const auto* segment = segment_of(leaf);
  at::Tensor paged = make_paged(segment->domain(), leaf.sizes(), leaf.strides(), gradient_dtype(leaf), Role::gradient,
                                {.number = segment->number()});
  auto reduction = std::make_shared<Reduction>(*this, segment->number(), std::move(gradient), paged.scalar_type(),
                                               *segment_of(paged));
  reduction->add_target(*segment_of(paged), /*add=*/false);
  reduction->created = std::move(paged);
  return reduction;
}

at::Tensor Reducer::reduce(const at::Tensor& leaf, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  NoPagingGuard no_paging;
  const CurrentActivity activity(
      [](const void* leaf) {
        return fmt::format("backward, at the gradient of a parameter [{}]",
                           fmt::join(static_cast<const at::Tensor*>(leaf)->sizes(), ", "));
      },
      &leaf);
  at::Tensor laid_out = gradient;
  if (gradient.strides() != leaf.strides() || segment_of(gradient) || gradient.dtype() != gradient_dtype(leaf)) {
    laid_out = at::empty_strided(leaf.sizes(), leaf.strides(),
                                 leaf.options().dtype(gradient_dtype(leaf)).requires_grad(false));
    c10::impl::IncludeDispatchKeyGuard fault_on_paged(kPagedKey);
    laid_out.copy_(gradient);
  }
  auto reduction = start(leaf, laid_out.as_strided(leaf.numel(), 1));
  at::Tensor paged = std::exchange(reduction->created, {});
  watch_backward();
  add(std::move(reduction));
  make_room();
  return paged;
}

/// Runs `exchange`, which all ranks do together. If it fails half-way, the other ranks may have gone further: no
/// later exchange can succeed, and all throw its error again.
template <class Exchange>
void Reducer::together(Exchange&& exchange) {
  if (failure_) std::rethrow_exception(failure_);
  try {
    exchange();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void Reducer::add(ReductionPtr reduction) {
  open_bytes_ += reduction->bytes;
  open_.push_back(std::move(reduction));
  if (open_bytes_ >= kBucketBytes) together([&] { send_open(Why::full); });
}

/// What is in the open bucket when backward ends goes on its way then.
void Reducer::watch_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == backward_ || task < 0) return;
  backward_ = task;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    try {
      self->settle();
    } catch (const Error& error) {
      throw_translated(error);
    }
  });
}

void Reducer::settle() {
  std::lock_guard lock(mutex_);
  NoPagingGuard no_paging;
  const CurrentActivity activity([](const void*) { return std::string("the sums of backward's last gradients"); },
                                 nullptr);
  together([&] { piling_ ? settle_pile() : send_open(Why::end); });
  make_room();
}

void Reducer::send_open(Why why) {
  auto bucket = std::exchange(open_, {});
  open_bytes_ = 0;
  if (!piling_) {
    std::uint64_t content = 0xcbf29ce484222325;
    for (const ReductionPtr& reduction : bucket) content = mix(mix(content, reduction->number), reduction->bytes);
    piling_ = !all_have({static_cast<std::int64_t>(why), static_cast<std::int64_t>(content),
                         static_cast<std::int64_t>(bucket.size())});
    if (!piling_) return send(bucket);
  }
  pile_.insert(pile_.end(), bucket.begin(), bucket.end());
  if (why == Why::end) settle_pile();
}

/// Whether the same is in every rank's bucket, here and among replicas.
bool Reducer::all_have(Collectives::Words mine) {
  const Subject subject{"gradients", 0, 0};
  const auto same = [&](const std::vector<Collectives::Words>& all) {
    return std::all_of(all.begin(), all.end(), [&](const auto& words) { return words == mine; });
  };
  const bool here = same(ranks_.agree(mine, subject));
  if (!replicas_) return here;
  mine[2] = here ? mine[2] : -1;
  return same(replicas_->agree(mine, subject)) && here;
}

/// The numbers that some rank of the group has.
std::set<std::uint64_t> Reducer::union_over(Collectives& group, const std::set<std::uint64_t>& mine) {
  const Subject subject{"gradients that not all ranks have", 0, 0};
  std::int64_t most = 0;
  for (const auto& words : group.agree({static_cast<std::int64_t>(mine.size()), 0, 0}, subject)) {
    most = std::max(most, words[0]);
  }
  if (most == 0) return {};
  at::Tensor numbers = at::zeros({most}, at::kLong);
  std::copy(mine.begin(), mine.end(), numbers.mutable_data_ptr<std::int64_t>());
  const at::Tensor all = group.all_gather_small(numbers, subject).contiguous();
  const auto* first = all.const_data_ptr<std::int64_t>();
  std::set<std::uint64_t> known(first, first + all.numel());
  known.erase(0);  // padding: numbers count from one
  return known;
}

/// [Note: buckets and ranks]
void Reducer::settle_pile() {
  pile_.insert(pile_.end(), open_.begin(), open_.end());
  open_.clear(), open_bytes_ = 0;
  std::set<std::uint64_t> known;
  for (const ReductionPtr& reduction : pile_) known.insert(reduction->number);
  known = union_over(ranks_, known);
  if (replicas_) known = union_over(*replicas_, known);
  std::vector<ReductionPtr> together;
  auto pile = std::exchange(pile_, {});
  for (const std::uint64_t number : known) {
    const auto mine = std::find_if(pile.begin(), pile.end(), [&](const auto& r) { return r->number == number; });
    together.push_back(mine != pile.end() ? *mine : missing(number));
  }
  piling_ = false;
  send(together);
}

/// Zeros, for a gradient that this rank has not and others have; the leaf gets the mean all the same.
Reducer::ReductionPtr Reducer::missing(std::uint64_t number) {
  const auto known = leaves_.find(number);
  const auto leaf =
      known == leaves_.end() ? c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>() : known->second.lock();
  if (!leaf) {
    throw RankError(
        fmt::format("other ranks have a gradient for parameter {}, which this rank has never used; let every rank "
                    "use it, or call "
                    "zeropage.together(module) on its module",
                    number));
  }
  const at::Tensor parameter(leaf);
  auto reduction = start(parameter, {});
  at::Tensor created = std::exchange(reduction->created, {});
  if (auto* sum = segment_of(parameter.grad())) {
    if (!reduction->add_to(*sum))
      throw RankError("a gradient that this rank lacks does not fit p.grad; clear p.grad");
  } else {
    parameter.mutable_grad() = std::move(created);
  }
  return reduction;
}

// --- sending ---

void Reducer::send(std::vector<ReductionPtr>& reductions) {
  std::vector<PackedPart> parts, wholes;  // what is to be packed
  for (const ReductionPtr& reduction : reductions) {
    reduction->scattered ? send_pages(reduction, parts) : wholes.push_back({reduction, 0});
  }
  if (!parts.empty()) send_packed_parts(parts);
  if (!wholes.empty()) send_packed_wholes(wholes);
  for (const ReductionPtr& reduction : reductions) {
    reduction->gradient.reset();
    reduction->sent = true;
    finish(*reduction);
  }
}

c10::ScalarType Reducer::wire_dtype(c10::ScalarType dtype) const {
  const auto chosen = domain_.partition.reduce_dtype;
  return chosen == c10::ScalarType::Undefined || !c10::isFloatingType(dtype) ? dtype : chosen;
}

/// Pages that lie as they are to be sent go as they are; the others are to be packed. Half precision is divided
/// before it is summed, so it must be packed.
void Reducer::send_pages(const ReductionPtr& reduction, std::vector<PackedPart>& to_pack) {
  const Stripes& stripes = reduction->stripes;
  const at::Tensor& gradient = reduction->gradient;
  const bool as_it_is =
      gradient.defined() && wire_dtype(reduction->dtype) == reduction->dtype && reduction->dtype != c10::kHalf;
  for (std::size_t page = 0; page < stripes.pages(); ++page) {
    const std::size_t part = stripes.part(page), begin = stripes.page_begin(page), all = part * stripes.ranks();
    if (!as_it_is || begin + all > stripes.elements()) {
      to_pack.push_back({reduction, page});
      continue;
    }
    at::Tensor sum = at::empty({static_cast<std::int64_t>(part)}, gradient.options());
    at::Tensor whole = gradient.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(all));
    const Subject subject{"gradient", reduction->number, page};
    auto piece = std::make_unique<Piece>();
    piece->work = ranks_.reduce_scatter(sum, whole, subject);
    piece->result = std::move(sum);
    piece->bytes = whole.nbytes();
    piece->parts.push_back({reduction, 0, stripes.part_begin(page), part});
    push(std::move(piece));
  }
}

/// One reduce-scatter of the parts of many pages: for each rank its parts, one after another.
void Reducer::send_packed_parts(const std::vector<PackedPart>& parts) {
  for_each_dtype(parts, [&](c10::ScalarType dtype, const std::vector<PackedPart>& alike) {
    std::int64_t length = 0;
    for (const auto& [reduction, page] : alike) length += static_cast<std::int64_t>(reduction->stripes.part(page));
    at::Tensor packed = at::zeros({ranks_.size(), length}, options(dtype));
    auto piece = std::make_unique<Piece>();
    std::int64_t at = 0;
    for (const auto& [reduction, page] : alike) {
      const Stripes& stripes = reduction->stripes;
      const auto part = static_cast<std::int64_t>(stripes.part(page));
      if (reduction->gradient.defined()) {
        const auto begin = static_cast<std::int64_t>(stripes.page_begin(page));
        const auto elements = std::min(part * ranks_.size(), static_cast<std::int64_t>(stripes.elements()) - begin);
        const std::int64_t full = elements / part, rest = elements % part;  // ranks whose part is full; and one's
        const at::Tensor all = reduction->gradient.narrow(0, begin, elements);
        packed.narrow(0, 0, full).narrow(1, at, part).copy_(all.narrow(0, 0, full * part).view({full, part}));
        if (rest > 0) packed[full].narrow(0, at, rest).copy_(all.narrow(0, full * part, rest));
      }
      piece->parts.push_back(
          {reduction, static_cast<std::size_t>(at), stripes.part_begin(page), static_cast<std::size_t>(part)});
      at += part;
    }
    packed.mul_(1.0 / domain_.partition.world());
    piece->result = at::empty({length}, packed.options());
    piece->work =
        ranks_.reduce_scatter(piece->result, packed.view({-1}), {"gradients", alike[0].reduction->number, 0});
    piece->scaled = true;
    piece->bytes = packed.nbytes();
    push(std::move(piece));
  });
}

void Reducer::send_packed_wholes(const std::vector<PackedPart>& wholes) {
  for_each_dtype(wholes, [&](c10::ScalarType dtype, const std::vector<PackedPart>& alike) {
    std::int64_t length = 0;
    for (const auto& part : alike) length += static_cast<std::int64_t>(part.reduction->stripes.elements());
    at::Tensor packed = at::zeros({length}, options(dtype));
    auto piece = std::make_unique<Piece>();
    std::int64_t at = 0;
    for (const auto& [reduction, _] : alike) {
      const auto elements = static_cast<std::int64_t>(reduction->stripes.elements());
      if (reduction->gradient.defined()) packed.narrow(0, at, elements).copy_(reduction->gradient);
      piece->parts.push_back({reduction, static_cast<std::size_t>(at), 0, static_cast<std::size_t>(elements)});
      at += elements;
    }
    packed.mul_(1.0 / domain_.partition.world());
    piece->result = packed;
    piece->work = ranks_.all_reduce(packed, {"gradients", alike[0].reduction->number, 0});
    piece->scaled = true;
    piece->bytes = packed.nbytes();
    push(std::move(piece));
  });
}

void Reducer::for_each_dtype(const std::vector<PackedPart>& parts,
                             c10::function_ref<void(c10::ScalarType, const std::vector<PackedPart>&)> send) const {
  std::map<c10::ScalarType, std::vector<PackedPart>> by_dtype;
  for (const PackedPart& part : parts) by_dtype[wire_dtype(part.reduction->dtype)].push_back(part);
  for (const auto& [dtype, alike] : by_dtype) send(dtype, alike);
}

at::TensorOptions Reducer::options(c10::ScalarType dtype) const {
  return at::TensorOptions().dtype(dtype).device(domain_.device);
}

// --- arriving ---

void Reducer::push(std::unique_ptr<Piece> piece) {
  for (const PiecePart& part : piece->parts) ++part.reduction->pieces_left;
  bytes_under_way_ += piece->bytes;
  // What was packed and scaled for it.
  if (domain_.planned_on && piece->scaled) domain_.planned_on->copy(2 * piece->bytes);
  under_way_.push_back(std::move(piece));
  try {
    make_room();
  } catch (const Error&) {
    // Nothing is lost. What is being sent goes on its way first, since the other ranks wait for it; its sender then
    // calls make_room() once more, which throws again or goes on.
  }
}

void Reducer::make_room() {
  while (bytes_under_way_ > kBytesUnderWay) complete_oldest();
}

void Reducer::complete(const Reduction& reduction) {
  std::lock_guard lock(mutex_);
  NoPagingGuard no_paging;
  if (!reduction.sent) together([&] { piling_ ? settle_pile() : send_open(Why::full); });
  if (!reduction.sent) together([&] { settle_pile(); });
  while (reduction.pieces_left > 0) complete_oldest();
}

/// Strong guarantee: on an error the piece stays the oldest.
void Reducer::complete_oldest() {
  Piece& piece = *under_way_.front();
  piece.work->wait();
  if (replicas_ && !piece.over_replicas) {
    replicas_->all_reduce(piece.result, {"gradients", piece.parts[0].reduction->number, 0})->wait();
    piece.over_replicas = true;
  }
  if (!piece.scaled) piece.result.mul_(1.0 / domain_.partition.world());
  piece.scaled = true;
  for (; piece.part < piece.parts.size(); ++piece.part) {
    deliver(piece);
    piece.target = 0;
    Reduction& reduction = *piece.parts[piece.part].reduction;
    --reduction.pieces_left;
    finish(reduction);
  }
  bytes_under_way_ -= piece.bytes;
  under_way_.pop_front();
}

/// Brings the content of the piece's next part to each of its targets that lives.
void Reducer::deliver(Piece& piece) {
  const PiecePart& part = piece.parts[piece.part];
  Reduction& reduction = *part.reduction;
  reduction.arrived = true;
  for (; piece.target < reduction.targets.size(); ++piece.target, piece.element = 0) {
    const Reduction::Target& target = reduction.targets[piece.target];
    const auto storage = target.storage.lock();
    StorageSegment* segment = storage ? segment_of(*storage) : nullptr;
    if (!segment) continue;
    std::size_t begin = part.begin, elements = part.elements;
    if (reduction.scattered) {
      const std::size_t own = reduction.stripes.own();
      elements = std::min(elements, own - std::min(own, begin));
      segment->claim_share(target.add ? Access::write : Access::overwrite);
      if (segment->is_partitioned()) {
        segment = &segment->share_segment();
      } else {
        begin = reduction.stripes.in_tensor(begin);
      }
    }
    const at::Tensor content =
        piece.result.narrow(0, static_cast<std::int64_t>(part.in_result), static_cast<std::int64_t>(elements));
    write(*segment, begin, content, reduction.dtype, target.add, piece.element);
  }
}

/// If all of it came, its targets wait no longer.
void Reducer::finish(Reduction& reduction) {
  if (!reduction.sent || reduction.pieces_left > 0) return;
  reduction.delivered = true;
  for (const Reduction::Target& target : reduction.targets) {
    const auto storage = target.storage.lock();
    StorageSegment* segment = storage ? segment_of(*storage) : nullptr;
    if (!segment) continue;
    if (segment->pending().get() == &reduction) segment->will_come(nullptr);
    if (domain_.offloads_updates()) segment->at_home().cache()->bring_down(segment->at_home());
  }
}

/// Writes or adds `content` to elements [begin, …) of a segment, page by page. Goes on after the first `done`
/// elements, and counts there what it has done.
void Reducer::write(StorageSegment& segment, std::size_t begin, const at::Tensor& content, c10::ScalarType dtype,
                    bool add, std::size_t& done) {
  const std::size_t item = c10::elementSize(dtype), page_elements = segment.page_bytes() / item;
  const std::size_t end = begin + content.numel();
  for (std::size_t at = begin + done, next = 0; at < end; at = next) {
    const std::size_t page = at / page_elements;
    next = std::min(end, (page + 1) * page_elements);
    const bool all = !add && (next - at) * item == segment.bytes_of(page);
    PagePin pin = segment.cache()->pin_page(segment, page, all ? Access::overwrite : Access::write);
    pin.wait();
    at::Tensor slice = at::from_blob(
        pin.data() + (at - page * page_elements) * item, {static_cast<std::int64_t>(next - at)}, [](void*) {},
        options(dtype), domain_.device);
    const at::Tensor part = content.narrow(0, static_cast<std::int64_t>(at - begin), slice.numel());
    add ? slice.add_(part) : slice.copy_(part);
    done = next - begin;
  }
}

}  // namespace zeropage
