// Paged tensors: ordinary tensors whose storage holds a segment instead of data, and whose key set carries one more
// key, so that every operator that touches them comes to the fallback first.
//
// [Note: where a segment hangs] The segment is the context of the storage's DataPtr. It lives as long as the storage:
// when the last tensor dies, its pages are given back, with no table to clean. Views, detach() and saved tensors
// share the storage and inherit the key. Outside a pin the storage's pointer is null and guarded: raw access throws.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zeropage/pager/pager.h"

namespace zeropage {

inline constexpr auto kPagedKey = c10::DispatchKey::DeferredInit;

/// Where a role's tensors are born. `automatic`: on the device if it has memory of its own, and in the host, while
/// half of their budgets has room; else on disk.
enum class Placement : std::uint8_t { device, host, disk, automatic };

/// Operators that brought their tensors in whole although a rule is there for their kind: no slow path is silent.
class GeneralPath {
 public:
  void count(const std::string& name) {
    std::lock_guard lock(mutex_);
    ++counts_[name];
  }
  std::vector<std::pair<std::string, std::size_t>> counts() const {
    std::lock_guard lock(mutex_);
    return {counts_.begin(), counts_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::size_t> counts_;
};

/// What all tensors of one space share.
struct Domain {
  std::shared_ptr<Pager> pager;
  c10::Device device{c10::kCPU};
  std::size_t resident_below = 0;  // bytes; smaller tensors stay ordinary
  Placement placement[kRoles] = {};
  GeneralPath general_path;

  bool pages(std::size_t bytes) const { return bytes > 0 && bytes >= resident_below; }
};

class StorageSegment final : public Segment {
 public:
  StorageSegment(std::shared_ptr<Domain> domain, c10::StorageImpl* storage);

  const std::shared_ptr<Domain>& domain() const { return domain_; }
  /// Where the segment would lie if all paged tensors of the process lay in one address space: its own range, for
  /// code that tells shared tensors by their addresses. No memory is there.
  std::uint64_t virtual_address() const { return virtual_address_; }
  static void destroy(void* segment);  // the DataPtr's deleter

 protected:
  void expose(std::byte* data) override;
  void hide() override;

 private:
  void point_to(void* data);
  std::shared_ptr<Domain> domain_;
  c10::StorageImpl* storage_;
  std::uint64_t virtual_address_;
};

/// The segment behind `tensor`, or null if it is not paged. No lock, no lookup.
inline StorageSegment* segment_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPagedKey) || !tensor.has_storage()) return nullptr;
  const auto& data =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &StorageSegment::destroy ? static_cast<StorageSegment*>(data.get_context()) : nullptr;
}

/// True if `tensor` is all of its storage, each element once: its bytes in memory order are the segment's.
bool is_whole(const at::TensorBase& tensor);

/// A paged tensor that reads as zeros. Takes no part in autograd until it is told to. Strides must be dense.
at::Tensor make_paged(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      caffe2::TypeMeta dtype, Role role);

/// Makes an existing tensor paged, in place, moving its content home. True if it is paged now; false if it stays as
/// it is: too small, another device, not strided, a subclass, or its storage is shared with tensors we do not know
/// of.
bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role);

/// Segments of a set of tensors held in memory, exposed, while the guard lives.
class TensorPin {
 public:
  TensorPin() = default;
  explicit TensorPin(c10::ArrayRef<PinRequest> requests);
  TensorPin(TensorPin&& other) noexcept : requests_(std::move(other.requests_)) { other.requests_.clear(); }
  TensorPin& operator=(TensorPin&& other) noexcept {
    std::swap(requests_, other.requests_);
    return *this;
  }
  ~TensorPin();

 private:
  c10::SmallVector<PinRequest, 8> requests_;  // all of one pager after another's
};

// --- the init scope: factories on this thread make paged tensors ---

/// The domain whose scope is entered on this thread, or null.
const std::shared_ptr<Domain>& scope_domain();

class InitScope {
 public:
  explicit InitScope(std::shared_ptr<Domain> domain);
  ~InitScope();
  InitScope(const InitScope&) = delete;
  InitScope& operator=(const InitScope&) = delete;

 private:
  std::shared_ptr<Domain> outer_;
  bool outer_included_;
};

}  // namespace zeropage
