// Cross entropy of logits that are a lazy product: the loss over a huge vocabulary, and its gradients. Neither the
// logits nor their gradient are ever whole in memory.
//
// Forward computes the logits once, in blocks of columns with all rows, and stores them in their own pages
// (blocked_product.h). The loss reads a few complete rows at a time; backward reads block by block, in the storage
// order of the weight and its gradient. This reads the weight once forward and once backward, writes the logits once,
// reads them twice, and computes nothing twice. PyTorch's kernels run on parts of their rows, so the loss and the
// weight's gradient have the same bits as without tiles. For the input's gradient see [Note: order of summation].
#include <ATen/autocast_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "zeropage/base/units.h"
#include "zeropage/rules/blocked_product.h"
#include "zeropage/rules/lazy_product.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kIgnored = -100;

/// The gradient of the logits, block by block.
class GradientOfLogits {
 public:
  using Block = BlockedProduct::Block;
  /// highest, log_sum and target [t]; of_picked [t, 1]: the gradient of each row's log-probability of its class.
  GradientOfLogits(const std::shared_ptr<Domain>& domain, const BlockedProduct& logits, const at::Tensor& highest,
                   const at::Tensor& log_sum, const at::Tensor& target, const at::Tensor& of_picked)
      : logits_(logits),
        highest_(highest.unsqueeze(1)),
        log_sum_(log_sum.unsqueeze(1)),
        target_(target),
        of_picked_(of_picked),
        most_(std::max<std::int64_t>(logits.rows(), 1) * (logits.width() + 1)),
        staging_(domain, most_, logits.dtype()),
        of_block_(domain, 3 * most_, highest.scalar_type()) {}

  /// [t, block.columns], in the dtype of the logits. The next call overwrites it.
  at::Tensor of(const Block& block) {
    const std::int64_t t = logits_.rows(), n = block.columns;
    if (t == 0) return staging_.tensor().narrow(0, 0, 0).view({0, n});
    const auto part = [&](std::int64_t i) {
      return of_block_.tensor().narrow(0, i * most_, t * (n + 1)).view({t, n + 1});
    };
    at::Tensor log_p = part(0), g = part(1), of_logits = part(2);
    logits_.read(block, 0, t, staging_.tensor(), log_p.narrow(1, 0, n));
    log_p.narrow(1, 0, n).sub_(highest_).sub_(log_sum_);
    // One extra column represents the classes of other blocks, so that each row's sum equals that over all blocks.
    log_p.select(1, n).zero_();
    const at::Tensor here = target_.ge(block.begin).logical_and_(target_.lt(block.begin + n));
    g.zero_().scatter_(1, at::where(here, target_ - block.begin, n).unsqueeze(1), of_picked_);
    at::_log_softmax_backward_data_out(of_logits, g, log_p, 1, g.scalar_type());
    at::Tensor gradient = staging_.tensor().narrow(0, 0, t * n).view({t, n});
    return gradient.copy_(of_logits.narrow(1, 0, n));
  }

 private:
  const BlockedProduct& logits_;
  const at::Tensor highest_, log_sum_, target_, of_picked_;
  const std::int64_t most_;
  const Scratch staging_, of_block_;
};

/// A chunk of whole rows, and scratch memory for as many.
struct RowsInTurn {
  std::int64_t first, n;
  at::Tensor logits, other, third;  // [n, columns]
};

/// Calls `run` with the logits in the dtype `computed`, as many rows at a time as fit, and at least `fewest`.
void for_each_rows(const std::shared_ptr<Domain>& domain, const BlockedProduct& logits, at::ScalarType computed,
                   std::int64_t fewest, c10::function_ref<void(const RowsInTurn&)> run) {
  const std::int64_t rows = logits.rows(), columns = logits.columns();
  if (rows == 0) return;
  const auto row_bytes = static_cast<std::int64_t>(columns * c10::elementSize(computed));
  const auto fitting = static_cast<std::int64_t>(domain->cache->frame_limit()) / 8 / row_bytes;
  const std::int64_t even = fitting < kFewestRows ? fitting : round_down(fitting, kFewestRows);
  const std::int64_t n = std::min(std::max(even, fewest), rows), most = std::min(n + fewest - 1, rows);
  const Scratch staging(domain, most * logits.width(), logits.dtype());
  const Scratch rows_in_turn(domain, 3 * most * columns, computed);  // one piece: a device cannot move held memory
  for (std::int64_t first = 0, here = 0; first < rows; first += here) {
    here = std::min(n, rows - first);
    if (rows - first - here < fewest) here = rows - first;  // the bits also depend on a row's position
    const auto part = [&](std::int64_t i) {
      return rows_in_turn.tensor().narrow(0, i * most * columns, here * columns).view({here, columns});
    };
    const RowsInTurn in_turn{first, here, part(0), part(1), part(2)};
    logits.read_rows(first, staging.tensor(), in_turn.logits);
    run(in_turn);
  }
}

