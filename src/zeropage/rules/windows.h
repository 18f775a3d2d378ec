// Windows run an operator over tensors that are not whole in memory. All tensors have one shape and one dense layout,
// so in memory order element i of one belongs to element i of the others. A window is a range of elements within one
// page of each tensor. A walk holds one page of each at a time, prefetches the next and writes behind.
//
// [Note: bits at the edges] A vectorised kernel computes the last elements of a range with scalar code, which may
// round differently (fused multiply-add). A window may therefore end only where PyTorch, running the whole tensor,
// would still be inside its vector loop: at a multiple of kVector elements from the start of PyTorch's own thread
// chunk. If a page ends in between, the elements around its edge are gathered into a scratch vector, computed there,
// and written back. GPUs compute each element alone: there a window may end anywhere.
//
// [Note: shares] Each rank computes its own share alone under two conditions: ranks share all outputs, and at least
// one operand is not whole here. A partitioned tensor's share is here; Stripes finds the same elements in a whole
// tensor. Otherwise operands that are not whole are gathered, page by page.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>

#include <functional>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

struct Operand {
  at::Tensor tensor;
  StorageSegment* segment;  // null: an ordinary tensor in memory
  Access access;
  std::size_t per = 1;  // elements of the other operands for each of this one: more if blocks share one
};

/// How PyTorch divides a whole tensor of n elements among its threads.
enum class Chunking : std::uint8_t {
  iterator,  // TensorIterator: equal shares once n reaches its grain.
  vectors,   // Fused optimizers: shares of whole vectors, equivalent to one chunk.
};

/// A range of elements: a window, or one thread's part. Public for its tests.
struct Cut {
  std::size_t begin, end;
};
constexpr std::size_t kVector =
    64;  // elements; a multiple of two vectors of every dtype down to two bytes on AVX-512
/// The thread chunk of [0, elements) that holds `at`.
Cut chunk_of(std::size_t elements, std::size_t at, Chunking chunking, std::size_t threads);
/// The window that starts at `at` when the next page edge of any operand is `edge`.
Cut window_at(std::size_t at, std::size_t edge, Cut chunk, std::size_t vector = kVector);

struct Progress {
  /// Elements whose windows are done. The walk starts there, and resumes there after an error.
  std::size_t done = 0;
  /// The operands are a lasting stream (FrameCache::open_stream), so the walk is not announced.
  bool is_streamed = false;
  /// If not, the walk ends early at the first window whose pages are not in memory. Only for a stream.
  bool waits = true;
  /// The walk ends early after so many more windows.
  std::size_t windows = SIZE_MAX;
  /// How many threads the chunks are for. 0: it has not begun.
  std::size_t threads = 0;
};

/// The memory of the windows: that of the operands' device, or that of the host below a device with its own memory
/// ([Note: updates in the host] in program.h).
enum class Where : std::uint8_t { on_device, in_host };

/// Calls `run` with one flat tensor for each operand, for consecutive windows that cover all elements, or this rank's
/// share if that is enough ([Note: shares]). Several threads call it at once, on disjoint parts of a window; inside,
/// ATen runs on one thread. Returns whether all windows are done. Throws BudgetError if the host's budget cannot hold
/// one page of each operand. in_host: the tensors are the CPU's; if the host cannot hold the pages, the walk
/// continues on the device.
bool for_each_window(c10::ArrayRef<Operand> operands, Chunking chunking,
                     c10::function_ref<void(c10::ArrayRef<at::Tensor>)> run, Progress* progress = nullptr,
                     Where where = Where::on_device);

/// Tells a lasting stream's cache that a walk has done so many elements of the operand's segment.
void reach_in_stream(const Operand& operand, std::size_t done);

/// Whether the segment can be an operand in the host.
bool reaches_host(const StorageSegment& segment);

/// Copies `from` to `to` page by page. Both are paged, or one is ordinary memory.
void copy_windows(const at::Tensor& to, const at::Tensor& from);

/// Walks over this rank's share of one tensor that is partitioned or stale and only read.
void for_each_window_of_share(const Operand& operand, c10::function_ref<void(c10::ArrayRef<at::Tensor>)> run);

/// Whether this rank holds only its share of `segment`: an operator that only reads can then avoid gathering.
bool holds_share_only(const StorageSegment* segment);

/// True if `tensor` can be an operand together with `shape`: same sizes, device and dense strides, whole if paged.
bool is_operand(const at::Tensor& tensor, const at::Tensor& shape);
/// The strides of a pointwise operator's result for such tensors. Like TensorIterator, it ignores the strides of
/// dimensions of size one.
c10::DimVector strides_of_result(const at::Tensor& like);
/// Checks the same except the device: enough for a copy.
bool lies_like(const at::Tensor& tensor, const at::Tensor& shape);

}  // namespace zeropage
