// Norms of whole tensors. A tensor that fits the device's budget is loaded, and the bits are PyTorch's. For a larger
// one, a 2-norm in float32 is summed page after page as PyTorch would; other norms of pages are combined in double
// precision. If this rank holds only its share, each rank computes the
// norm of its share, and one collective exchanges all norms of a call.
#include "zeropage/rules/norms.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>

#include "zeropage/kernels/norm.h"
#include "zeropage/kernels/squares.h"
#include "zeropage/kernels/update.h"
#include "zeropage/plan/machine.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/preview.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/stand_ins.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// Combines p-norms of parts: the sum of p-th powers, the number of nonzero elements, or an extreme.
class NormOfParts {
 public:
  explicit NormOfParts(double ord) : ord_(ord), sum_(ord == -INFINITY ? INFINITY : 0) {}

  void add_norm(double norm) { add(std::isinf(ord_) || ord_ == 0 ? norm : std::pow(norm, ord_)); }
  void add(double part) {
    if (std::isnan(part) || std::isnan(sum_)) {
      sum_ = NAN;
    } else if (std::isinf(ord_)) {
      sum_ = ord_ > 0 ? std::max(sum_, part) : std::min(sum_, part);
    } else {
      sum_ += part;
    }
  }
  double sum() const { return sum_; }
  double norm() const { return std::isinf(ord_) || ord_ == 0 ? sum_ : std::pow(sum_, 1 / ord_); }

 private:
  double ord_, sum_;
};

/// The norm of the whole tensor or of this rank's share. `shape`: a tensor with its shape and dtype.
NormOfParts norm_by_pages(const at::Tensor& shape, StorageSegment& segment, double ord, bool of_share) {
  NormOfParts total(ord);
  std::mutex mutex;
  Machine* const planned = segment.domain()->planned_on.get();
  const auto add = [&](c10::ArrayRef<at::Tensor> slices) {
    if (planned) {  // count only its time: in a planned run no gradient is clipped
      planned->copy(slices[0].nbytes() / 2);
      return planned->synchronize();
    }
    const auto dtype = slices[0].is_complex() ? c10::kComplexDouble : c10::kDouble;
    const double part = at::linalg_vector_norm(slices[0], ord, std::nullopt, false, dtype).item<double>();
    std::lock_guard lock(mutex);
    total.add_norm(part);
  };
  const Operand operand{shape, &segment, Access::read};
  of_share ? for_each_window_of_share(operand, add) : void(for_each_window(operand, Chunking::iterator, add));
  return total;
}

/// The form whose norms have the bits of PyTorch's kernel on this processor; none if no form has.
std::optional<kernels::NormInOrder::Form> find_form() {
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
  std::vector<at::Tensor> samples;
  for (std::int64_t size = 1; size < 256; ++size) {  // in short sums a rounding that differs shows
    samples.push_back(at::empty({size}, at::kFloat).normal_(0, 1, generator));
  }
  for (const auto form : kernels::NormInOrder::forms()) {
    const bool same = std::all_of(samples.begin(), samples.end(), [&](const at::Tensor& sample) {
      kernels::NormInOrder norm(form);
      norm.add(sample.const_data_ptr<float>(), static_cast<std::size_t>(sample.numel()));
      return norm.norm() == at::linalg_vector_norm(sample, 2).item<float>();
    });
    if (same) return form;
  }
  return std::nullopt;
}

const std::optional<kernels::NormInOrder::Form>& form_here() {
  static const auto form = find_form();
  return form;
}

/// Whether NormInOrder computes the requested norm of a float32 tensor.
bool is_in_order(const AskedNorm& asked, bool on_cpu) {
  return asked.ord == 2 && on_cpu && asked.dtype.value_or(at::kFloat) == at::kFloat && form_here();
}