/// The part of the graph between a product and its loss, which backward skips.
struct PassedNodes : torch::CustomClassHolder {
  explicit PassedNodes(const at::Tensor& logits) {
    for (auto node = logits.grad_fn(); node; node = node->next_edge(0).function) {
      nodes.emplace_back(node);
      if (is_product(*node)) break;
    }
  }
  std::vector<WeakNode> nodes;
};

/// Throws if the graph got hooks after the loss. With earlier hooks the loss would have used whole logits.
void refuse_late_hooks(AutogradContext* context) {
  const auto passed = c10::static_intrusive_pointer_cast<PassedNodes>(context->saved_data["passed"].toCapsule());
  for (const auto& weak : passed->nodes) {
    const auto node = weak.lock();
    if (node && LazyProduct::is_hooked(*node)) {
      throw AccessError(
          "a hook or retain_grad() was put on logits after their loss was computed in parts, without a gradient of "
          "logits: put it there before the loss, or set tiling=\"off\"");
    }
  }
}

class VocabularyLoss : public torch::autograd::Function<VocabularyLoss> {
 public:
  /// x [1, t, k], weight [v, k], bias [v] or none, target [t] of classes or kIgnored. `stored`: their logits, or
  /// null.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& target, std::int64_t reduction,
                            at::ScalarType computed, const c10::intrusive_ptr<PassedNodes>& passed,
                            const c10::intrusive_ptr<BlockedProduct>& stored) {
    context->set_materialize_grads(false);
    context->saved_data["passed"] = c10::IValue::make_capsule(passed);
    const Computing computing;
    const auto& domain = segment_of(weight)->domain();
    const auto logits = stored ? stored : BlockedProduct::make(x, weight, bias.value_or(at::Tensor()));
    const std::int64_t t = x.size(1);
    const at::Tensor highest = at::empty(t, x.options().requires_grad(false).dtype(computed));
    const at::Tensor log_sum = at::empty_like(highest), picked = at::empty_like(highest);
    for_each_rows(domain, *logits, computed, /*fewest=*/1, [&](const RowsInTurn& rows) {
      const auto part = [&](const at::Tensor& all) { return all.narrow(0, rows.first, rows.n); };
      part(highest).copy_(rows.logits.amax(1));
      at::Tensor log_p = rows.other;
      at::_log_softmax_out(log_p, rows.logits, 1, /*half_to_float=*/false);
      part(log_sum).copy_(log_p.amax(1).neg_());  // the highest log_p of a row is 0 - log_sum
      part(picked).copy_(log_p.gather(1, part(target).clamp_min(0).unsqueeze(1)).squeeze(1));
    });
    // One class in each row counts, so these sums equal those over all classes.
    const at::Tensor only = picked.unsqueeze(1), its_class = target.clamp_max(0);
    const auto [loss, total_weight] = at::nll_loss_forward(only, its_class, {}, reduction, kIgnored);
    save(context, {x, weight, target, logits->pages(), highest, log_sum, only, its_class, total_weight}, weight,
         x.scalar_type());
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["width"] = logits->width();
    context->saved_data["reduction"] = reduction;
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(8);
    variable_list result = translated([&] { return backward_of(context, gradients[0]); });
    forget_weight(context);
    return result;
  }

 private:
  static variable_list backward_of(AutogradContext* context, const at::Tensor& of_loss) {
    refuse_graph_of_gradient();
    refuse_late_hooks(context);
    const Computing computing;
    const auto saved = saved_of(context);
    const at::Tensor weight = weight_of(context, saved[1]);
    const at::Tensor &x = saved[0], &target = saved[2], &highest = saved[4], &log_sum = saved[5];
    const auto& domain = paged_segment(weight).domain();
    const auto stored = x.scalar_type(), computed = highest.scalar_type();
    const BlockedProduct logits(saved[3], x.size(1), weight.size(0), context->saved_data["width"].toInt());
    const at::Tensor of_picked =
        at::nll_loss_backward(of_loss.to(computed), saved[6], saved[7], {}, context->saved_data["reduction"].toInt(),
                              kIgnored, saved[8]);  // [t, 1]
    const bool is_exact = domain->tiling == Tiling::exact;
    const bool for_x = context->needs_input_grad(0), for_weight = context->needs_input_grad(1);
    const bool for_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(2);
    variable_list result(8);
    if (for_weight) result[1] = gradient_like(weight);
    if (for_bias) result[2] = at::empty(weight.size(0), x.options().requires_grad(false));
    if (for_x && is_exact) {
      result[0] = at::empty(x.sizes(), x.options().requires_grad(false));
      for_each_rows(domain, logits, computed, kFewestRows, [&](const RowsInTurn& rows) {
        const auto part = [&](const at::Tensor& all) { return all.narrow(0, rows.first, rows.n).unsqueeze(1); };
        rows.logits.sub_(part(highest)).sub_(part(log_sum));
        rows.other.zero_().scatter_(1, part(target).clamp_min(0), part(of_picked).squeeze(1));
        at::Tensor g = rows.third;
        at::_log_softmax_backward_data_out(g, rows.other, rows.logits, 1, computed);
        result[0][0].narrow(0, rows.first, rows.n).copy_(rows_summed_exactly(g.to(stored), Rows(weight)));
      });
    }
    const bool by_blocks = for_x && !is_exact;
    if (!by_blocks && !for_weight && !for_bias) return result;
    GradientOfLogits of_logits(domain, logits, highest, log_sum, target, of_picked);
    const at::Tensor input = in_memory(x)[0];
    const auto use = [&](const BlockedProduct::Block& block) {
      const at::Tensor gradient = of_logits.of(block);
      if (for_weight) outer(gradient, input, Rows(result[1]).range(block.begin, block.columns));
      if (for_bias) result[2].narrow(0, block.begin, block.columns).copy_(gradient.sum(0));
      return gradient;
    };
    if (!by_blocks) {
      for (const auto& block : logits.blocks()) use(block);
      return result;
    }
    const auto summed = c10::isReducedFloatingType(stored) ? c10::kFloat : stored;
    at::Tensor sum = at::zeros(input.sizes(), input.options().requires_grad(false).dtype(summed));
    auto block = logits.blocks().begin();
    at::Tensor gradient;  // of *block
    for_each_tile(Rows(weight), Access::read, [&](std::int64_t row, const at::Tensor& tile) {
      for (std::int64_t at = 0; at < tile.size(0);) {
        if (!gradient.defined()) gradient = use(*block);
        const std::int64_t first = row + at - block->begin, n = std::min(block->columns - first, tile.size(0) - at);
        add_tile_summed(sum, gradient.narrow(1, first, n), tile.narrow(0, at, n));
        at += n;
        if (first + n == block->columns) ++block, gradient = at::Tensor();
      }
    });
    result[0] = sum.to(stored).unsqueeze(0);
    return result;
  }
};

