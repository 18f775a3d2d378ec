// Functions for the bindings of a language, which hook modules, optimizers and loaders. A C++ program needs none of
// them: zeropage.h is its interface. They are no part of it, and change without notice.
#pragma once

#include <vector>

#include "zeropage/space/space.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/train/gradients.h"

namespace zeropage {

/// The tensor's number on all ranks; 0 for one that is not paged, or not over ranks.
std::uint64_t number_of(const at::Tensor& tensor);
/// The first element's address in the one address space of all paged tensors (see StorageSegment). It shows which
/// tensors share elements; no code may read from it. 0 for a tensor that is not paged.
std::uint64_t virtual_address(const at::Tensor& tensor);

/// Ranks call these after the program has set a parameter's `.data`, or its gradient, on all of them. The parameter
/// is paged again, with the same content on all ranks; the gradient becomes the mean over ranks.
void take_data(at::Tensor parameter);
void take_gradient(const at::Tensor& parameter);
/// Over ranks: whether backward keeps gradients of these parameters on this rank, until one that does not. Returns
/// those parameters for which this is a change. All ranks call it together.
std::vector<at::Tensor> accumulate_here(c10::ArrayRef<at::Tensor> parameters, bool here);
/// Prepares an optimizer's step over these parameters, or clipping. Pages parameters again whose `.data` the program
/// has set to an ordinary tensor. Averages gradients that are each rank's own, for example those that the program has
/// set, or accumulated: all ranks call it together. With a closure, which adds to accumulated gradients, these come
/// at the next call. True if ranks share any of the parameters.
bool before_step(c10::ArrayRef<at::Tensor> parameters, bool has_closure = false);
/// Ends an optimizer's step over these parameters. If async_step is off, runs its pending updates now.
void step_ended(c10::ArrayRef<at::Tensor> parameters);

/// Holds tensors whole, for reading, while it lives. All ranks call it together before some of them use some of the
/// tensors. Brings what a step left stale up to date first, also of tensors that every rank has whole. Throws
/// RankError, BudgetError, DiskError.
TensorPin hold(c10::ArrayRef<at::Tensor> tensors);
/// Sums the gradients that came so far over ranks, with zeros for those that this rank lacks. All ranks call it
/// together.
void settle_gradients(const at::Tensor& parameter);
/// Inside a backward: sums gradients when it ends, also if it makes none on this rank. All ranks call it.
void expect_end_of_backward(const at::Tensor& parameter);

/// Holds the paged tensors among `tensors` whole, together, while it lives, for code that reads several addresses,
/// such as a compiled region. `writes` marks those that the code writes. Gradients of leaves among them become paged.
/// Throws BudgetError if they do not fit together, AccessError for tensors that such code may not read or write.
class RegionPin {
 public:
  RegionPin(c10::ArrayRef<at::Tensor> tensors, const std::vector<bool>& writes);
  /// Unpins after code that succeeded.
  void release();
  /// Unpins after code that failed.
  void drop();

 private:
  std::vector<LeafHold> leaves_;
  TensorPin pin_;
};

/// Pages `tensor` in the space of `other`, with a master if `other` has one. False if `other` is not paged, or
/// `tensor` cannot be.
bool page_like(at::Tensor& tensor, const at::Tensor& other);
/// The tensor that a module's state_dict() returns for this one: itself or its master, by the setting state_dict.
at::Tensor saved(const at::Tensor& tensor);
/// The dtype of a parameter's master and optimizer states.
c10::ScalarType dtype_of_states(const at::Tensor& parameter);
/// Whether both are paged, in one space.
bool in_one_space(const at::Tensor& tensor, const at::Tensor& other);
/// Whether it is an optimizer state stored in fewer bits than operators see (optimizer_dtype).
bool is_quantised(const at::Tensor& tensor);

}  // namespace zeropage