/// The 2-norm of bfloat16 values as float32, without a copy of them in memory.
double norm_of_widened(const at::Tensor& narrow) {
  constexpr std::size_t kBlock = 4096;  // elements, which fit the first-level cache as float32
  const kernels::Array array{kernels::Format::bfloat16, const_cast<void*>(narrow.const_data_ptr())};
  kernels::NormInOrder norm(*form_here());
  std::array<float, kBlock> wide;
  const auto elements = static_cast<std::size_t>(narrow.numel());
  for (std::size_t begin = 0; begin < elements; begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, elements);
    kernels::decode(array, begin, end, wide.data());
    norm.add(wide.data(), end - begin);
  }
  return norm.norm();
}

/// The 2-norm of a tensor that cannot be whole in memory, page after page, with the bits of the whole tensor's norm.
std::optional<double> norm_in_order(const at::Tensor& self, double ord, std::optional<c10::ScalarType> dtype) {
  StorageSegment& segment = *segment_of(self);
  const bool is_plain = self.scalar_type() == at::kFloat && is_in_order({ord, dtype}, self.is_cpu());
  if (!is_plain || segment.domain()->planned_on) return std::nullopt;
  segment.complete();
  segment.refresh(Access::read);
  const PinRequest request{&segment, Access::read};
  segment.cache()->announce({&request, 1});
  kernels::NormInOrder norm(*form_here());
  const std::size_t per_page = segment.page_bytes() / sizeof(float);
  for (std::size_t i = 0, begin = 0; begin < segment.elements(); ++i, begin += per_page) {
    PagePin page = segment.cache()->pin_page(segment, i, Access::read);
    page.wait();
    const Booking kernel(Spent::operators);
    norm.add(reinterpret_cast<const float*>(page.data()), std::min(per_page, segment.elements() - begin));
  }
  return norm.norm();
}

double norm_of_huge(const at::Tensor& self, double ord, std::optional<c10::ScalarType> dtype) {
  if (const auto norm = norm_in_order(self, ord, dtype)) return *norm;
  return norm_by_pages(self, *segment_of(self), ord, /*of_share=*/false).norm();
}

bool can_be_squared(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

kernels::Array array_of(c10::ScalarType dtype, void* data) {
  const auto format = dtype == at::kFloat      ? kernels::Format::float32
                      : dtype == at::kBFloat16 ? kernels::Format::bfloat16
                                               : kernels::Format::float16;
  return {format, data};
}

/// The sums of squares of the blocks of `count` values.
void take_blocks(const kernels::Array& values, std::size_t item_bytes, std::size_t count, double* sums) {
  constexpr std::size_t kBlock = kernels::Squares::kBlock;
  const std::size_t blocks = ceil_div(count, kBlock);
  at::parallel_for(0, static_cast<std::int64_t>(blocks), 16, [&](std::int64_t first, std::int64_t last) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i) {
      const kernels::Array block{values.format, static_cast<std::byte*>(values.data) + i * kBlock * item_bytes};
      sums[i] = kernels::Squares::of_block(block, std::min(kBlock, count - i * kBlock));
    }
  });
}

/// The sum of squares of this rank's share, page after page.
double squares_of_share(StorageSegment& segment, c10::ScalarType dtype) {
  segment.open_share(Access::read);
  StorageSegment& home = segment.at_home();
  const Stripes stripes = segment.stripes();
  const std::size_t item = c10::elementSize(dtype), per_page = home.page_bytes() / item, own = stripes.own();
  const PinRequest request{&home, Access::read};
  home.cache()->announce({&request, 1});
  kernels::Squares squares;
  std::vector<double> blocks;
  for (std::size_t at = 0, next = 0; at < own; at = next) {
    // Each page of a whole tensor has a part.
    const std::size_t in_home = segment.is_partitioned() ? at : stripes.in_tensor(at);
    const std::size_t page = in_home / per_page;
    next = std::min(own, at + (page + 1) * per_page - in_home);
    if (!segment.is_partitioned()) next = std::min(next, stripes.part_end(at));
    PagePin pin = home.cache()->pin_page(home, page, Access::read);
    pin.wait();
    const Booking kernel(Spent::operators);
    const kernels::Array values = array_of(dtype, pin.data() + (in_home - page * per_page) * item);
    const std::size_t count = next - at;
    if (at % kernels::Squares::kBlock > 0 || (count % kernels::Squares::kBlock > 0 && next < own)) {
      squares.add(values, count);  // cuts inside blocks
      continue;
    }
    blocks.resize(ceil_div(count, kernels::Squares::kBlock));
    take_blocks(values, item, count, blocks.data());
    for (const double sum : blocks) squares.add_block(sum);
  }
  return squares.sum();
}