/// Checks the classes and replaces ignored ones by kIgnored.
at::Tensor checked_classes(const at::Tensor& target, std::int64_t ignored, std::int64_t classes) {
  const at::Tensor valid = target.ne(ignored);
  const at::Tensor wrong = target.lt(0).logical_or_(target.ge(classes)).logical_and_(valid);
  if (wrong.any().item<bool>()) {
    TORCH_CHECK_INDEX(false, "Target ", target.masked_select(wrong)[0].item<std::int64_t>(), " is out of bounds.");
  }
  return at::where(valid, target, kIgnored);
}

}  // namespace

bool take_vocabulary_loss(Call& call) {
  const at::Tensor self = call.argument(0).toTensor(), target = call.argument(1).toTensor();
  auto* lazy = LazyProduct::stored_of(self);
  const auto of_classes = call.argument(2).toOptional<at::Tensor>().value_or(at::Tensor());
  const bool smooths = call.argument(5).toDouble() != 0;
  if (!lazy || self.dim() != 2 || of_classes.defined() || smooths || target.scalar_type() != c10::kLong) return false;
  if (target.dim() != 1 || target.size(0) != self.size(0) || target.device() != self.device()) return false;
  const bool is_cast = autocasts(self) && self.scalar_type() != c10::kDouble;
  // On other devices autocast casts other operators inside it.
  if (is_cast && !self.is_cpu() && c10::isReducedFloatingType(self.scalar_type())) return false;
  const auto dtype = is_cast ? c10::kFloat : self.scalar_type();
  const bool is_narrow = c10::isReducedFloatingType(dtype);
  const auto rows = lazy->rows_of(self);
  if (!rows) return false;
  Domain& domain = *segment_of(rows->weight)->domain();
  // PyTorch's kernels compute in a wider dtype than they return, so parts of them would round differently.
  if (is_narrow && domain.tiling == Tiling::exact) return false;
  const auto computed = is_narrow ? c10::kFloat : dtype;
  const at::Tensor classes = checked_classes(target, call.argument(4).toInt(), self.size(1));
  try {
    const at::Tensor loss = VocabularyLoss::apply(
        rows->x, rows->weight, rows->bias.defined() ? std::optional(rows->bias) : std::nullopt, classes,
        call.argument(3).toInt(), computed, c10::make_intrusive<PassedNodes>(self), rows->stored);
    if (rows->stored) lazy->give_its_turn(*loss.grad_fn());
    call.return_value(loss.to(dtype));
    return true;
  } catch (const BudgetError&) {  // whole logits are ordinary memory, outside any budget
    if (rows->stored) throw;      // ranks take one way
    domain.unpaged_operators.count("aten::cross_entropy_loss");
    return false;
  }
}

}  // namespace zeropage
