// Windows: how an operator runs over tensors that are not whole in memory. All tensors have one shape and one dense
// layout, so in memory order element i of one belongs to element i of the others; a window is a range of elements
// that lies in one page of each. Pages are held one at a time, read ahead and written behind.
//
// [Note: bits at the edges] A vectorised kernel computes the last elements of a range with scalar code, whose
// rounding may differ (fused multiply-add). So a window may only be cut where PyTorch, running the whole tensor,
// would still be inside its vector loop: at a multiple of kVector elements from where PyTorch's own thread chunk
// begins. Where a page ends in between, the elements around its edge are gathered into a scratch vector, computed
// there, and put back. GPUs compute each element alone: there a window may be cut anywhere.
//
// [Note: shares] With ranks, each computes its own share alone wherever it can: wherever what is written lies over
// the ranks, and something among the operands is not whole here. Of partitioned tensors the share is at hand; of
// others the same elements are taken from the whole, by Stripes. Else what is not whole is gathered, page by page.
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
  std::size_t per = 1;  // elements of the other operands for each of this one: more where blocks share one
};

/// How PyTorch cuts a whole tensor of n elements among its threads.
enum class Chunking : std::uint8_t {
  iterator,  // TensorIterator: equal shares once n reaches its grain
  vectors,   // fused optimizers: shares of whole vectors, as if one chunk
};

/// Where windows lie and how each is shared among threads. Public for its tests.
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
  std::size_t done = 0;  // elements whose windows are behind: begins there, and goes on there after an error
};

/// Which memory windows lie in: that of the operands' device, or, of a device with memory of its own, that of the
/// host below it ([Note: updates in the host] in program.h).
enum class Where : std::uint8_t { on_device, in_host };

/// Calls `run` with one flat tensor an operand for consecutive windows that cover everything; of this rank's share,
/// if shares are enough ([Note: shares]). Several threads call it at once, on disjoint parts of a window; inside,
/// ATen runs on one thread. Throws BudgetError if the host's budget cannot hold one page of each operand. in_host:
/// the tensors are the CPU's; where pages cannot be had in the host, it goes on with the device's.
void for_each_window(c10::ArrayRef<Operand> operands, Chunking chunking,
                     c10::function_ref<void(c10::ArrayRef<at::Tensor>)> run, Progress* progress = nullptr,
                     Where where = Where::on_device);

/// Whether the segment can be an operand in the host.
bool reaches_host(const StorageSegment& segment);

/// to = from, page by page; both are paged, or one is ordinary memory.
void copy_windows(const at::Tensor& to, const at::Tensor& from);

/// The same over this rank's share of one tensor that is partitioned or stale, which is only read.
void for_each_window_of_share(const Operand& operand, c10::function_ref<void(c10::ArrayRef<at::Tensor>)> run);

/// Whether an operator that only reads `segment` can be spared gathering it: this rank holds its share alone.
bool holds_share_only(const StorageSegment* segment);

/// True if `tensor` can be an operand beside `shape`: same sizes, same device and dense strides, whole if paged.
bool is_operand(const at::Tensor& tensor, const at::Tensor& shape);
/// The strides of what a pointwise operator makes of such tensors: as TensorIterator has it, those of sizes of one
/// count for nothing.
c10::DimVector strides_of_result(const at::Tensor& like);
/// The same but for the device: enough for a copy.
bool lies_like(const at::Tensor& tensor, const at::Tensor& shape);

}  // namespace zeropage
