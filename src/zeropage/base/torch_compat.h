// Differences between releases of PyTorch, and access that PyTorch does not offer to code outside its tree. Nothing
// else in zeropage uses a private member.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <atomic>

namespace zeropage {

/// The key that routes every operator on a paged tensor to zeropage. PyTorch reserves it for code outside its tree.
inline constexpr auto kPagedKey = c10::DispatchKey::DeferredInit;
/// [Note: inner tensors] The second key of paged tensors, once a program has paged tensors that a subclass keeps
/// inside, as a DTensor its local tensor. PyTorch calls a subclass's __torch_dispatch__ with all keys above Python
/// excluded. Operators on inner tensors therefore reach zeropage by a key below it, for which PyTorch has no kernels.
/// Those for all backends count for it too, so zeropage registers its own for each operator that has one. An operator
/// of a library that is loaded later goes past them.
inline constexpr auto kInnerKey = c10::DispatchKey::CustomRNGKeyId;
inline constexpr c10::DispatchKeySet kPagedKeys({kPagedKey, kInnerKey});

}  // namespace zeropage

namespace zeropage::compat {

// Explicit instantiation may name private members ([temp.spec]/6); this one returns them.
template <class Tag, typename Tag::type Member>
struct Expose {
  friend constexpr typename Tag::type member_of(Tag) { return Member; }
};
struct ThrowOnImmutable {
  using type = bool c10::StorageImpl::*;
  friend constexpr type member_of(ThrowOnImmutable);
};
struct HasMutableCheck {
  using type = bool c10::StorageImpl::*;
  friend constexpr type member_of(HasMutableCheck);
};
struct PointerOfDataPtr {
  using type = c10::detail::UniqueVoidPtr c10::DataPtr::*;
  friend constexpr type member_of(PointerOfDataPtr);
};
struct DataOfPointer {
  using type = void* c10::detail::UniqueVoidPtr::*;
  friend constexpr type member_of(DataOfPointer);
};
template struct Expose<PointerOfDataPtr, &c10::DataPtr::ptr_>;
template struct Expose<DataOfPointer, &c10::detail::UniqueVoidPtr::data_>;
template struct Expose<ThrowOnImmutable, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Expose<HasMutableCheck, &c10::StorageImpl::has_mutable_data_ptr_check_>;

/// Installs a guard: while it is closed, reading the data pointer throws `message`.
inline void install_guard(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

/// Opens or closes an installed guard. Two stores, because this runs twice per operator and paged tensor. (torch 2.11
/// has no clear_data_ptr_access_error_msg_, and torch 2.13's frees the message.)
inline void set_guard(c10::StorageImpl& storage, bool closed) {
  storage.*member_of(ThrowOnImmutable{}) = closed;
  storage.*member_of(HasMutableCheck{}) = closed;
}

/// Sets the storage's data pointer. Its context and deleter stay untouched: another thread may be reading them, and
/// DataPtr's own members would set them to null for a moment.
inline void set_data(c10::StorageImpl& storage, void* data) {
  storage._mutable_data_ptr_no_checks().*member_of(PointerOfDataPtr{}).*member_of(DataOfPointer{}) = data;
}

struct KeySetAccess : c10::TensorImpl {
  static constexpr auto keys = &KeySetAccess::key_set_;
};

/// Whether paged tensors have both keys from now on ([Note: inner tensors]).
inline std::atomic<bool> pages_inner_tensors = false;

/// Gives a tensor the keys of paged tensors.
inline void add_keys(c10::TensorImpl& tensor) {
  const bool both = pages_inner_tensors.load(std::memory_order_relaxed);
  tensor.*KeySetAccess::keys = tensor.key_set() | (both ? kPagedKeys : c10::DispatchKeySet(kPagedKey));
}

/// Whether the stream is capturing a graph. torch 2.11 cannot tell; there the capture itself fails.
template <class Stream>
bool is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return false;
  }
}

/// Turns the tensor into `other`, on its device. set_data() alone accepts only some pairs of backends.
inline void become(at::TensorBase& tensor, const at::TensorBase& other) {
  tensor.unsafeGetTensorImpl()->*KeySetAccess::keys = other.key_set();
  tensor.set_data(other);
}

}  // namespace zeropage::compat
