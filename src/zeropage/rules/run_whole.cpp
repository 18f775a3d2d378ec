// The general path of a call: PyTorch's own kernel, with all paged arguments whole in memory.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/shared_casts.h"

namespace zeropage {
namespace {

/// Switches autocast's cache off. It keeps casts of leaves until autocast ends, so all paged weights would stay in
/// memory.
class NoCastCache {
 public:
  explicit NoCastCache(bool is_autocast) : switched_(is_autocast && at::autocast::is_autocast_cache_enabled()) {
    if (switched_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoCastCache() {
    if (switched_) at::autocast::set_autocast_cache_enabled(true);
  }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;

 private:
  bool switched_;
};

/// [Note: sizes] An operator with an `out=` of another size first sets the tensor's new size, and then enlarges the
/// storage. A paged storage cannot grow, so the operator throws, and the tensor would reach beyond its storage.
/// WrittenShapes therefore restores the sizes of all outputs.
class WrittenShapes {
 public:
  explicit WrittenShapes(const Call& call) {
    for (const PagedArgument& argument : call.paged) {
      if (argument.access == Access::read) continue;
      const at::Tensor& tensor = argument.tensor;
      shapes_.push_back({&tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()});
    }
  }
  void put_back() const {
    for (const Shape& shape : shapes_) {
      shape.tensor->unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
    }
  }

 private:
  struct Shape {
    const at::Tensor* tensor;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;
  };
  c10::SmallVector<Shape, 2> shapes_;
};

bool asks_for_larger_storage(const c10::Error& error) {
  return std::string_view(error.what_without_backtrace()).find("storage that is not resizable") !=
         std::string_view::npos;
}

/// Versions of the arguments that an operator declares as only read.
class ReadVersions {
 public:
  explicit ReadVersions(const Call& call) {
    for (const PagedArgument& argument : call.paged) {
      if (argument.access == Access::read && !argument.tensor.is_inference()) {
        read_.push_back({&argument, argument.tensor._version()});
      }
    }
  }
  /// The arguments that it wrote nevertheless. Call it while they are pinned.
  c10::SmallVector<PinRequest, 8> written() const {
    c10::SmallVector<PinRequest, 8> requests;
    for (const auto& [argument, version] : read_) {
      if (argument->tensor._version() != version) requests.push_back({argument->segment, Access::write});
    }
    return requests;
  }

 private:
  c10::SmallVector<std::pair<const PagedArgument*, std::int64_t>, 8> read_;
};

}  // namespace

void Call::redispatch() {
  const WrittenShapes shapes(*this);
  const Booking kernel(Spent::operators);
  try {
    op.redispatchBoxed(below, &stack);
  } catch (const c10::Error& error) {
    if (!asks_for_larger_storage(error)) throw;
    shapes.put_back();
    throw AccessError(
        "a paged tensor keeps the size it was made with, but this operator would make it larger; give out= a tensor "
        "of the result's shape, or use an ordinary tensor");
  }
}

/// Waits for a collective while its tensors are pinned. The program may wait for it once more.
static void await_collective(const Call& call) {
  const auto await_result = [](const at::Tensor& result) {
    static const auto wait = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                                 .typed<at::Tensor(const at::Tensor&)>();
    wait.call(result);
  };
  for (std::size_t i = call.first; i < call.stack.size(); ++i) {
    const c10::IValue& result = call.stack[i];
    if (result.isCustomClass()) {
      const auto work = result.toCustomClass<c10d::Work>();
      if (work) work->wait();  // none: NCCL orders what is not asynchronous by the stream alone
    } else if (call.name().starts_with("_c10d_functional")) {
      if (result.isTensor()) await_result(result.toTensor());
      if (result.isTensorList()) std::ranges::for_each(result.toTensorVector(), await_result);
    }
  }
}

/// Throws if a tensor that the operator wrote without declaring it had been rounded on its way here. The master would
/// take the rounding for something that the operator wrote, so what it wrote is dropped.
static void refuse_rounded(TensorPin& pin, c10::ArrayRef<PinRequest> written) {
  const auto is_rounded = [](const PinRequest& request) {
    return request.segment->cache()->is_gathered() && request.segment->cache()->is_coded(*request.segment);
  };
  if (std::ranges::none_of(written, is_rounded)) return;
  pin.release();
  for (const PinRequest& request : written) {
    if (is_rounded(request)) request.segment->cache()->gather_exactly(*request.segment);
  }
  throw AccessError(
      "an operator wrote a parameter that it declares to read alone, which gather_dtype = \"int8\" had rounded; "
      "write "
      "gather_dtype = \"auto\"");
}

void Call::run_whole() {
  c10::SmallVector<PinRequest, 8> requests;
  for (const PagedArgument& argument : paged) requests.push_back({argument.segment, argument.access});
  TensorPin pin = [&] {
    RECORD_FUNCTION("zeropage::pin", c10::ArrayRef<const c10::IValue>{});  // shows faults in torch.profiler
    return TensorPin(requests);
  }();
  const ReadVersions versions(*this);
  const bool is_autocast = autocasts(paged[0].tensor);
  const SharedCasts casts(*this, is_autocast);
  {
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKeys);
    const NoCastCache no_cache(is_autocast);
    redispatch();
    if (info.is_collective) await_collective(*this);
  }
  casts.share(*this);
  if (const auto written = versions.written(); !written.empty()) {
    refuse_rounded(pin, written);
    for (const PinRequest& request : written) undeclared.push_back(static_cast<StorageSegment*>(request.segment));
    TensorPin(written).release();
  }
  pin.release();
}

}  // namespace zeropage
