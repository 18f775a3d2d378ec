#include "zeropage/rules/rows_to_come.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {

namespace {

thread_local std::weak_ptr<RowsToCome> latest;

}  // namespace

bool RowsToCome::can_come(std::size_t input, const at::Tensor& weight) {
  auto* const segment = segment_of(weight);
  if (!segment || !segment->domain()->partition.ranks || segment->domain()->planned_on) return false;
  if (c10::GradMode::is_enabled() || !is_whole(weight) || !weight.is_contiguous()) return false;
  // Else the caller of torch.autograd.grad() may read it at any time.
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  const auto node = torch::autograd::get_current_node();
  if (!wanted || !wanted->empty() || !node) return false;
  auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node->next_edge(input).function.get());
  if (!leaf || segment_of(leaf->variable) != segment || !leaf->tensor_pre_hooks().empty()) return false;
  if (leaf->pre_hooks().size() > 1) return false;  // the first is ours (train/gradients)
  const int task = torch::autograd::get_current_graph_task_id();
  return std::exchange(segment->latest_rows_to_come, task) != task;
}

at::Tensor RowsToCome::kept(const at::Tensor& operand, bool is_unshared, const at::Tensor& weight) {
  if (is_unshared && !segment_of(operand) && has_memory_of_torch(operand)) return operand;
  if (2 * operand.nbytes() > weight.nbytes()) return {};
  const Computing computing;
  return segment_of(operand) ? in_memory(operand) : operand.clone();
}

at::Tensor RowsToCome::make(const at::Tensor& weight, MakeRows make_rows) {
  settle(nullptr);
  const auto& domain = paged_segment(weight).domain();
  at::Tensor gradient = make_own_gradient(domain, weight.sizes(), weight.strides(), weight.dtype(), /*is_unset=*/true,
                                          /*unallocated=*/true);
  const auto rows = std::make_shared<RowsToCome>(gradient, std::move(make_rows));
  segment_of(gradient)->will_come(rows);
  latest = rows;
  return gradient;
}

void RowsToCome::settle(const StorageSegment* taken) {
  const auto rows = std::exchange(latest, {}).lock();
  if (rows && rows->segment_ != taken) rows->complete();
}

RowsToCome::RowsToCome(const at::Tensor& gradient, MakeRows make_rows)
    : segment_(segment_of(gradient)),
      sizes_(gradient.sizes().vec()),
      strides_(gradient.strides().vec()),
      options_(gradient.options().requires_grad(false)),
      rows_(gradient.numel() / gradient.size(-1)),
      columns_(gradient.size(-1)),
      tile_rows_([&] {
        const Domain& domain = *segment_->domain();
        const std::size_t gathered = domain.gathered ? domain.gathered->frame_limit() : 0;
        const std::size_t limit = std::max(gathered, segment_->frame_limit()) / 8;
        const std::size_t row_bytes = columns_ * gradient.itemsize();
        const auto fitting = static_cast<std::int64_t>(limit / row_bytes);
        return std::clamp<std::int64_t>(round_down(fitting, kKernelColumns), kKernelColumns, kGoodRows);
      }()),
      make_rows_(std::move(make_rows)) {}

void RowsToCome::complete() {
  if (is_completing_ || !make_rows_) return;  // its own use of the pages, or done
  const auto self = shared_from_this();
  const Computing computing;
  is_completing_ = true;
  try {
    try {
      segment_->find_home();
    } catch (const BudgetError&) {  // as in make_own_gradient()
      if (!segment_->domain()->cache->has_room(Tier::disk, 0)) throw;
      segment_->find_home(Tier::disk);
    }
    const at::Tensor whole = segment_->whole_tensor(sizes_, strides_, options_.dtype());
    for_each_tile(Rows(whole), Access::overwrite, make_rows_);
  } catch (...) {
    is_completing_ = false;
    segment_->will_come(self);  // the next use tries again
    throw;
  }
  segment_->will_come(nullptr);
  make_rows_ = nullptr, tile_ = at::Tensor();
}

/// Computes the tile with the row.
void RowsToCome::find(std::int64_t row) {
  if (tile_begin_ <= row && row < tile_end_) return;
  std::int64_t begin = row / tile_rows_ * tile_rows_;
  if (begin > 0 && rows_ - begin < kFewestRows) begin -= tile_rows_;
  std::int64_t end = std::min(begin + tile_rows_, rows_);
  if (rows_ - end < kFewestRows) end = rows_;
  if (!tile_.defined() || tile_.size(0) < end - begin) tile_ = at::empty({end - begin, columns_}, options_);
  tile_end_ = tile_begin_;  // none, if this throws
  make_rows_(begin, tile_.narrow(0, 0, end - begin));
  tile_begin_ = begin, tile_end_ = end;
}

void RowsToCome::write_part(std::size_t begin, const at::Tensor& into) {
  const Computing computing;
  const auto count = into.numel(), first = static_cast<std::int64_t>(begin);
  for (std::int64_t done = 0; done < count;) {
    find((first + done) / columns_);
    const std::int64_t at = first + done - tile_begin_ * columns_;
    const std::int64_t n = std::min(count - done, (tile_end_ - tile_begin_) * columns_ - at);
    into.narrow(0, done, n).copy_(tile_.narrow(0, 0, tile_end_ - tile_begin_).view({-1}).narrow(0, at, n));
    done += n;
  }
}

}  // namespace zeropage