/// The narrow tensor of a gradient that is nothing else, widened: their values are the same. Needs the domain's
/// deferral_mutex.
const Program::Slot* narrow_of(const StorageSegment& segment) {
  const auto* const program = static_cast<const Program*>(segment.deferred().get());
  const bool only_widens = program && program->length() == 1 && program->makes_only(segment) &&
                           program->code().instructions.size() == 1 &&
                           program->code().instructions[0].kind == Instruction::Kind::widen;
  return only_widens ? &program->slots()[0] : nullptr;
}

/// Changes with the content of this rank's share.
ContentMark mark_of_share(const StorageSegment& segment) {
  std::lock_guard lock(segment.domain()->deferral_mutex);
  const StorageSegment& home = segment.at_home();
  return {segment.is_unallocated() ? 0 : home.cache()->changes(home),
          segment.deferred() ? segment.deferred()->length() : 0};
}

/// The sum of p-th powers of this rank's share, or what NormOfParts has for other norms.
double read_sum_of_share(const at::Tensor& shape, StorageSegment& segment, double ord) {
  const bool is_squared = ord == 2 && can_be_squared(shape.scalar_type()) && segment.domain()->device.is_cpu();
  if (is_squared && !segment.domain()->planned_on) return squares_of_share(segment, shape.scalar_type());
  return norm_by_pages(shape, segment, ord, /*of_share=*/true).sum();
}

/// The same of a tensor that may be the result of a deferred operator.
double sum_of_share(const at::Tensor& tensor, double ord) {
  StorageSegment& segment = *segment_of(tensor);
  ForeseenNorm* const norm = ord == 2 ? segment.foreseen_norm() : nullptr;
  if (norm) {
    norm->habit->note({});
    if (norm->taken && norm->taken->content == mark_of_share(segment)) {
      norm->taken->used = true;
      return norm->taken->squares;
    }
  }
  std::lock_guard lock(segment.domain()->deferral_mutex);
  const Program::Slot* const narrow = narrow_of(segment);
  return narrow ? read_sum_of_share(narrow->shape, *narrow->segment, ord) : read_sum_of_share(tensor, segment, ord);
}

/// The norms of tensors, in their order. Ranks exchange the norms of their shares in one collective.
std::vector<double> norms_over_ranks(c10::ArrayRef<at::Tensor> tensors, double ord) {
  if (tensors.empty()) return {};
  std::vector<double> sums;
  for (const at::Tensor& tensor : tensors) sums.push_back(sum_of_share(tensor, ord));
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const auto count = static_cast<std::int64_t>(sums.size());
  const at::Tensor mine = at::from_blob(sums.data(), {count}, at::kDouble);
  auto& ranks = *segment_of(tensors[0])->domain()->partition.ranks;
  const at::Tensor all = ranks.all_gather_small(mine, {"norms", 0, 0}).contiguous();
  const auto* of_all = all.const_data_ptr<double>();  // [ranks, count]
  std::vector<double> norms;
  for (std::int64_t i = 0; i < count; ++i) {
    NormOfParts total(ord);
    for (int rank = 0; rank < ranks.size(); ++rank) total.add(of_all[rank * count + i]);
    norms.push_back(total.norm());
  }
  return norms;
}

/// PyTorch adds the powers of all but double precision in float32. If they overflow there, the norm is infinite here
/// too, since programs skip a step by it.
at::Tensor as_result(double norm, double ord, const at::Tensor& self, std::optional<c10::ScalarType> dtype) {
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const auto real = c10::toRealValueType(dtype.value_or(self.scalar_type()));
  const bool adds_powers = ord > 0 && std::isfinite(ord) && real != at::kDouble;
  if (adds_powers && std::pow(norm, ord) > std::numeric_limits<float>::max()) norm = INFINITY;
  // Through double, since a number that 16 bits cannot hold is an error to scalar_tensor().
  return at::scalar_tensor(norm, self.options().requires_grad(false).dtype(at::kDouble)).to(real);
}

bool is_partitioned_whole(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment || !segment->domain()->partition.ranks) return false;
  segment->complete_pending();
  {
    std::lock_guard lock(segment->domain()->deferral_mutex);
    if (const auto* const narrow = narrow_of(*segment)) return holds_share_only(narrow->segment);
  }
  segment->complete();
  return holds_share_only(segment) && is_operand(tensor, tensor);
}

}  // namespace

namespace {

bool is_too_large(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  if (!segment || !is_operand(tensor, tensor)) return false;
  return tensor.nbytes() > segment->frame_limit();
}

}  // namespace

std::unique_ptr<ForeseenNorm> take_expected_norm(StorageSegment& leaf, const at::Tensor& content,
                                                 c10::ScalarType dtype) {
  auto norm = std::make_unique<ForeseenNorm>();
  norm->habit = leaf.norm_habit();
  const auto expected = norm->habit->expected();
  if (!expected) return norm;
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const Booking kernels(Spent::operators);
  const bool from_bfloat16 = content.scalar_type() == at::kBFloat16 && dtype == at::kFloat;
  if (from_bfloat16 && is_in_order(*expected, content.is_cpu()) && !leaf.domain()->planned_on) {
    norm->taken = {.asked = *expected,
                   .norm = at::scalar_tensor(norm_of_widened(content), content.options().dtype(at::kFloat)),
                   .content = {}};
    return norm;
  }
  const at::Tensor whole = content.to(dtype);  // itself, if that is its dtype
  const at::Tensor taken = expected->of_list
                               ? at::_foreach_norm(whole, expected->ord, expected->dtype)[0]
                               : at::linalg_vector_norm(whole, expected->ord, std::nullopt, false, expected->dtype);
  norm->taken = {.asked = *expected, .norm = taken, .content = {}};
  return norm;
}

void foresee(const at::Tensor& gradient, std::unique_ptr<ForeseenNorm> norm) {
  StorageSegment& segment = *segment_of(gradient);
  if (norm->taken) norm->taken->content = segment.content_mark();
  segment.set_foreseen_norm(std::move(norm));
}

ArrivingSquares::ArrivingSquares(StorageSegment& leaf, std::size_t elements, c10::ScalarType dtype)
    : norm_(std::make_unique<ForeseenNorm>()), elements_(elements) {
  norm_->habit = leaf.norm_habit();
  if (!can_be_squared(dtype) || !leaf.domain()->device.is_cpu() || !norm_->habit->expected()) return;
  norm_->taken.emplace();
  blocks_.resize(ceil_div(elements, kernels::Squares::kBlock));
}

void ArrivingSquares::add(const at::Tensor& values, std::size_t begin) {
  constexpr std::size_t kBlock = kernels::Squares::kBlock;
  if (!norm_->taken || values.is_meta()) return;
  const auto count = static_cast<std::size_t>(values.numel());
  if (begin % kBlock > 0 || (count % kBlock > 0 && begin + count < elements_)) {  // cut inside a block
    norm_->taken.reset();
    return;
  }
  const Booking kernels(Spent::operators);
  take_blocks(array_of(values.scalar_type(), values.mutable_data_ptr()), values.itemsize(), count,
              blocks_.data() + begin / kBlock);
}

void ArrivingSquares::foresee(StorageSegment& gradient) {
  if (norm_->taken) {
    kernels::Squares squares;
    for (const double sum : blocks_) squares.add_block(sum);
    norm_->taken->squares = squares.sum();
    norm_->taken->content = mark_of_share(gradient);
  }
  gradient.set_foreseen_norm(std::move(norm_));
}

namespace {

/// The norm, if it was foreseen and the content is still the same; else undefined. Records the request.
at::Tensor foreseen(const at::Tensor& tensor, const AskedNorm& asked) {
  const auto* segment = segment_of(tensor);
  ForeseenNorm* const norm = segment && is_whole(tensor) ? segment->foreseen_norm() : nullptr;
  if (!norm || segment->domain()->partition.ranks) return {};  // sum_of_share() takes it
  norm->habit->note(asked);
  auto& taken = norm->taken;
  if (!taken || taken->asked != asked || taken->content != segment->content_mark()) return {};
  taken->used = true;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  return taken->norm.clone();
}

}  // namespace

namespace {

/// Computes the norm of a preview of deferred content, so that the tensor itself needs no home yet.
bool run_on_previews(Call& call) {
  StandIns previews(call);
  if (!previews.replace(&can_be_previewed, &preview)) return false;
  const auto run = [&] { return call.run_whole(), true; };
  return previews.run(
      run, [](const at::Tensor&, const at::Tensor&) {}, [](const at::Tensor&, const at::Tensor&) { return false; });
}

}  // namespace

bool run_norm(Call& call) {
  // linalg_vector_norm(self, ord, dim, keepdim, dtype), or norm(self, p), which calls it with the same bits
  const at::Tensor self = call.argument(0).toTensor();
  const auto* segment = segment_of(self);
  if (!segment || call.needs_autograd()) return false;
  const bool is_short = call.arguments == 2;
  if (!is_short && (!call.argument(2).isNone() || call.argument(3).toBool())) return false;
  if (is_short && !at::isFloatingType(self.scalar_type()) && !self.is_complex())
    return false;  // its error is torch's
  const double ord = call.argument(1).toScalar().toDouble();
  const auto dtype = is_short ? std::nullopt : call.argument(4).toOptional<c10::ScalarType>();
  double norm = 0;
  if (at::Tensor known = foreseen(self, {ord, dtype, /*of_list=*/false}); known.defined()) {
    call.return_value(std::move(known));
    return true;
  }
  if (is_partitioned_whole(self)) {
    norm = norms_over_ranks(self, ord)[0];
  } else if (is_too_large(self)) {
    norm = norm_of_huge(self, ord, dtype);
  } else {
    return run_on_previews(call);
  }
  call.return_value(as_result(norm, ord, self, dtype));
  return true;
}

bool run_norms(Call& call) {
  // _foreach_norm(Tensor[] self, Scalar ord=2, ScalarType? dtype=None)
  const auto tensors = call.argument(0).toTensorVector();
  const double ord = call.argument(1).toScalar().toDouble();
  const auto dtype = call.argument(2).toOptional<c10::ScalarType>();
  enum class Kind : std::uint8_t { known, whole, too_large, partitioned };
  std::vector<Kind> kinds;
  std::vector<at::Tensor> known, partitioned, whole;
  for (const at::Tensor& tensor : tensors) {
    known.push_back(foreseen(tensor, {ord, dtype, /*of_list=*/true}));
    kinds.push_back(known.back().defined()         ? Kind::known
                    : is_partitioned_whole(tensor) ? Kind::partitioned
                    : is_too_large(tensor)         ? Kind::too_large
                                                   : Kind::whole);
    if (kinds.back() == Kind::partitioned) partitioned.push_back(tensor);
    if (kinds.back() == Kind::whole) whole.push_back(tensor);
  }
  if (whole.size() == tensors.size()) return false;
  const auto partitioned_norms = norms_over_ranks(partitioned, ord);
  torch::jit::Stack stack{whole, call.argument(1), call.argument(2)};
  if (!whole.empty()) call.op.callBoxed(stack);
  const auto whole_norms = whole.empty() ? std::vector<at::Tensor>{} : stack[0].toTensorVector();
  std::vector<at::Tensor> results;
  std::size_t next_partitioned = 0, next_whole = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (kinds[i] == Kind::known) {
      results.push_back(known[i]);
    } else if (kinds[i] == Kind::whole) {
      results.push_back(whole_norms[next_whole++]);
    } else {
      const double norm = kinds[i] == Kind::partitioned ? partitioned_norms[next_partitioned++]
                                                        : norm_of_huge(tensors[i], ord, dtype);
      results.push_back(as_result(norm, ord, tensors[i], dtype));
    }
  }
  call.return_value(std::move(results));
  return true;
}

}  // namespace zeropage
